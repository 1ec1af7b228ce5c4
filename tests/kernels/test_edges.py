"""Cases that tell a kernel from one that is nearly right: each is the only one on which some mutation of it shows."""

from __future__ import annotations

import functools
import math

import mlx.core as mx
import numpy as np
import pytest
from mlx_eval_kernels import DenseHead
from mlx_eval_kernels.launch import Run
from mlx_eval_kernels.linear_logprob import by_kernel as linear_by_kernel
from mlx_eval_kernels.linear_logprob import by_reference as linear_by_reference

from tests.kernels.test_logprob import LAST_PLACE, check, in_float64
from tests.kernels.test_logprob import ROUNDING as LOGPROB_ROUNDING
from tests.kernels.test_prefix_attention import (
    ROUNDING,
    Given,
    Sizes,
    arrays,
    as_rounded,
    causal,
    computed,
    reference,
)
from tests.kernels.ways import Recorder, Way
from tests.msl.emulate import Emulator


@pytest.mark.parametrize("nan", [math.nan, -math.nan], ids=["nan", "-nan"])
@pytest.mark.parametrize("other", [math.inf, -math.inf, 0.0])
def test_nan_is_told_beside_infinities(way: Way, other: float, nan: float) -> None:
    logits = mx.array([[nan, other, other, other], [other, other, other, nan], [other, nan, -other, 1.0]])
    targets = [[0, 1, 2, 3]] * 3
    check(way.logprob(logits, mx.array(targets)), logits, targets)


@pytest.mark.parametrize("offset", [1e4, -1e4, 1e6])
def test_log_probabilities_keep_their_digits_where_logits_are_large(way: Way, offset: float) -> None:
    check_digits(way, offset)


def check_digits(way: Way, offset: float) -> None:
    """The logits differ by whole numbers, so that nothing but the way of computing rounds."""
    logits = mx.array(offset + np.random.default_rng(0).integers(-9, 9, (3, 1030)).astype(np.float32))
    targets = np.array([[0, 515, 1029]] * 3)
    values = in_float64(logits) - offset
    wanted = np.take_along_axis(values, targets, axis=1) - np.log(np.exp(values).sum(axis=1, keepdims=True))
    found = np.array(way.logprob(logits, mx.array(targets)).logprob).astype(np.float64)
    assert (np.abs(found - wanted) <= LOGPROB_ROUNDING + LAST_PLACE * np.abs(wanted)).all()


def test_equal_logits_of_a_long_part_take_the_lowest_token(way: Way) -> None:
    check_ties(way.run)


def check_ties(run: Run | None) -> None:
    """The lower token is in a later lane and an earlier tile than the higher one."""
    weight = np.zeros((7000, 8), np.float32)
    weight[[20, 64]] = 1.0
    head, hidden, targets = DenseHead(mx.array(weight)), mx.ones((3, 8)), mx.zeros((3, 1), mx.int32)
    compute = linear_by_reference if run is None else functools.partial(linear_by_kernel, run=run)
    assert compute(hidden, head, targets).argmax.tolist() == [20, 20, 20]


def test_half_types_are_rounded_once(way: Way) -> None:
    """The kernels compute in float32 and round the result: by half of its last place."""
    if way.run is None:
        pytest.skip("the reference rounds scores and weights, too")
    sizes = Sizes(3, 2, 3, 4, 600, 7, 8, 16)
    for dtype in (mx.float16, mx.bfloat16):
        given = as_rounded(arrays(sizes), dtype)
        result = computed(way, given, 0.3, "causal", dtype)
        expected = reference(given, 0.3, causal(sizes))
        half = float(mx.finfo(dtype).eps) / 2
        np.testing.assert_allclose(result, expected, rtol=half, atol=ROUNDING)


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(2, 3, 1, 2, 1153, 3, 8, 8),  # splits of 320 keys, since four of 288 leave one out
        Sizes(1, 1, 1, 1, 4369, 3, 8, 8),  # the last of 17 splits has no keys
        Sizes(1, 1, 3, 70, 3, 100, 8, 8),  # blocks of queries that go on to the next head
        Sizes(1, 1, 1, 24, 3, 40, 136, 136),  # a block of queries with more than the rows of a tile
        Sizes(1, 1, 2, 31, 3, 31, 8, 8),  # a block of queries that ends with the first of the next head
        Sizes(9, 1, 1, 4, 40, 4, 136, 136),  # two blocks of queries, each more than the rows of a tile
    ],
    ids=str,
)
def test_blocks_and_splits_that_do_not_divide(way: Way, sizes: Sizes) -> None:
    given = arrays(sizes, size=8 / sizes.width)  # scores of a size
    result = computed(way, given, 0.3, "causal")
    np.testing.assert_allclose(result, reference(given, 0.3, causal(sizes)), rtol=0, atol=ROUNDING)


def test_a_query_that_sees_none_of_the_first_keys(way: Way) -> None:
    sizes = Sizes(3, 2, 3, 4, 5, 70, 8, 16)
    seen = np.random.default_rng(1).random((3, 4, 70)) < 0.5
    seen[..., -1] = True
    seen[:, 0, :-1] = False
    seen[1, 1, :40] = False
    result = computed(way, arrays(sizes), 0.3, mx.array(seen[:, None]))
    np.testing.assert_allclose(result, reference(arrays(sizes), 0.3, seen), rtol=0, atol=ROUNDING)


def test_scores_whose_exponentials_are_all_zero(way: Way) -> None:
    sizes = Sizes(3, 2, 3, 4, 70, 6, 8, 16)
    given = arrays(sizes)
    given.queries[...] = 1.0
    given.prefix_keys[...] = given.keys[...] = -100.0
    result = computed(way, given, 0.25, "causal")
    np.testing.assert_allclose(result, reference(given, 0.25, causal(sizes)), rtol=0, atol=ROUNDING)


def test_scores_of_which_every_block_has_larger_ones(way: Way) -> None:
    """All queries of a SIMD group are rescaled at once."""
    sizes = Sizes(5, 2, 3, 4, 200, 6, 8, 16)
    given = arrays(sizes)
    make_growing(given)
    result = computed(way, given, 0.3, "causal")
    np.testing.assert_allclose(result, reference(given, 0.3, causal(sizes)), rtol=0, atol=ROUNDING)


def make_growing(given: Given) -> None:
    """Give the prefix scores that grow with the number of the key, by less than three in all."""
    num_keys = given.prefix_keys.shape[2]
    given.queries[...] = 1.0
    given.prefix_keys[...] = np.arange(num_keys)[:, None] / num_keys


def test_sinks_of_as_many_heads_as_rows_and_groups_do_not_make(way: Way) -> None:
    sizes = Sizes(5, 2, 3, 4, 40, 6, 8, 16)
    given = arrays(sizes)
    sinks = np.array([-120.0, 0.5, 2.0, 40.0, 1.0, -1.0])
    queries, *rest = (mx.array(array.astype(np.float32)) for array in given)
    result = way.prefix_attention(
        queries, *rest, scale=0.3, mask="causal", sinks=mx.array(sinks.astype(np.float32))
    )
    expected = reference(given, 0.3, causal(sizes), sinks)
    np.testing.assert_allclose(np.array(result), expected, rtol=0, atol=ROUNDING)


def test_the_merge_reads_each_mixture_once(emulated: None) -> None:
    sizes = Sizes(3, 2, 3, 5, 600, 7, 8, 16)
    way = Way("emulated", emulator := Emulator())
    computed(way, arrays(sizes), 0.3, "causal")
    numbers = sizes.batch * sizes.heads * sizes.groups * sizes.length * sizes.out
    read = emulator.reports[-1].read
    assert read["near_mixture"] == 4 * numbers
    assert read["far_mixture"] == 4 * 2 * numbers  # of two splits


def test_each_split_of_a_prefix_reads_its_share(emulated: None) -> None:
    recorder = Recorder(Emulator())
    computed(Way("emulated", recorder), arrays(Sizes(1, 1, 1, 2, 1153, 3, 8, 8)), 0.3, "causal")
    keys_read = []
    for split in range(4):
        (emulator := Emulator(groups=[(split, 0, 0)]))(recorder.dispatches[0])
        keys_read.append(emulator.reports[-1].read["keys"] // (4 * 8))
    assert keys_read == [320, 320, 320, 193]


def test_keys_above_the_diagonal_are_not_read_where_it_cuts_a_block(emulated: None) -> None:
    way = Way("emulated", emulator := Emulator())
    computed(way, arrays(Sizes(1, 1, 1, 90, 1, 97, 8, 8)), 0.3, "causal")
    assert emulator.reports[1].read["keys"] == 4 * 8 * (39 + 71 + 97)
