"""From configuration and weights to an mlx-lm model."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from mlx_eval.errors import ModelError
from mlx_eval.models.checkpoint import Checkpoint, build_model, new_model
from tests.tiny import SHAPE, oracle_logits, tiny_model

CONFIG: dict[str, Any] = {"model_type": "llama", "vocab_size": 330, **SHAPE}
IDS = [5, 9, 2, 77, 300]


def weights_of(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def test_the_weights_are_the_models() -> None:
    source = tiny_model()
    weights = weights_of(source)
    model = build_model(CONFIG, weights)
    assert np.array_equal(oracle_logits(model, IDS), oracle_logits(source, IDS))
    assert not model.training


def test_the_callers_weights_stay_as_they_were() -> None:
    """mlx-lm's qwen2 takes the head out of what it is given when the embedding is the head."""
    config = {**CONFIG, "model_type": "qwen2", "tie_word_embeddings": True}
    weights = weights_of(new_model(config)) | {"lm_head.weight": mx.zeros((330, 32))}
    build_model(config, weights)
    assert "lm_head.weight" in weights


def test_the_callers_configuration_stays_as_it_was() -> None:
    """mlx-lm's gemma3 writes the size of the vocabulary into the part that describes the text model."""
    text = {**SHAPE, "model_type": "gemma3_text", "head_dim": 8, "vocab_size": 1}
    config = {"model_type": "gemma3", "vocab_size": 330, "text_config": text}
    before = copy.deepcopy(config)
    assert weights_of(new_model(config))["language_model.model.embed_tokens.weight"].shape[0] == 330
    assert config == before


def test_the_models_own_renaming_is_applied() -> None:
    """mlx-lm's llama drops the rotary tables that old checkpoints carry."""
    weights = weights_of(tiny_model())
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = mx.zeros((4,))
    build_model(CONFIG, weights)


@pytest.mark.parametrize("bits", [4, 8])
def test_layers_with_scales_are_quantised_and_no_others(bits: int) -> None:
    source = tiny_model()
    weights = weights_of(source)
    changed = weights["model.layers.0.mlp.up_proj.weight"]
    packed = mx.quantize(changed, group_size=32, bits=bits)
    for suffix, array in zip(("weight", "scales", "biases"), packed, strict=True):
        weights[f"model.layers.0.mlp.up_proj.{suffix}"] = array
    config = {**CONFIG, "quantization": {"group_size": 32, "bits": bits}}
    model = build_model(config, weights)
    quantized = {
        path: layer for path, layer in model.named_modules() if isinstance(layer, nn.QuantizedLinear)
    }
    assert list(quantized) == ["model.layers.0.mlp.up_proj"]
    layer = quantized["model.layers.0.mlp.up_proj"]
    assert (layer.bits, layer.group_size) == (bits, 32)

    source.model.layers[0].mlp.up_proj.weight = mx.dequantize(*packed, group_size=32, bits=bits)
    # the same weights in another order of adding up: float32 rounding
    assert np.abs(oracle_logits(model, IDS) - oracle_logits(source, IDS)).max() < 1e-4


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"), "Missing 1 parameters"),
        (lambda weights: weights.update(surplus=mx.zeros((2,))), "Received 1 parameters not in model"),
        (lambda weights: weights.update({"model.norm.weight": mx.zeros((7,))}), "shape"),
    ],
    ids=["missing", "surplus", "misshapen"],
)
def test_weights_that_do_not_fit(change: Any, part: str) -> None:
    weights = weights_of(tiny_model())
    change(weights)
    with pytest.raises(ModelError, match="do not fit a model of type 'llama'") as caught:
        build_model(CONFIG, weights)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "model_type"),
    [
        ({**CONFIG, "model_type": "no_such_architecture"}, "'no_such_architecture'"),
        ({key: value for key, value in CONFIG.items() if key != "hidden_size"}, "'llama'"),
        ({**CONFIG, "num_attention_heads": 0}, "'llama'"),
        ({**CONFIG, "num_attention_heads": "four"}, "'llama'"),
        ({}, "None"),
    ],
    ids=["unknown type", "missing size", "zero heads", "words for numbers", "empty"],
)
def test_configurations_that_make_no_model(config: dict[str, Any], model_type: str) -> None:
    with pytest.raises(ModelError, match=f"cannot build a model of type {model_type}") as caught:
        new_model(config)
    assert isinstance(caught.value.__cause__, Exception), "what mlx-lm said stays to be seen"


def test_a_new_model_has_the_shapes_of_its_configuration() -> None:
    shapes = {name: array.shape for name, array in weights_of(new_model(CONFIG)).items()}
    assert shapes == {name: array.shape for name, array in weights_of(tiny_model()).items()}
    assert shapes["model.embed_tokens.weight"] == (330, SHAPE["hidden_size"])


def test_a_checkpoint_has_no_generation_config_of_its_own() -> None:
    one, other = (Checkpoint(CONFIG, {}, None) for _ in range(2))  # type: ignore[arg-type]
    assert one.generation_config == {}
    assert one.generation_config is not other.generation_config
