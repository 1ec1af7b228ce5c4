"""Tensor bytes to MLX arrays: what MLX can keep quantised is repacked, the rest is de-quantised.

Knows ggml's block layouts and MLX's; knows no model and no names. Types that MLX's affine layout holds
exactly are repacked here rather than by `mx.load`: that refuses the whole file for one tensor of another
type (`gguf_tensor_to_f16 failed`), and reads all of it at once. What is repacked equals what `mx.load`
gives bit for bit, where it reads the type. Everything else goes through the `gguf` package.

Layouts: ggml/src/ggml-common.h and ggml-quants.c of https://github.com/ggml-org/ggml. A block is 32 weights.

    Q4_0  scale f16, 16 bytes                        (q - 8) * scale
    Q4_1  scale f16, minimum f16, 16 bytes           q * scale + minimum
    Q5_0  scale f16, 32 high bits, 16 bytes          (q - 16) * scale
    Q5_1  scale f16, minimum f16, 32 high bits, …    q * scale + minimum
    Q8_0  scale f16, 32 signed bytes                 q * scale

The low four bits of weight j are in the lower half of byte j for j < 16, in the upper half of byte
j - 16 for the others. MLX: q * scale + bias, q unsigned, its bits one after the other, lowest first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np

from mlx_eval.errors import ModelError
from mlx_eval.models.gguf_file import Tensor

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

GROUP_SIZE: Final = 32
"""Weights that share a scale in every layout that is kept: ggml's block."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where a ggml block of 32 weights has what."""

    bits: int
    zero: int
    """The quantised value that stands for 0, where the block has no minimum."""
    has_minimum: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of a block."""
        return 2 + 2 * self.has_minimum + GROUP_SIZE * self.bits // 8


KEPT: Final[Mapping[str, BlockLayout]] = {
    "Q4_0": BlockLayout(4, 8),
    "Q4_1": BlockLayout(4, 0, has_minimum=True),
    "Q5_0": BlockLayout(5, 16),
    "Q5_1": BlockLayout(5, 0, has_minimum=True),
    "Q8_0": BlockLayout(8, 128),
}
FLOATS: Final[Mapping[str, mx.Dtype]] = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix in MLX's affine layout."""

    weight: mx.array
    """[rows, columns * bits / 32] uint32."""
    scales: mx.array
    """[rows, columns / 32] float16."""
    biases: mx.array
    bits: int


def check_types(tensors: Iterable[Tensor]) -> None:
    """Refuse element types that neither MLX nor the gguf package reads, before anything is decoded."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    first = {tensor.type_name: tensor.name for tensor in reversed(list(tensors))}
    for type_name, name in first.items():
        if type_name in KEPT or type_name in FLOATS or type_name == "F64":
            continue
        kind = GGMLQuantizationType[type_name]
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
        except NotImplementedError:
            raise ModelError(
                f"tensor {name} has the element type {type_name}, which neither MLX nor the gguf package "
                "reads; quantise the model to another type"
            ) from None


def float_dtype(tensors: Iterable[Tensor]) -> mx.Dtype:
    """The type that unquantised weights have beside the quantised ones of the same file.

    It is the type of most of the weights, so that an activation keeps one type from layer to layer (norms
    are float32 in every GGUF file), and float16, which scales have, where most weights are quantised.
    """
    sizes: dict[mx.Dtype, int] = {}
    for tensor in tensors:
        dtype = FLOATS.get(tensor.type_name, mx.float16)
        sizes[dtype] = sizes.get(dtype, 0) + int(np.prod(tensor.shape))
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else mx.float16


def permute_rows(tensor: Tensor, order: np.ndarray[Any, Any]) -> Tensor:
    """The tensor with its rows in another order: rows are whole blocks, whatever the type."""
    rows = tensor.data.reshape(tensor.shape[0], -1)[order]
    return Tensor(tensor.name, tensor.shape, tensor.type_name, rows.reshape(-1))


def read_quantized(tensor: Tensor) -> Quantized | None:
    """The tensor in MLX's layout, None where MLX has none that holds it exactly."""
    layout = KEPT.get(tensor.type_name)
    if layout is None or len(tensor.shape) != 2:
        return None
    blocks = tensor.data.reshape(-1, layout.num_bytes)
    scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16)
    if layout.has_minimum:
        biases = np.ascontiguousarray(blocks[:, 2:4]).view(np.float16)
    else:
        biases = -layout.zero * scales  # a power of two: exact
    rows = tensor.shape[0]
    return Quantized(
        mx.array(_pack(_values(blocks, layout), layout.bits).reshape(rows, -1)),
        mx.array(scales.reshape(rows, -1)),
        mx.array(biases.reshape(rows, -1)),
        layout.bits,
    )


def read_float32(tensor: Tensor) -> mx.array:
    """The tensor's values in float32, computed in float32."""
    if tensor.type_name in FLOATS:
        return _as_float(tensor, FLOATS[tensor.type_name]).astype(mx.float32)
    if tensor.type_name == "F64":
        return mx.array(tensor.data.view(np.float64).astype(np.float32).reshape(tensor.shape))
    return mx.array(_dequantize(tensor))


def _as_float(tensor: Tensor, dtype: mx.Dtype) -> mx.array:
    # numpy has no bfloat16, so the bits travel as integers
    words = tensor.data.view(np.uint32 if dtype == mx.float32 else np.uint16)
    return mx.array(words).view(dtype).reshape(tensor.shape)


def _dequantize(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    rows = tensor.data.reshape(-1, tensor.data.size * tensor.shape[-1] // int(np.prod(tensor.shape)))
    values = dequantize(rows, GGMLQuantizationType[tensor.type_name])
    return np.asarray(values, dtype=np.float32).reshape(tensor.shape)


def _values(blocks: Bytes, layout: BlockLayout) -> Bytes:
    """The quantised values, unsigned, in the order of the weights [blocks, 32]."""
    if layout.bits == 8:
        return blocks[:, 2:] ^ np.uint8(128)  # two's complement to an offset of 128
    halves = blocks[:, -GROUP_SIZE // 2 :]
    values = np.concatenate([halves & 0x0F, halves >> 4], axis=1)
    if layout.bits == 5:
        start = 4 if layout.has_minimum else 2
        high = np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little")
        values |= high << 4
    return values


def _pack(values: Bytes, bits: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Eight values at a time into `bits` bytes, lowest first [blocks, bits]."""
    if bits == 8:
        return values.view(np.uint32)
    packed = np.zeros((values.shape[0], GROUP_SIZE // 8), dtype=np.uint64)
    for i in range(8):
        packed |= values[:, i::8].astype(np.uint64) << np.uint64(bits * i)
    as_bytes = packed.view(np.uint8).reshape(values.shape[0], -1, 8)[:, :, :bits]
    return np.ascontiguousarray(as_bytes).reshape(values.shape[0], -1).view(np.uint32)
