"""`logprob` in every way against float64, on the shapes and values that hurt."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_eval_kernels import NO_TARGET, KernelError, logprob
from mlx_eval_kernels.logprob import LogProb

from tests.kernels.ways import Way
from tests.msl.emulate import Emulator

Array = npt.NDArray[np.float64]
ROUNDING = 2e-6
"""Nats, of a logsumexp up to 1: float32 has 24 bits, and the sum of the exponentials is rounded some ten times.
Larger ones have fewer digits behind the point, so it is taken times the logsumexp."""
LAST_PLACE = 2.0**-23
"""Of a float32 result, relative: the two differences that make a log-probability are rounded by half of it each."""
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def in_float64(array: mx.array) -> Array:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def check(result: LogProb, logits: mx.array, targets: Any) -> None:
    """Compare with sums in float64 of the same, already rounded, logits."""
    values = in_float64(logits)
    targets = np.asarray(targets)
    size = values.shape[1]
    has_nan = np.isnan(values).any(axis=1)
    with np.errstate(all="ignore"):
        top = np.max(values, axis=1)
        shift = np.where(np.isinf(top), 0, top)
        normaliser = shift + np.log(np.exp(values - shift[:, None]).sum(axis=1))
        normaliser = np.where(has_nan, np.nan, np.where(top == np.inf, np.inf, normaliser))
        known = (targets >= 0) & (targets < size)
        chosen = np.take_along_axis(values, np.where(known, targets, 0), axis=1)
        wanted = np.where(known, chosen - normaliser[:, None], np.nan)
        best = top - normaliser
    allowed = ROUNDING * np.maximum(1, np.abs(np.where(np.isfinite(normaliser), normaliser, 0)))
    close(result.logsumexp, normaliser, allowed)
    close(result.logprob, wanted, allowed[:, None])
    close(result.argmax_logprob, best, allowed)
    argmax = np.array(result.argmax)
    assert result.argmax.dtype == mx.uint32
    assert argmax[~has_nan].tolist() == values.argmax(axis=1)[~has_nan].tolist()
    assert (argmax < size).all()


def close(result: mx.array, wanted: Array, allowed: Array) -> None:
    assert result.dtype == mx.float32
    found = np.array(result).astype(np.float64)
    assert found.shape == wanted.shape
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(found[~finite], wanted[~finite])
    number = np.where(finite, wanted, 0)
    error = np.where(finite, np.abs(found - number), 0)
    assert (error <= allowed + LAST_PLACE * np.abs(number)).all(), f"off by {error.max()}"


def hurtful(rows: int, size: int, dtype: mx.Dtype) -> mx.array:
    """Logits of every size, infinite ones, NaN, and equal ones within and across threads."""
    rng = np.random.default_rng(rows * size)
    values = (6 * rng.standard_normal((rows, size))).astype(np.float32)
    special: list[Any] = [
        lambda row: row.fill(0.0),
        lambda row: row.fill(-np.inf),
        lambda row: row.__setitem__(size // 2, np.inf),
        lambda row: row.__setitem__(size - 1, np.nan),
        lambda row: row.__setitem__(size // 3, -np.nan),
        lambda row: (row.fill(-np.inf), row.__setitem__(size - 1, 3.0)),
        lambda row: (row.fill(7.25), row.__setitem__(0, -7.25)),
        lambda row: (row.fill(-0.0), row.__setitem__(slice(size // 2, None), 0.0)),
        lambda row: (row.fill(0.0), row.__setitem__(slice(size // 3, None), -0.0)),
        lambda row: (row.fill(-500.0), row.__setitem__(5 % size, 500.0)),
        lambda row: (row.fill(500.0), row.__setitem__(size - 1, -500.0)),
        lambda row: row.__iadd__(1e4),
        lambda row: row.__isub__(1e4),
        lambda row: row.sort(),
        lambda row: row[::-1].sort(),
    ]
    for row, change in zip(values, special, strict=False):
        change(row)
    return mx.array(values).astype(dtype)


def targets_for(rows: int, size: int, count: int) -> npt.NDArray[np.int32]:
    rng = np.random.default_rng(size)
    targets = rng.integers(0, size, (rows, count)).astype(np.int32)
    outside = [NO_TARGET, size, -100, 2**31 - 1, -(2**31), 0, size - 1]
    targets[:, -1:] = np.resize(outside, (rows, 1))[:, : min(1, count)]
    return targets


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "size", "count"),
    [
        (1, 1, 1),
        (1, 3, 2),
        (2, 7, 9),
        (1, 33, 1),
        (33, 255, 2),
        (33, 1023, 1),
        (33, 1025, 4),
        (16, 4100, 40),
        (3, 32_003, 1),
    ],
)
def test_every_shape_and_type_is_that_of_float64(
    way: Way, rows: int, size: int, count: int, dtype: mx.Dtype
) -> None:
    logits = hurtful(rows, size, dtype)
    targets = targets_for(rows, size, count)
    check(way.logprob(logits, mx.array(targets)), logits, targets)


@pytest.mark.parametrize("size", [49_152, 151_936, 262_144])
def test_whole_vocabularies_keep_their_digits(way: Way, size: int) -> None:
    """One float32 sweep over 151,936 equal terms would be off by some 1e-4."""
    rng = np.random.default_rng(size)
    logits = (4 * rng.standard_normal((2, size))).astype(np.float32)
    logits[1] = 0.1
    targets = rng.integers(0, size, (2, 3)).astype(np.int32)
    check(way.logprob(mx.array(logits), mx.array(targets)), mx.array(logits), targets)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.lists(st.floats(width=32), min_size=5, max_size=5),
        min_size=1,
        max_size=4,
    )
)
def test_any_floats_at_all(values: list[list[float]]) -> None:
    logits = mx.array(np.array(values, np.float32))
    targets = np.tile(np.arange(-1, 6, dtype=np.int32), (len(values), 1))
    check(logprob(logits, mx.array(targets), backend="reference"), logits, targets)


def test_targets_of_any_integer_type(way: Way) -> None:
    logits = hurtful(2, 40, mx.float32)
    for dtype in (mx.int64, mx.uint32, mx.int16, mx.uint8):
        check(way.logprob(logits, mx.array([[3], [5]]).astype(dtype)), logits, [[3], [5]])


@pytest.mark.parametrize(
    ("dtype", "ids"),
    [
        (np.int64, [5, 2**32 + 5, -1]),
        (np.uint64, [5, 2**64 - 1, 70_000]),
        (np.uint32, [69_999, 2**32 - 1, 70_000]),
        (np.int16, [5, -1, -32_768]),
        (np.uint8, [255]),
        (np.uint16, [65_535]),
    ],
)
def test_ids_wider_or_narrower_than_the_vocabulary_do_not_wrap_around(
    way: Way, dtype: Any, ids: list[int]
) -> None:
    result = way.logprob(mx.zeros((1, 70_000)), mx.array(np.array([ids], dtype)))
    assert np.isnan(np.array(result.logprob)[0]).tolist() == [False, True, True][: len(ids)]


def test_targets_that_are_no_integers_are_refused() -> None:
    with pytest.raises(KernelError, match=r"integer token ids, not mlx\.core\.float32"):
        logprob(mx.zeros((1, 4)), mx.zeros((1, 1)))


def test_without_targets_the_rest_is_there(way: Way) -> None:
    logits = hurtful(3, 70, mx.float16)
    result = way.logprob(logits, mx.zeros((3, 0), dtype=mx.int32))
    check(result, logits, np.zeros((3, 0), np.int32))


def test_no_rows_give_no_rows(way: Way) -> None:
    result = way.logprob(mx.zeros((0, 4)), mx.zeros((0, 2), dtype=mx.int32))
    assert [tuple(array.shape) for array in result] == [(0, 2), (0,), (0,), (0,)]


def test_logits_that_are_not_contiguous(way: Way) -> None:
    wide = hurtful(30, 50, mx.float32)
    for logits in (wide[::2], wide[:, 1::3], wide[:20].T):
        targets = targets_for(logits.shape[0], logits.shape[1], 2)
        check(way.logprob(logits, mx.array(targets)), logits, targets)


def test_a_row_does_not_depend_on_its_neighbours(way: Way) -> None:
    logits = hurtful(16, 700, mx.bfloat16)
    targets = mx.array(targets_for(16, 700, 3))
    together = way.logprob(logits, targets)
    for row in range(16):
        alone = way.logprob(logits[row : row + 1], targets[row : row + 1])
        for whole, one in zip(together, alone, strict=True):
            np.testing.assert_array_equal(np.array(whole)[row], np.array(one)[0])


@pytest.mark.parametrize(
    ("rows", "targets"),
    [((3,), (1, 1)), ((2, 3), (1, 1)), ((2, 3), (2,)), ((1, 2, 3), (1, 1)), ((2, 0), (2, 1))],
)
def test_shapes_that_do_not_fit_are_named(rows: tuple[int, ...], targets: tuple[int, ...]) -> None:
    with pytest.raises(KernelError, match=r"logits \[N, V\] and targets \[N, K\]"):
        logprob(mx.zeros(rows), mx.zeros(targets, dtype=mx.int32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [33, 1025, 40_000])
def test_logits_are_read_once(emulated: None, size: int, dtype: mx.Dtype) -> None:
    way = Way("emulated", emulator := Emulator())
    rows, count = 5, 3
    way.logprob(hurtful(rows, size, dtype), mx.array(targets_for(rows, size, count)))
    read, written = emulator.reports[-1].read, emulator.reports[-1].written
    # the logits, and once more those of the targets and of the most probable token
    assert read["logits"] <= rows * (size + count + 1) * dtype.size
    assert read["targets"] == 4 * rows * count
    assert sum(written.values()) == 4 * rows * (count + 3)


def test_offsets_beyond_32_bits(emulated: None) -> None:
    """2^32 + 2^18 numbers, of which the first row and the last are there."""
    size, rows = 262_144, 16_385
    ends = hurtful(2, size, mx.bfloat16)
    ends[1] = mx.array(np.random.default_rng(0).standard_normal(size).astype(np.float32)).astype(mx.bfloat16)
    emulator = Emulator(
        sparse={"logits": {0: ends[0], rows - 1: ends[1]}}, groups=[(0, 0, 0), (rows - 1, 0, 0)]
    )
    targets = np.full((rows, 2), 77, np.int32)
    empty = mx.broadcast_to(mx.zeros((), mx.bfloat16), (rows, size))
    result = Way("emulated", emulator).logprob(empty, mx.array(targets))
    picked = mx.array([0, rows - 1])
    check(LogProb(*(array[picked] for array in result)), ends, targets[:2])
