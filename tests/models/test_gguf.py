"""GGUF to an mlx-lm model: logits against transformers' own model of the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_eval.errors import ModelError
from mlx_eval.models.checkpoint import build_model
from mlx_eval.models.gguf import read_gguf

from .gguf_files import decoded, llama3_factors, write_model
from .tiny_transformers import CONFIGS, mlx_logits, tiny, torch_logits

pytest.importorskip("torch")

LOGITS = 1e-4
"""Both sides compute in float32; logits are of the order of 1 and agree to some 1e-6."""

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 500.0}
LINEAR = {"rope_type": "linear", "factor": 2.5, "rope_theta": 500.0}
GEMMA3_SIX = {
    **CONFIGS["gemma3_text"],
    "num_hidden_layers": 7,
    "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 4000.0},
    },
    "query_pre_attn_scalar": 8,
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # name: transformers' configuration, changes to it, changes to the keys
    "llama": ("llama", {}, {}),
    "llama-tied": ("llama-tied", {}, {}),
    "llama-biased": ("llama-biased", {}, {}),
    "llama-wide-heads": ("llama", {"head_dim": 16}, {}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}, {}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN}, {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False}, {}),
    "gemma": ("gemma", {}, {}),
    "gemma2": ("gemma2", {}, {}),
    "gemma3": (
        "gemma3_text",
        {"query_pre_attn_scalar": 8},
        {"gemma3.attention.sliding_window_pattern": 2, "gemma3.rope.freq_base_swa": 600.0},
    ),
    "gemma3-usual-pattern": ("gemma3_text", GEMMA3_SIX, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    name, changes, keys = CASES[case]
    original = tiny(name, **changes)
    path = write_model(tmp_path / "model.gguf", original, changes=keys)
    checkpoint = read_gguf(path, keep_quantized=False)
    logits = mlx_logits(build_model(checkpoint.config, checkpoint.weights))
    np.testing.assert_allclose(logits, torch_logits(original), atol=LOGITS)


@pytest.mark.parametrize("case", CASES)
def test_the_configuration_means_the_same_to_transformers(case: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    name, changes, keys = CASES[case]
    original = tiny(name, **changes).config
    path = write_model(tmp_path / "model.gguf", tiny(name, **changes), changes=keys)
    config = read_gguf(path, keep_quantized=False).config
    written = AutoConfig.for_model(**config)
    assert written.num_hidden_layers == original.num_hidden_layers
    assert written.tie_word_embeddings == original.tie_word_embeddings
    rope = {key: value for key, value in original.rope_parameters.items() if value is not None}
    for key, value in rope.items():
        expected = value if not isinstance(value, dict) else {**value}
        found = written.rope_parameters[key]
        assert found == expected if not isinstance(found, dict) else found.items() >= expected.items(), key


@pytest.mark.parametrize(
    ("theta", "original_context", "kind"), [(500_000.0, 8192, "llama3"), (300.0, 32, "longrope")]
)
def test_llama3_scaling_comes_from_the_factors(
    theta: float, original_context: int, kind: str, tmp_path: Path
) -> None:
    rope = {
        **CONFIGS["llama-scaled"]["rope_scaling"],
        "rope_theta": theta,
        "original_max_position_embeddings": original_context,
    }
    # heads wide enough to have short, middle and long waves in both
    original = tiny("llama", rope_parameters=rope, head_dim=32)
    factors = llama3_factors(rope, 32)
    assert ((factors > 1) & (factors < 8)).any()
    assert factors[0] == 1
    assert factors[-1] == 8
    path = write_model(tmp_path / "model.gguf", original, tensors={"rope_freqs.weight": factors})
    checkpoint = read_gguf(path, keep_quantized=False)
    assert checkpoint.config["rope_scaling"]["rope_type"] == kind
    if kind == "llama3":
        assert checkpoint.config["rope_scaling"] == {
            key: value for key, value in rope.items() if key != "rope_theta"
        }
    logits = mlx_logits(build_model(checkpoint.config, checkpoint.weights))
    np.testing.assert_allclose(logits, torch_logits(original), atol=LOGITS)


MIXED = {"token_embd": "Q8_0", "attn_q": "Q4_0", "attn_k": "Q4_1", "ffn_up": "Q5_0", "ffn_gate": "Q5_1"}
WIDE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256}
"""Rows that hold whole super-blocks of 256 weights."""


def mixed_kinds(name: str) -> str:
    """A type for each tensor as `Q4_K_M` files mix them; the rest in one that MLX has no layout for."""
    base = name.removesuffix(".weight").rsplit(".", 1)[-1]
    return MIXED.get(base, "Q6_K" if base == "ffn_down" else "Q4_K")


def mixed_model(tmp_path: Path, name: str = "llama") -> tuple[Path, Any]:
    """A file of mixed types, and transformers' model of the values that are left in it."""
    import torch

    from .gguf_files import permuted

    original = tiny(name, **WIDE)
    path = write_model(tmp_path / "mixed.gguf", original, kind=mixed_kinds)
    import gguf

    arch = next(number for number, each in gguf.MODEL_ARCH_NAMES.items() if each == name)
    names = gguf.get_tensor_name_map(arch, 3)
    heads = {"q_proj": original.config.num_attention_heads, "k_proj": original.config.num_key_value_heads}
    with torch.no_grad():
        for key, parameter in original.named_parameters():
            if parameter.ndim < 2:
                continue
            target = names.get_name(key, try_suffixes=(".weight",))
            assert target is not None
            values = parameter.numpy()
            count = next((n for part, n in heads.items() if part in key and name == "llama"), None)
            stored = decoded(permuted(values, count) if count else values, mixed_kinds(target))
            if count:  # the inverse of `permuted`, spelled by index
                index = permuted(np.arange(len(values)), count)
                back = np.empty_like(stored)
                back[index] = stored
                stored = back
            parameter.copy_(torch.from_numpy(stored.copy()))
    return path, original


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_dequantised_weights_give_the_logits_of_their_values(name: str, tmp_path: Path) -> None:
    path, expected = mixed_model(tmp_path, name)
    checkpoint = read_gguf(path, keep_quantized=False)
    assert {array.dtype for array in checkpoint.weights.values()} == {mx.float32}
    assert "quantization" not in checkpoint.config
    logits = mlx_logits(build_model(checkpoint.config, checkpoint.weights))
    np.testing.assert_allclose(logits, torch_logits(expected), atol=LOGITS)


def test_kept_layers_have_the_bits_of_their_type(tmp_path: Path) -> None:
    path, expected = mixed_model(tmp_path)
    checkpoint = read_gguf(path, keep_quantized=True)
    quantization = checkpoint.config["quantization"]
    assert (quantization["group_size"], quantization["bits"]) == (
        32,
        4,
    )  # as many layers have 5: the first wins
    assert quantization["model.embed_tokens"] == {"group_size": 32, "bits": 8}
    assert quantization["model.layers.1.mlp.up_proj"] == {"group_size": 32, "bits": 5}
    assert "model.layers.1.self_attn.q_proj" not in quantization
    model: Any = build_model(checkpoint.config, checkpoint.weights)
    layer = model.model.layers[1]
    assert model.model.embed_tokens.bits == 8
    assert (layer.self_attn.q_proj.bits, layer.mlp.up_proj.bits) == (4, 5)
    assert not hasattr(layer.mlp.down_proj, "bits")
    assert layer.mlp.down_proj.weight.dtype == mx.float16
    assert layer.input_layernorm.weight.dtype == mx.float16  # else activations would become float32
    logits = torch_logits(expected)
    # float16 has 11 bits: a rounding in each of some 20 steps, relative to the largest logit
    np.testing.assert_allclose(mlx_logits(model), logits, atol=0.02 * np.abs(logits).max())


def test_kept_weights_are_exact(tmp_path: Path) -> None:
    """Scales widened to float32 turn the kept layers into those of a float32 reading."""
    path, _ = mixed_model(tmp_path)
    kept = read_gguf(path, keep_quantized=True).weights
    plain = read_gguf(path, keep_quantized=False).weights
    layers = [name.removesuffix(".scales") for name in kept if name.endswith(".scales")]
    assert len(layers) == 1 + 4 * 3
    for layer in layers:
        bits = kept[f"{layer}.weight"].shape[-1] * 32 // plain[f"{layer}.weight"].shape[-1]
        scales, biases = (kept[f"{layer}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
        values = mx.dequantize(kept[f"{layer}.weight"], scales, biases, group_size=32, bits=bits)
        assert mx.array_equal(values, plain[f"{layer}.weight"]).item(), layer


def test_mlx_lm_loads_the_quantised_checkpoint_from_a_directory(tmp_path: Path) -> None:
    from mlx_lm.utils import load_model

    path, _ = mixed_model(tmp_path)
    checkpoint = read_gguf(path, keep_quantized=True)
    here = mlx_logits(build_model(checkpoint.config, checkpoint.weights))
    directory = tmp_path / "directory"
    directory.mkdir()
    mx.save_safetensors(str(directory / "model.safetensors"), checkpoint.weights)
    (directory / "config.json").write_text(json.dumps(checkpoint.config))
    model, _ = load_model(directory)
    np.testing.assert_array_equal(mlx_logits(model), here)


@pytest.mark.parametrize(("kind", "dtype"), [("F32", mx.float32), ("F16", mx.float16), ("BF16", mx.bfloat16)])
def test_a_file_of_floats_keeps_its_type(kind: str, dtype: mx.Dtype, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", tiny("qwen2"), kind=lambda _: kind)
    kept = read_gguf(path, keep_quantized=True)
    assert {array.dtype for array in kept.weights.values()} == {dtype}
    assert kept.config["torch_dtype"] == str(dtype).removeprefix("mlx.core.")
    wide = read_gguf(path, keep_quantized=False)
    assert {array.dtype for array in wide.weights.values()} == {mx.float32}
    for name, array in wide.weights.items():
        assert mx.array_equal(array.astype(dtype), kept.weights[name]).item(), name


def test_per_layer_lists_of_one_number_count_as_that_number(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "m.gguf", tiny("llama"), changes={"llama.attention.head_count_kv": [2, 2, 2]}
    )
    assert read_gguf(path, keep_quantized=False).config["num_key_value_heads"] == 2


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "blocks": (
        "llama",
        {"llama.block_count": 4_000_000_000},
        "block_count holds 4000000000, .* the 3 of the",
    ),
    "experts": ("llama", {"llama.expert_count": 4}, "mixture of experts"),
    "heads": (
        "llama",
        {"llama.attention.head_count_kv": [2, 1, 2]},
        "head_count_kv holds .* one whole number",
    ),
    "rotated part": ("llama", {"llama.rope.dimension_count": 4}, "rope.dimension_count holds 4, expected 8"),
    "scaling": (
        "llama",
        {"llama.rope.scaling.type": "su", "llama.rope.scaling.factor": 2.0},
        "'su', expected",
    ),
    "yarn": (
        "llama",
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 2.0,
            "llama.rope.scaling.attn_factor": 0.5,
        },
        "attn_factor holds 0.5",
    ),
    "qwen2 heads": (
        "qwen2",
        {"qwen2.attention.key_length": 16, "qwen2.attention.value_length": 16},
        "heads of 16",
    ),
    "caps": ("gemma3_text", {"gemma3.final_logit_softcapping": 30.0}, "caps no logits"),
    "layers": ("gemma3_text", {}, "3 layers are fewer than one round of 6"),
    "text as number": (
        "llama",
        {"llama.context_length": "long"},
        "context_length holds 'long', expected one whole",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_mlx_lm_would_compute_wrongly_is_refused(case: str, tmp_path: Path) -> None:
    name, keys, message = REFUSED[case]
    path = write_model(tmp_path / "model.gguf", tiny(name), changes=keys)
    with pytest.raises(ModelError, match=message):
        read_gguf(path, keep_quantized=False)


NEEDED = (
    "llama.block_count",
    "llama.context_length",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "llama.attention.head_count",
    "llama.attention.layer_norm_rms_epsilon",
    "tokenizer.ggml.model",
    "tokenizer.ggml.pre",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.eos_token_id",
)


@pytest.mark.parametrize("key", NEEDED)
def test_a_missing_key_is_named(key: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", tiny("llama"), dropped=[key])
    with pytest.raises(ModelError, match=f"no key {key}") as error:
        read_gguf(path, keep_quantized=False)
    assert "\n" not in str(error.value)


def test_the_rotary_base_is_10000_where_llama_names_none(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", tiny("llama"), dropped=["llama.rope.freq_base"])
    assert read_gguf(path, keep_quantized=False).config["rope_theta"] == 10_000.0
    path = write_model(tmp_path / "qwen.gguf", tiny("qwen3"), dropped=["qwen3.rope.freq_base"])
    with pytest.raises(ModelError, match=r"no key qwen3\.rope\.freq_base"):
        read_gguf(path, keep_quantized=False)


def test_a_tensor_of_another_architecture_is_named(tmp_path: Path) -> None:
    extra = {"blk.0.ssm_a": np.zeros(4, np.float32)}
    path = write_model(tmp_path / "model.gguf", tiny("llama"), tensors=extra)
    with pytest.raises(ModelError, match=r"tensor blk\.0\.ssm_a does not belong"):
        read_gguf(path, keep_quantized=False)


def test_more_tokens_than_embeddings_are_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", tiny("llama", vocab_size=299))
    with pytest.raises(ModelError, match="at most 299 tokens"):
        read_gguf(path, keep_quantized=False)


def test_the_generation_configuration_has_every_end(tmp_path: Path) -> None:
    changes = {"tokenizer.ggml.eot_token_id": 256, "tokenizer.ggml.eom_token_id": 258}
    path = write_model(tmp_path / "model.gguf", tiny("llama"), changes=changes)
    checkpoint = read_gguf(path, keep_quantized=False)
    assert checkpoint.generation_config == {
        "bos_token_id": 256,
        "pad_token_id": 258,
        "eos_token_id": [257, 256, 258],
    }
    assert checkpoint.config["eos_token_id"] == [257, 256, 258]
