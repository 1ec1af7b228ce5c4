from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from mlx_eval.errors import ModelError
from mlx_eval.models.layout import (
    SAME_LAYOUT,
    hugging_face_weights,
    mlx_config,
    named_arrays,
    published_names,
)

from .tiny_transformers import HEADS_OF_8

OTHER_KEYS: dict[str, dict[str, Any]] = {
    "phi3": {"original_max_position_embeddings": 128},
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5, "rope_theta": 10000.0},
    "ernie4_5": {"use_bias": False},
    "gemma2": {"query_pre_attn_scalar": 8},
}


@pytest.mark.parametrize("model_type", sorted(SAME_LAYOUT))
def test_same_layout_is_the_same(model_type: str) -> None:
    """mlx-lm's parameters have transformers' names and shapes, and `sanitize` changes no value."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from mlx_lm.utils import _get_classes
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**HEADS_OF_8, **OTHER_KEYS.get(model_type, {})}
    hf_config = AutoConfig.for_model(model_type, **settings)
    config = mlx_config(hf_config.to_dict())
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(hf_config).state_dict()
    weights = {
        name: mx.arange(tensor.numel(), dtype=mx.float32).reshape(tuple(tensor.shape))
        for name, tensor in state.items()
    }
    if config["tie_word_embeddings"]:
        weights.pop("lm_head.weight", None)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    sanitized = model.sanitize(dict(weights)) if hasattr(model, "sanitize") else weights
    model.load_weights(list(sanitized.items()), strict=True)
    written = hugging_face_weights(model, model_type)
    assert written.keys() == weights.keys()
    for name, array in weights.items():
        assert mx.array_equal(written[name], array), name


def test_named_arrays() -> None:
    assert list(named_arrays(nn.Sequential(nn.Linear(2, 3, bias=False)))) == ["layers.0.weight"]


# --- configurations --------------------------------------------------------------------------------


def test_rotary_keys_of_transformers_5() -> None:
    config = {"model_type": "llama", "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert mlx_config(config) == {**config, "rope_theta": 5e5}
    assert "rope_theta" not in config  # the caller's own is not touched


def test_rotary_scaling_of_transformers_5() -> None:
    rope = {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}
    config = mlx_config({"model_type": "llama", "rope_parameters": rope, "rope_scaling": None})
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_given_keys_win() -> None:
    config = {"model_type": "llama", "rope_theta": 7.0, "rope_parameters": {"rope_theta": 8.0}}
    assert mlx_config(config)["rope_theta"] == 7.0


def test_rotary_keys_by_layer_type() -> None:
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = mlx_config({"model_type": "gemma3_text", "rope_parameters": rope})
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 1e4)


def test_neox_keys() -> None:
    rope = {"rope_theta": 3e3, "partial_rotary_factor": 0.5, "rope_type": "default"}
    config = mlx_config({"model_type": "gpt_neox", "rope_parameters": rope})
    assert (config["rotary_emb_base"], config["rotary_pct"]) == (3e3, 0.5)


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("kinds", "pattern"),
    [
        ([SLIDING, FULL, SLIDING, FULL], 2),
        ([SLIDING, SLIDING, FULL, SLIDING], 3),
        ([FULL, FULL], 1),
        ([SLIDING, SLIDING], 3),
    ],
)
def test_sliding_window_pattern(kinds: list[str], pattern: int) -> None:
    config = mlx_config({"model_type": "gemma3_text", "layer_types": kinds})
    assert config["sliding_window_pattern"] == pattern
    assert [(index + 1) % pattern == 0 for index in range(len(kinds))] == [kind == FULL for kind in kinds]


def test_irregular_layer_types_are_refused() -> None:
    with pytest.raises(ModelError, match=r"layers 0, 1 of 3"):
        mlx_config({"model_type": "gemma3_text", "layer_types": [FULL, FULL, SLIDING]})


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("llama", "hidden_act", "gelu"),
        ("qwen2", "use_sliding_window", True),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("gpt_neox", "hidden_act", "relu"),
    ],
)
def test_what_mlx_lm_would_leave_out_is_refused(model_type: str, key: str, value: Any) -> None:
    with pytest.raises(ModelError, match=f"{model_type} with {key}={value!r}"):
        mlx_config({"model_type": model_type, key: value})


# --- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "name", "published"),
    [
        ("llama", "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("llama", "layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("llama", "model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("gpt2", "transformer.h.0.ln_1.weight", "h.0.ln_1.weight"),
        ("gpt2", "h.0.ln_1.weight", "h.0.ln_1.weight"),
        ("gpt_neox", "gpt_neox.layers.0.x", "gpt_neox.layers.0.x"),
        ("gpt_neox", "layers.0.x", "gpt_neox.layers.0.x"),
    ],
)
def test_published_names(model_type: str, name: str, published: str) -> None:
    assert published_names(model_type, [name], ["model.layers.0.x"]) == {name: published}


def test_names_of_mlx_lm_stay() -> None:
    names = ["model.h.0.ln_1.weight", "model.h.0.attn.c_attn.scales"]
    assert published_names("gpt2", names, ["model.h.0.ln_1.weight"]) == dict(zip(names, names, strict=True))


def test_a_head_has_no_base_prefix() -> None:
    names = ["layers.0.x", "lm_head.weight"]
    assert published_names("llama", names, ["model.layers.0.x"]) == {
        "layers.0.x": "model.layers.0.x",
        "lm_head.weight": "lm_head.weight",
    }
    assert published_names("gpt_neox", names, ["model.h.0.x"])["lm_head.weight"] == "embed_out.weight"
