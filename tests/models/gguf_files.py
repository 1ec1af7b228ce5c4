"""Writes tiny GGUF files the way llama.cpp's converters do, for the tests of reading them.

Names come from the gguf package's own table, q and k are permuted and Gemma's norms shifted as in
convert_hf_to_gguf.py: none of it is shared with the code under test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

ARCHITECTURES = {"gemma3_text": "gemma3"}
"""GGUF's names of those that Hugging Face calls otherwise."""
NUM_TOKENS = 300


def write_model(
    path: Path,
    model: Any,
    *,
    kind: Callable[[str], str] = lambda _: "F32",
    changes: Mapping[str, Any] | None = None,
    dropped: Iterable[str] = (),
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write a transformers model with a byte-level tokenizer.

    Args:
        path: the file.
        model: a transformers model of a known architecture.
        kind: ggml's type for each matrix, by its GGUF name.
        changes: keys to set otherwise, or beside.
        dropped: keys to leave out.
        tensors: further tensors, by GGUF's names.
    """
    config = model.config.to_dict()
    arch = ARCHITECTURES.get(config["model_type"], config["model_type"])
    keys = {**metadata(arch, config), **byte_tokenizer(), **(changes or {})}
    weights = converted(arch, config, {name: p.detach().numpy() for name, p in model.named_parameters()})
    weights |= tensors or {}
    kept = {key: value for key, value in keys.items() if key not in set(dropped)}
    return write_file(path, arch, kept, weights, kind)


def write_file(
    path: Path,
    arch: str,
    keys: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    kind: Callable[[str], str] = lambda _: "F32",
) -> Path:
    """Write keys and float32 tensors, matrices as `kind` says."""
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(path, arch)
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in keys.items():
        add[type(value)](key, value)
    for name, values in tensors.items():
        type_name = kind(name) if values.ndim == 2 else "F32"
        data = encoded(values, type_name)
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[type_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def encoded(values: np.ndarray, type_name: str) -> np.ndarray:
    """The values as ggml stores them; types that gguf cannot make get random blocks of sane scales."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import quantize

    kind = GGMLQuantizationType[type_name]
    try:
        return np.asarray(quantize(np.ascontiguousarray(values, dtype=np.float32), kind))
    except NotImplementedError:
        block, size = GGML_QUANT_SIZES[kind]
        rng = np.random.default_rng(values.size)
        rows = rng.integers(0, 256, (values.shape[0], values.shape[1] // block, size)).astype(np.uint8)
        scale = np.frombuffer(np.float16(0.0001).tobytes(), np.uint8)
        for offset in SCALE_OFFSETS[type_name]:
            rows[:, :, offset : offset + 2] = scale
        return rows.reshape(values.shape[0], -1)


SCALE_OFFSETS = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
}
"""Where a block has its float16 scales (ggml-common.h)."""


def decoded(values: np.ndarray, type_name: str) -> np.ndarray:
    """What is left of the values after `encoded`, by the gguf package, in float32."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return np.asarray(dequantize(encoded(values, type_name), GGMLQuantizationType[type_name]))


def converted(arch: str, config: Mapping[str, Any], state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Hugging Face's weights under GGUF's names, in GGUF's layout."""
    import gguf

    number = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    result: dict[str, np.ndarray] = {}
    for name, values in state.items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        shifted = values + 1 if arch.startswith("gemma") and name.endswith("norm.weight") else values
        if arch == "llama" and ".q_proj." in name:
            shifted = permuted(shifted, config["num_attention_heads"])
        if arch == "llama" and ".k_proj." in name:
            shifted = permuted(shifted, config["num_key_value_heads"])
        result[target] = shifted
    return result


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in the order that llama.cpp rotates."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def metadata(arch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The model's keys as the converters write them."""
    rope = config["rope_parameters"]
    whole = rope.get("full_attention", rope)
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(whole["rope_theta"]),
    }
    if config.get("head_dim"):
        keys |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    if whole["rope_type"] in ("linear", "yarn"):
        keys |= {"rope.scaling.type": whole["rope_type"], "rope.scaling.factor": float(whole["factor"])}
    if whole["rope_type"] == "yarn":
        keys["rope.scaling.original_context_length"] = whole["original_max_position_embeddings"]
    if arch in ("gemma2", "gemma3"):
        keys["attention.sliding_window"] = config["sliding_window"]
    if arch == "gemma2":
        keys["attn_logit_softcapping"] = config["attn_logit_softcapping"]
        keys["final_logit_softcapping"] = config["final_logit_softcapping"]
    return {f"{arch}.{key}": value for key, value in keys.items()}


def llama3_factors(rope: Mapping[str, Any], head_dim: int) -> np.ndarray:
    """The tensor `rope_freqs.weight` as the converter computes it from Llama 3's scaling."""
    long_wave = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    short_wave = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    factors = []
    for i in range(0, head_dim, 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        share = (rope["original_max_position_embeddings"] / wave - rope["low_freq_factor"]) / (
            rope["high_freq_factor"] - rope["low_freq_factor"]
        )
        if wave < short_wave:
            factors.append(1.0)
        elif wave > long_wave:
            factors.append(rope["factor"])
        else:
            factors.append(1 / ((1 - share) / rope["factor"] + share))
    return np.array(factors, dtype=np.float32)


def byte_tokenizer() -> dict[str, Any]:
    """Keys of a byte-level tokenizer without merges to speak of: 256 bytes, specials, padding."""
    from tokenizers import pre_tokenizers

    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += ["<bos>", "<eos>", "<pad>", "Ġt"]
    types = [1] * 256 + [3, 3, 3, 1]
    padding = NUM_TOKENS - len(tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens + [f"[PAD{i}]" for i in range(padding)],
        "tokenizer.ggml.token_type": types + [5] * padding,
        "tokenizer.ggml.merges": ["Ġ t"],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.ggml.padding_token_id": 258,
    }
