"""`linear_logprob` in every way against float64, on the shapes and values that hurt."""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_eval_kernels import AffineHead, DenseHead, Head, KernelError, LogProb, linear_logprob
from mlx_eval_kernels.linear_logprob import by_kernel, by_reference

from tests.kernels.test_logprob import DTYPES, ROUNDING, close, in_float64, targets_for
from tests.kernels.ways import Way

Array = npt.NDArray[np.float64]
MODULE = sys.modules[linear_logprob.__module__]
HALF_PLACE = 2.0**-24
"""Of float32, relative: what one rounding changes. The sum of D products is rounded D times, up and down alike, so a
logit is off by about sqrt(D) of it, of the sum of its products' sizes."""


def computed(way: Way, hidden: mx.array, head: Head, targets: mx.array) -> LogProb:
    if way.run is None:
        return by_reference(hidden, head, targets)
    return by_kernel(hidden, head, targets, way.run)


def weights_of(head: Head) -> Array:
    """[V, D] in float64, from the bits that MLX's format says a weight has."""
    if isinstance(head, DenseHead):
        return in_float64(head.weight)
    packed = np.array(head.weight)
    per_word = 32 // head.bits
    shifts = (np.arange(per_word) * head.bits).astype(np.uint32)
    numbers = (packed[..., None] >> shifts) & np.uint32(2**head.bits - 1)
    groups = numbers.reshape(*head.scales.shape, head.group_size).astype(np.float64)
    weights = in_float64(head.scales)[..., None] * groups + in_float64(head.biases)[..., None]
    return weights.reshape(packed.shape[0], -1)


def check(result: LogProb, hidden: mx.array, head: Head, targets: Any) -> None:
    """Compare with float64 of the same, already rounded, states and weights."""
    states, weights, targets = in_float64(hidden), weights_of(head), np.asarray(targets)
    size, width = weights.shape
    with np.errstate(all="ignore"):
        logits = states @ weights.T
        sizes = np.where(np.isfinite(logits), np.abs(states) @ np.abs(weights.T), 0).max(axis=1)
        top = logits.max(axis=1)
        shift = np.where(np.isinf(top), 0, top)
        normaliser = shift + np.log(np.exp(logits - shift[:, None]).sum(axis=1))
        normaliser = np.where(top == np.inf, np.inf, normaliser)
        known = (targets >= 0) & (targets < size)
        chosen = np.take_along_axis(logits, np.where(known, targets, 0), axis=1)
        wanted = np.where(known, chosen - normaliser[:, None], np.nan)
        best = top - normaliser
    has_nan = np.isnan(logits).any(axis=1)
    allowed = ROUNDING * np.maximum(1, np.abs(np.where(np.isfinite(normaliser), normaliser, 0)))
    allowed += (
        2 * np.sqrt(width) * HALF_PLACE * np.where(np.isfinite(sizes), sizes, 0)
    )  # chosen and normaliser
    close(result.logsumexp, normaliser, allowed)
    close(result.logprob, wanted, allowed[:, None])
    close(result.argmax_logprob, best, allowed)
    argmax = np.array(result.argmax)
    assert result.argmax.dtype == mx.uint32
    assert (argmax < size).all()
    picked = np.take_along_axis(logits, argmax[:, None].astype(np.int64), axis=1)[:, 0]
    good = np.isfinite(top) & ~has_nan
    assert (picked[good] >= (top - allowed)[good]).all()  # among near-ties rounding decides
    infinite = np.isinf(top)
    assert argmax[infinite].tolist() == logits.argmax(axis=1)[infinite].tolist()


def states(rows: int, width: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    rng = np.random.default_rng(seed)
    return mx.array(rng.standard_normal((rows, width)).astype(np.float32)).astype(dtype)


def dense(size: int, width: int, dtype: mx.Dtype = mx.float32, scale: float = 3.0) -> DenseHead:
    """Logits some nats apart, whatever the width."""
    return DenseHead((states(size, width, seed=1) * float(scale / np.sqrt(width))).astype(dtype))


def affine(size: int, width: int, group: int, bits: int, dtype: mx.Dtype = mx.float32) -> AffineHead:
    return AffineHead(
        *mx.quantize(dense(size, width, dtype).weight, group_size=group, bits=bits), group, bits
    )


SHAPES = [
    (1, 8, 1, 1),
    (1, 8, 3, 2),
    (33, 8, 7, 9),
    (33, 40, 131, 3),
    (1, 96, 64, 2),
    (32, 64, 65, 1),
    (70, 24, 200, 1),
    (2, 32, 6200, 40),
]
"""N, D, V, K"""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense_heads_of_every_shape_and_type_are_those_of_float64(
    way: Way, shape: tuple[int, int, int, int], dtype: mx.Dtype
) -> None:
    rows, width, size, count = shape
    hidden, head, targets = (
        states(rows, width, dtype),
        dense(size, width, dtype),
        targets_for(rows, size, count),
    )
    check(computed(way, hidden, head, mx.array(targets)), hidden, head, targets)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("group", "width", "dtype"),
    [
        (32, 32, mx.float32),
        (32, 160, mx.float16),
        (64, 128, mx.bfloat16),
        (64, 192, mx.float32),
        (128, 384, mx.float16),
        (128, 128, mx.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize(("rows", "size"), [(1, 5), (33, 131)])
def test_affine_heads_of_every_packing_are_those_of_float64(  # noqa: PLR0917
    way: Way, rows: int, size: int, group: int, width: int, bits: int, dtype: mx.Dtype
) -> None:
    hidden, head = states(rows, width, dtype), affine(size, width, group, bits, dtype)
    targets = targets_for(rows, size, 3)
    check(computed(way, hidden, head, mx.array(targets)), hidden, head, targets)


@pytest.mark.parametrize("bits", [2, 3, 5, 6])
def test_other_packings_are_left_to_the_reference(bits: int) -> None:
    hidden, head = states(3, 64, mx.float16), affine(70, 64, 64, bits, mx.float16)
    targets = mx.array(targets_for(3, 70, 2))
    ours = linear_logprob(hidden, head, targets).logprob
    weights = mx.dequantize(
        head.weight, head.scales.astype(mx.float32), head.biases.astype(mx.float32), 64, bits
    )
    wanted = linear_logprob(hidden, DenseHead(weights), targets).logprob
    assert mx.array_equal(ours, wanted, equal_nan=True)


@pytest.mark.parametrize(
    "head", [dense(70, 32, mx.bfloat16), affine(70, 32, 32, 4, mx.float16)], ids=["dense", "affine"]
)
def test_states_and_weights_of_two_types(way: Way, head: Head) -> None:
    """Nothing is rounded to the type of the other."""
    hidden, targets = states(5, 32), targets_for(5, 70, 2)
    check(computed(way, hidden, head, mx.array(targets)), hidden, head, targets)


@pytest.mark.parametrize("size", [49_152, 151_936])
def test_whole_vocabularies_keep_their_digits(way: Way, size: int) -> None:
    """One float32 sweep over equal terms would be off by some 1e-4."""
    if way.name == "emulated":
        size //= 8  # more of the same parts, only slower
    hidden, head = states(2, 8), dense(size, 8)
    hidden[1] = 0.0
    targets = targets_for(2, size, 3)
    check(computed(way, hidden, head, mx.array(targets)), hidden, head, targets)


def test_wide_states(way: Way) -> None:
    hidden, head, targets = states(3, 4096), dense(40, 4096), targets_for(3, 40, 2)
    check(computed(way, hidden, head, mx.array(targets)), hidden, head, targets)


@pytest.mark.parametrize("scale", [1e-3, 300.0])
def test_tiny_and_large_logits(way: Way, scale: float) -> None:
    hidden, head, targets = states(3, 32), dense(300, 32, scale=scale), targets_for(3, 300, 2)
    check(computed(way, hidden, head, mx.array(targets)), hidden, head, targets)


def test_infinite_and_nan_states_stay_in_their_rows(way: Way) -> None:
    """Rows of NaN are NaN, rows with an infinite state have infinite logits; the rest is as without them."""
    clean = states(40, 32)
    spoilt = np.array(clean)
    spoilt[3, 5], spoilt[17, 0], spoilt[18, 31], spoilt[33] = np.nan, np.inf, -np.inf, np.nan
    spoilt[21, 2:4] = np.inf, -np.inf
    hidden, head, targets = mx.array(spoilt), dense(131, 32), targets_for(40, 131, 3)
    result = computed(way, hidden, head, mx.array(targets))
    check(result, hidden, head, targets)
    assert np.isnan(np.array(result.logsumexp)).nonzero()[0].tolist() == [3, 21, 33]
    assert np.isinf(np.array(result.logsumexp)).nonzero()[0].tolist() == [17, 18]
    untouched = [row for row in range(40) if row not in (3, 17, 18, 21, 33)]
    before = computed(way, clean, head, mx.array(targets))
    for ours, theirs in zip(result, before, strict=True):
        np.testing.assert_array_equal(np.array(ours)[untouched], np.array(theirs)[untouched])


def test_infinite_and_nan_weights(way: Way) -> None:
    """A token that cannot be, a vocabulary of such, one that must be in it, and NaN beside that."""
    weights = np.array(dense(131, 32).weight)
    hidden, targets = mx.abs(states(33, 32)), targets_for(33, 131, 3)
    targets[0, 0] = 100
    for place, value in ((100, -np.inf), (slice(None), -np.inf), (3, np.inf), (64, np.nan)):
        weights[place] = value
        head = DenseHead(mx.array(weights))
        check(computed(way, hidden, head, mx.array(targets)), hidden, head, targets)


@pytest.mark.parametrize("lowest", [0, 15, 16, 63, 64, 70, 130])
def test_ties_take_the_lowest_index(way: Way, lowest: int) -> None:
    """Within a lane, across lanes, across tiles and across parts of the vocabulary."""
    weights = np.zeros((131, 8), np.float32)
    weights[[lowest, min(130, lowest + 1), 130]] = 2.0  # small whole numbers: their sums are exact
    for sign, expected in ((1.0, lowest), (-1.0, 0 if lowest else 2)):
        hidden = mx.full((33, 8), sign)
        result = computed(way, hidden, DenseHead(mx.array(weights)), mx.zeros((33, 1), mx.int32))
        assert set(np.array(result.argmax).tolist()) == {expected}


@pytest.mark.parametrize(
    "head", [dense(300, 64, mx.bfloat16), affine(300, 64, 32, 4)], ids=["dense", "affine"]
)
def test_a_target_that_is_the_argmax_has_its_log_probability_to_the_bit(way: Way, head: Head) -> None:
    """Else it could be the most probable token and less probable than that."""
    hidden = states(40, 64, mx.bfloat16)
    argmax = computed(way, hidden, head, mx.zeros((40, 0), mx.int32)).argmax
    result = computed(way, hidden, head, argmax[:, None])
    np.testing.assert_array_equal(np.array(result.logprob)[:, 0], np.array(result.argmax_logprob))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 300), st.integers(0, 5), st.integers(0, 9))
def test_any_shape(rows: int, width: int, size: int, count: int, seed: int) -> None:
    """Widths that the kernel does not take, too."""
    hidden, head, targets = states(rows, width, seed=seed), dense(size, width), targets_for(rows, size, count)
    check(linear_logprob(hidden, head, mx.array(targets), backend="reference"), hidden, head, targets)


@pytest.mark.parametrize("num_bytes", [4, 4 * 33 * 7, 4 * 33 * 64, 2**24])
@pytest.mark.parametrize("head", [dense(131, 32), affine(131, 32, 32, 4)], ids=["dense", "affine"])
def test_blocks_of_the_reference(head: Head, num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "BLOCK_BYTES", num_bytes)
    blocks: list[int] = []
    rows_of = type(head).rows

    def rows(self: Any, start: int, stop: int) -> mx.array:
        blocks.append(stop - start)
        return rows_of(self, start, stop)

    monkeypatch.setattr(type(head), "rows", rows)
    hidden, targets = states(33, 32), targets_for(33, 131, 3)
    check(by_reference(hidden, head, mx.array(targets)), hidden, head, targets)
    assert sum(blocks) == 131
    assert max(blocks) == min(131, max(1, num_bytes // (4 * 33)))


def test_targets_of_any_integer_type(way: Way) -> None:
    hidden, head = states(2, 8), dense(40, 8)
    for dtype in (mx.int64, mx.uint32, mx.int16, mx.uint8):
        check(computed(way, hidden, head, mx.array([[3], [5]]).astype(dtype)), hidden, head, [[3], [5]])


def test_without_targets_the_rest_is_there(way: Way) -> None:
    hidden, head = states(3, 8), dense(70, 8)
    check(computed(way, hidden, head, mx.zeros((3, 0), mx.int32)), hidden, head, np.zeros((3, 0), np.int32))


def test_no_rows_give_no_rows(way: Way) -> None:
    result = computed(way, mx.zeros((0, 8)), dense(70, 8), mx.zeros((0, 2), mx.int32))
    assert [tuple(array.shape) for array in result] == [(0, 2), (0,), (0,), (0,)]


def test_states_that_are_not_contiguous(way: Way) -> None:
    head, targets = dense(70, 8), targets_for(15, 70, 2)
    for hidden in (states(30, 8)[::2], states(15, 24)[:, 1::3], states(8, 15).T):
        check(computed(way, hidden, head, mx.array(targets)), hidden, head, targets)


BAD_SHAPES: list[tuple[tuple[int, ...], Head, tuple[int, ...]]] = [
    ((3,), DenseHead(mx.zeros((4, 8))), (1, 1)),
    ((2, 8), DenseHead(mx.zeros((4, 8))), (1, 1)),
    ((2, 8), DenseHead(mx.zeros((4, 8))), (2,)),
    ((2, 8), DenseHead(mx.zeros((4, 16))), (2, 1)),
    ((2, 8), DenseHead(mx.zeros((0, 8))), (2, 1)),
    ((2, 8), DenseHead(mx.zeros(8)), (2, 1)),
    ((2, 64), affine(4, 32, 32, 4), (2, 1)),
    ((2, 32), AffineHead(mx.zeros((4, 4), mx.uint32), mx.zeros((4, 1)), mx.zeros((4, 1)), 32, 8), (2, 1)),
    ((2, 32), AffineHead(mx.zeros((4, 4), mx.uint32), mx.zeros((4, 1)), mx.zeros((4, 2)), 32, 4), (2, 1)),
    ((2, 32), AffineHead(mx.zeros((4, 4), mx.uint32), mx.zeros(4), mx.zeros(4), 32, 4), (2, 1)),
]


@pytest.mark.parametrize(("hidden", "head", "targets"), BAD_SHAPES)
def test_shapes_that_do_not_fit_are_named(
    hidden: tuple[int, ...], head: Head, targets: tuple[int, ...]
) -> None:
    with pytest.raises(KernelError, match=r"hidden \[N, D\], .* and targets \[N, K\], not \("):
        linear_logprob(mx.zeros(hidden), head, mx.zeros(targets, dtype=mx.int32))


@pytest.mark.parametrize(
    ("hidden", "head", "reason"),
    [
        (mx.zeros((1, 12)), dense(5, 12), "hidden states of width 12: a multiple of 8"),
        (mx.zeros((1, 8), mx.int32), dense(5, 8), r"numbers of types mlx.core.float32, mlx.core.int32"),
        (mx.zeros((1, 32)), affine(5, 32, 32, 6), "6-bit weights in groups of 32"),
    ],
)
def test_what_the_kernel_does_not_take_is_said(
    hidden: mx.array, head: Head, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    with pytest.raises(KernelError, match=reason):
        linear_logprob(hidden, head, mx.zeros((1, 1), mx.int32), backend="metal")
