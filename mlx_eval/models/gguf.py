"""A model from one GGUF file: configuration, weights and tokenizer, all from its metadata and tensors.

    gguf_file       the container: keys, and where the tensors lie
    gguf_config     keys and tensor names to Hugging Face's (gguf_rope: scaled positions)
    gguf_weights    tensor bytes to MLX arrays
    gguf_tokenizer  vocabulary to a transformers tokenizer (gguf_pieces: SentencePiece's merges)

This module joins them, tensor by tensor: beside the file, which is mapped and not read as a whole, there
is one copy of the weights and the working memory of one tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_eval.models.checkpoint import Checkpoint
from mlx_eval.models.gguf_config import architecture_of, hugging_face_name, model_config, row_order
from mlx_eval.models.gguf_file import GGUFFile, Tensor, read_file
from mlx_eval.models.gguf_tokenizer import end_ids, read_tokenizer, read_vocabulary
from mlx_eval.models.gguf_weights import (
    GROUP_SIZE,
    check_types,
    float_dtype,
    permute_rows,
    read_float32,
    read_quantized,
)


def read_gguf(path: Path, *, keep_quantized: bool) -> Checkpoint:
    """Read a model from a GGUF file.

    Args:
        path: the file.
        keep_quantized: keep Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 matrices as they are, in MLX's layout, with
            everything else in one type: float32 or bfloat16 where most weights of the file are that,
            float16 otherwise. False: everything in float32, de-quantised in float32 arithmetic.

    Raises:
        ModelError: the file is missing, damaged, cut short or no GGUF; its architecture, tokenizer or an
            element type is not known; or its metadata lacks a key.
    """
    file = read_file(path)
    checkpoint, tensors = _read_head(file)
    weights, bits = _read_weights(file, tensors, keep_quantized)
    config = checkpoint.config
    if bits:
        config["quantization"] = _quantization(bits)
    dtype = float_dtype(tensors.values()) if keep_quantized else mx.float32
    config["torch_dtype"] = str(dtype).removeprefix("mlx.core.")
    return replace(checkpoint, weights=weights)


def read_gguf_outline(path: Path) -> Checkpoint:
    """The same without weights: only the file's header is read.

    Raises:
        ModelError: as `read_gguf`, but for what only the tensors show.
    """
    file = read_file(path)
    checkpoint, tensors = _read_head(file)
    checkpoint.config["torch_dtype"] = str(float_dtype(tensors.values())).removeprefix("mlx.core.")
    return checkpoint


def _read_head(file: GGUFFile) -> tuple[Checkpoint, dict[str, Tensor]]:
    """Everything but the weights, and where those are, by Hugging Face's names."""
    config = model_config(file)
    names = {name: hugging_face_name(file, name) for name in file.tensors}
    tensors = {target: file.tensors[name] for name, target in names.items() if target is not None}
    check_types(tensors.values())
    vocabulary = read_vocabulary(file)
    if len(vocabulary.tokens) > config["vocab_size"]:
        raise file.wrong_value("tokenizer.ggml.tokens", f"at most {config['vocab_size']} tokens, as embedded")
    tokenizer = read_tokenizer(file, config["max_position_embeddings"])
    ends = end_ids(file, vocabulary)
    config |= _token_ids(tokenizer, ends)
    return Checkpoint(config, {}, tokenizer, _token_ids(tokenizer, ends)), tensors


def _read_weights(
    file: GGUFFile, tensors: Mapping[str, Tensor], keep_quantized: bool
) -> tuple[dict[str, mx.array], dict[str, int]]:
    """Arrays by Hugging Face's names, and the bits of each layer that stays quantised."""
    dtype = float_dtype(tensors.values()) if keep_quantized else mx.float32
    offset = architecture_of(file).norm_offset
    weights: dict[str, mx.array] = {}
    bits: dict[str, int] = {}
    for name, stored in tensors.items():
        order = row_order(file, stored)
        tensor = stored if order is None else permute_rows(stored, order)
        quantized = read_quantized(tensor) if keep_quantized else None
        if quantized is not None:
            layer = name.removesuffix(".weight")
            weights[name] = quantized.weight
            weights[f"{layer}.scales"] = quantized.scales
            weights[f"{layer}.biases"] = quantized.biases
            bits[layer] = quantized.bits
            continue
        values = read_float32(tensor)
        if offset and name.endswith("norm.weight"):
            values = values - offset
        weights[name] = values.astype(dtype)
        mx.eval(weights[name])  # else the float32 values of all tensors would wait for it
    return weights, bits


def _quantization(bits: Mapping[str, int]) -> dict[str, Any]:
    """mlx-lm's `quantization` entry: the commonest width for all, the layers of another one by name."""
    usual = Counter(bits.values()).most_common(1)[0][0]
    others = {
        layer: {"group_size": GROUP_SIZE, "bits": width} for layer, width in bits.items() if width != usual
    }
    return {"group_size": GROUP_SIZE, "bits": usual, **others}


def _token_ids(tokenizer: Any, ends: list[int]) -> dict[str, Any]:
    """The special ids, as config.json and generation_config.json both have them."""
    ids = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return {name: value for name, value in ids.items() if value is not None}
