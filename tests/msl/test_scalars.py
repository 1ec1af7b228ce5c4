"""half and bfloat are those of MLX, for all their bits: round to nearest even, subnormals, infinities and NaN."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.msl.build import why_not
from tests.msl.emulate import Emulator
from tests.msl.kernels import dispatch

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

NUM_PATTERNS = 65_536
HALVES = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
START = "uint i = thread_position_in_grid.x;"


def all_patterns(dtype: mx.Dtype) -> mx.array:
    return mx.arange(NUM_PATTERNS, dtype=mx.uint16).view(dtype)


def partners(dtype: mx.Dtype) -> mx.array:
    """Another order of all patterns, so that each meets one of another size."""
    shuffled = np.random.default_rng(3).permutation(NUM_PATTERNS).astype(np.uint16)
    return mx.array(shuffled).view(dtype)


def computed(body: str, inputs: dict[str, mx.array], dtype: mx.Dtype, template: mx.Dtype) -> np.ndarray:
    """What the emulation makes of every item."""
    kernel = dispatch(
        START + body,
        inputs,
        [("out", (NUM_PATTERNS,), dtype)],
        NUM_PATTERNS,
        group=1024,
        template=[("T", template)],
    )
    (result,) = Emulator(flush_subnormals=False)(kernel)
    return comparable(result)


def comparable(values: mx.array) -> np.ndarray:
    """Bits, with one NaN for all: hardware does not agree on the others."""
    bits = np.array(values.view(mx.uint32 if values.dtype == mx.float32 else mx.uint16))
    bits[np.array(mx.isnan(values))] = 0xFFFF
    return bits


@HALVES
def test_widening_is_exact(dtype: mx.Dtype) -> None:
    x = all_patterns(dtype)
    result = computed("out[i] = float(x[i]);", {"x": x}, mx.float32, dtype)
    np.testing.assert_array_equal(result, comparable(x.astype(mx.float32)))


@HALVES
@pytest.mark.parametrize("operator", ["+", "-", "*", "/"])
def test_arithmetic_rounds_as_mlx_does(dtype: mx.Dtype, operator: str) -> None:
    x, y = all_patterns(dtype), partners(dtype)
    result = computed(f"out[i] = x[i] {operator} y[i];", {"x": x, "y": y}, dtype, dtype)
    operations = {"+": mx.add, "-": mx.subtract, "*": mx.multiply, "/": mx.divide}
    np.testing.assert_array_equal(result, comparable(operations[operator](x, y)))


@HALVES
@pytest.mark.parametrize("tail", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_narrowing_rounds_as_mlx_does(dtype: mx.Dtype, tail: int) -> None:
    """Floats at, just below and just above the middle between two bfloats; for half, a sample of all floats."""
    x = mx.array((np.arange(NUM_PATTERNS, dtype=np.uint32) << 16) | np.uint32(tail)).view(mx.float32)
    result = computed("out[i] = T(x[i]);", {"x": x}, dtype, dtype)
    np.testing.assert_array_equal(result, comparable(x.astype(dtype)))


def test_half_rounds_ties_and_subnormals_as_mlx_does() -> None:
    """The middles between neighbouring halves, and the floats beside them."""
    halves = np.arange(0x7BFF, dtype=np.uint16).view(np.float16).astype(np.float32)
    following = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves + following) / 2
    beside = [np.nextafter(middles, np.float32(end)) for end in (0, np.inf)]
    values = np.resize(np.concatenate([middles, -middles, *beside]), NUM_PATTERNS).astype(np.float32)
    result = computed("out[i] = T(x[i]);", {"x": mx.array(values)}, mx.float16, mx.float16)
    np.testing.assert_array_equal(result, comparable(mx.array(values).astype(mx.float16)))


@HALVES
def test_tests_and_extremes_take_the_same_side(dtype: mx.Dtype) -> None:
    x, y = all_patterns(dtype), partners(dtype)
    body = (
        "out[i] = metal::isnan(x[i]) ? 4 : metal::isinf(x[i]) ? 3 : x[i] < y[i] ? 1 : x[i] == y[i] ? 2 : 0;"
    )
    result = computed(body, {"x": x, "y": y}, mx.uint16, dtype)
    expected = mx.where(x < y, 1, mx.where(x == y, 2, 0))
    expected = mx.where(mx.isnan(x), 4, mx.where(mx.isinf(x), 3, expected))
    np.testing.assert_array_equal(result, np.array(expected))
    largest = computed("out[i] = metal::max(x[i], y[i]);", {"x": x, "y": y}, dtype, dtype)
    # a NaN loses here, and wins in MLX
    sorted_out = mx.where(mx.isnan(x), y, mx.where(mx.isnan(y), x, mx.maximum(x, y)))
    zeros = np.array((x == 0) & (y == 0))  # of unlike signs: either is right
    np.testing.assert_array_equal(largest[~zeros], comparable(sorted_out)[~zeros])


def test_subnormal_floats_are_zeros_when_the_gpu_may_flush_them() -> None:
    inputs = {"x": mx.full((64,), 1e-40)}
    for flushes in (True, False):
        kernel = dispatch(START + "out[i] = x[i] * 2.0f;", inputs, [("out", (64,), mx.float32)])
        (result,) = Emulator(flush_subnormals=flushes)(kernel)
        assert (np.array(result) == 0).all() == flushes
