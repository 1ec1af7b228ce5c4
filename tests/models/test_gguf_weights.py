"""Each ggml element type against the gguf package's own de-quantising, and MLX's own loader."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_eval.errors import ModelError
from mlx_eval.models.gguf_file import Tensor, read_file
from mlx_eval.models.gguf_weights import (
    KEPT,
    check_types,
    float_dtype,
    permute_rows,
    read_float32,
    read_quantized,
)

from .gguf_files import SCALE_OFFSETS, decoded, encoded, write_file

VALUES = np.random.default_rng(3).normal(size=(6, 512)).astype(np.float32)
OWN = ("Q4_0", "Q4_1", "Q8_0")
"""What MLX's own loader keeps quantised."""


def stored(type_name: str, values: np.ndarray = VALUES) -> Tensor:
    """A tensor as it comes from a file."""
    data = np.ascontiguousarray(encoded(values, type_name)).view(np.uint8).reshape(-1)
    return Tensor("t", values.shape, type_name, data)


@pytest.mark.parametrize("type_name", sorted({*KEPT, *SCALE_OFFSETS, "F32", "F16", "BF16"}))
def test_float32_values_are_those_of_gguf(type_name: str) -> None:
    values = np.array(read_float32(stored(type_name)))
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, decoded(VALUES, type_name).astype(np.float32))


def test_double_precision_is_rounded() -> None:
    data = VALUES.astype(np.float64).view(np.uint8).reshape(-1)
    np.testing.assert_array_equal(np.array(read_float32(Tensor("t", VALUES.shape, "F64", data))), VALUES)


@pytest.mark.parametrize("type_name", KEPT)
def test_kept_layouts_hold_the_same_values(type_name: str) -> None:
    kept = read_quantized(stored(type_name))
    assert kept is not None
    assert kept.scales.dtype == kept.biases.dtype == mx.float16
    scales, biases = kept.scales.astype(mx.float32), kept.biases.astype(mx.float32)
    values = mx.dequantize(kept.weight, scales, biases, group_size=32, bits=kept.bits)
    # exact: a product of 11 and 8 bits fits float32, and so does the sum where there is no minimum;
    # with one, both round the same sum once
    np.testing.assert_array_equal(np.array(values), decoded(VALUES, type_name))


@pytest.mark.parametrize("type_name", KEPT)
def test_mlx_multiplies_by_what_is_kept(type_name: str) -> None:
    kept = read_quantized(stored(type_name))
    assert kept is not None
    x = np.random.default_rng(5).normal(size=(3, 512)).astype(np.float32)
    product = mx.quantized_matmul(
        mx.array(x), kept.weight, kept.scales, kept.biases, group_size=32, bits=kept.bits
    )
    expected = x.astype(np.float64) @ decoded(VALUES, type_name).astype(np.float64).T
    np.testing.assert_allclose(np.array(product), expected, atol=1e-3)  # sums of 512, of the order of 20


@pytest.mark.parametrize("type_name", OWN)
def test_kept_layouts_equal_those_of_mlx_load(type_name: str, tmp_path: Path) -> None:
    path = write_file(tmp_path / "m.gguf", "llama", {}, {"t.weight": VALUES}, lambda _: type_name)
    theirs = mx.load(str(path))
    assert isinstance(theirs, dict)
    kept = read_quantized(read_file(path).tensors["t.weight"])
    assert kept is not None
    for array, name in ((kept.weight, "weight"), (kept.scales, "scales"), (kept.biases, "biases")):
        assert array.dtype == theirs[f"t.{name}"].dtype
        assert mx.array_equal(array, theirs[f"t.{name}"]).item(), name


@pytest.mark.parametrize("type_name", [*KEPT, "Q4_K", "F16", "F32"])
def test_rows_are_permuted_before_they_are_decoded(type_name: str) -> None:
    order = np.array([3, 0, 5, 1, 4, 2])
    values = np.array(read_float32(permute_rows(stored(type_name), order)))
    np.testing.assert_array_equal(values, decoded(VALUES, type_name).astype(np.float32)[order])


def test_a_permuted_bias_keeps_its_numbers_whole() -> None:
    bias = np.arange(6, dtype=np.float32)
    tensor = Tensor("t", (6,), "F32", bias.view(np.uint8))
    order = np.array([3, 0, 5, 1, 4, 2])
    np.testing.assert_array_equal(np.array(read_float32(permute_rows(tensor, order))), bias[order])


def test_types_without_a_layout_are_not_kept() -> None:
    assert read_quantized(stored("Q4_K")) is None
    assert read_quantized(stored("F16")) is None


def test_a_type_that_nobody_reads_is_named_with_its_tensor() -> None:
    unread = Tensor("blk.0.ffn_up.weight", (1, 256), "Q8_K", np.zeros(292, np.uint8))
    with pytest.raises(ModelError, match=r"tensor blk\.0\.ffn_up\.weight has the element type Q8_K"):
        check_types([stored("F32"), unread])
    check_types([stored(name) for name in ("F32", "Q4_0", "Q6_K")])


def test_the_float_type_is_that_of_most_weights() -> None:
    norm = Tensor("norm", (512,), "F32", VALUES[0].view(np.uint8))
    assert float_dtype([norm, stored("BF16")]) == mx.bfloat16
    assert float_dtype([norm, stored("F16")]) == mx.float16
    assert float_dtype([norm, stored("Q4_0"), stored("Q8_0"), stored("BF16")]) == mx.float16
    assert float_dtype([norm]) == mx.float32
