from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_eval.engine.branch import EMPTY_LAYOUT, BranchCache, Layout, as_prefix, gather_own

ROUNDING = 2e-6
"""Of values of about 1: float32 has 24 bits, softmax and sums over some tens of keys use three of them."""


def layout(prefix_len: int, rows: Sequence[Sequence[bool]], lengths: Sequence[int]) -> Layout:
    """Rows whose own slots hold a token (True) or padding."""
    filled = np.array(rows, dtype=bool).reshape(len(rows), -1)
    positions = np.where(filled, prefix_len + np.cumsum(filled, axis=1) - 1, -1).astype(np.int32)
    starts = (prefix_len + filled.sum(axis=1)).astype(np.int32)
    return Layout(prefix_len, positions, starts, np.array(lengths, np.int32))


@st.composite
def layouts(draw: Any) -> Layout:
    num_rows, num_slots = draw(st.integers(1, 4)), draw(st.integers(0, 5))
    slots = st.lists(st.booleans(), min_size=num_slots, max_size=num_slots)
    rows = draw(st.lists(slots, min_size=num_rows, max_size=num_rows))
    lengths = draw(st.lists(st.integers(1, 5), min_size=num_rows, max_size=num_rows))
    return layout(draw(st.integers(0, 4)), rows, lengths)


@given(layouts(), st.integers(1, 4), st.integers(0, 3), st.sampled_from([None, 1, 2, 5, 100]), st.booleans())
def test_masks_say_of_each_query_and_key_whether_it_is_seen(
    given_layout: Layout, num_queries: int, num_before: int, window: int | None, with_prefix: bool
) -> None:
    mask = given_layout.mask(num_queries, num_before, window, with_prefix)
    far = given_layout.prefix_len if with_prefix else 0
    num_keys = far + given_layout.num_slots + num_before + num_queries
    assert mask.shape == (given_layout.num_rows, 1, num_queries, num_keys)
    for row in range(given_layout.num_rows):
        for query in range(num_queries):
            here = int(given_layout.starts[row]) + num_before + query
            for column in range(num_keys):
                if column < far:
                    there = column
                elif column < far + given_layout.num_slots:
                    there = int(given_layout.positions[row, column - far])
                else:
                    there = int(given_layout.starts[row]) + column - far - given_layout.num_slots
                seen = 0 <= there <= here and (window is None or there > here - window)
                assert mask[row, 0, query, column] == seen
            assert mask[row, 0, query].any()  # also of a padded query, whose softmax would be NaN


@given(layouts(), st.integers(0, 6))
def test_offsets_are_the_positions_that_follow(given_layout: Layout, num_new: int) -> None:
    offset = given_layout.offset(num_new)
    expected = (given_layout.starts + num_new).tolist()
    if isinstance(offset, int):
        assert [offset] * given_layout.num_rows == expected
    else:
        assert len(set(expected)) > 1
        assert offset.tolist() == expected


@given(layouts(), st.integers(1, 6))
def test_slots_that_were_read_keep_their_positions_and_padding_has_none(
    given_layout: Layout, num_new: int
) -> None:
    after = given_layout.after(num_new)
    assert after.dtype == np.int32
    assert after[:, : given_layout.num_slots].tolist() == given_layout.positions.tolist()
    for row, added in enumerate(after[:, given_layout.num_slots :].tolist()):
        start, length = int(given_layout.starts[row]), int(given_layout.lengths[row])
        assert added == [start + step if step < length else -1 for step in range(num_new)]


def test_gaps_are_slots_without_a_token() -> None:
    assert not layout(3, [[], []], [1, 2]).has_gaps
    assert not layout(0, [[True, True]], [1]).has_gaps
    assert layout(3, [[True, True], [True, False]], [1, 1]).has_gaps
    assert EMPTY_LAYOUT.num_rows == 1
    assert EMPTY_LAYOUT.num_slots == 0


# ---------------------------------------------------------------- one row, beside mlx-lm's own caches


def random_arrays(seed: int, *shape: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def attend(cache: Any, queries: mx.array, keys: mx.array, values: mx.array, **wanted: Any) -> np.ndarray:
    """Attention as a layer of mlx-lm computes it: the mask before the update."""
    mask = cache.make_mask(queries.shape[2], **wanted)
    keys, values = cache.update_and_fetch(keys, values)
    mixed = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.5, mask=mask)
    return np.array(mixed)


CHUNKS = [(1,), (6,), (9, 1), (1, 1, 1, 1, 1, 1, 1), (5, 1, 1, 4), (2, 3, 1, 7), (16, 16)]


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize("window", [None, 1, 2, 4, 8, 100])
@pytest.mark.parametrize("is_rotating", [False, True])
@pytest.mark.parametrize("return_array", [False, True])
def test_a_row_alone_sees_what_it_sees_in_the_caches_of_mlx_lm(
    chunks: tuple[int, ...], window: int | None, is_rotating: bool, return_array: bool
) -> None:
    from mlx_lm.models.cache import KVCache, RotatingKVCache

    size = window or 64
    theirs = RotatingKVCache(size) if is_rotating else KVCache()
    total = sum(chunks)
    queries, keys, values = (random_arrays(seed, 1, 2, total, 4) for seed in range(3))
    one = Layout(0, np.zeros((1, 0), np.int32), np.zeros(1, np.int32), np.full(1, total, np.int32))
    ours = BranchCache(one, window=size if is_rotating else None)
    begin = 0
    for chunk in chunks:
        parts = [array[:, :, begin : begin + chunk] for array in (queries, keys, values)]
        begin += chunk
        # a layer of a sliding kind asks with its window, as gemma3 does; gemma2 asks for an array
        wanted = {"window_size": window, "return_array": return_array}
        expected = attend(theirs, *parts, **wanted)
        np.testing.assert_allclose(attend(ours, *parts, **wanted), expected, rtol=0, atol=ROUNDING)
        assert ours.offset == theirs.offset == begin


@pytest.mark.parametrize(
    ("num_queries", "window", "return_array", "offset", "kind"),
    [
        (1, None, False, 5, None),
        (1, 100, True, 5, None),
        (3, None, False, 0, "causal"),
        (3, 8, False, 5, "causal"),  # eight positions, and all of them seen
        (3, 7, False, 5, "array"),
        (1, 5, False, 5, "array"),  # mlx-lm forgets what the window hides, a branch hides it
        (3, None, True, 5, "array"),
    ],
)
def test_masks_have_a_name_where_mlx_lm_gives_a_name(
    num_queries: int, window: int | None, return_array: bool, offset: int, kind: str | None
) -> None:
    """An array would be slower, and some models tell them apart."""
    cache = BranchCache(layout(0, [[]], [20]), window=window)
    if offset:
        cache.update_and_fetch(mx.zeros((1, 1, offset, 4)), mx.zeros((1, 1, offset, 4)))
    mask = cache.make_mask(num_queries, return_array=return_array)
    if kind == "array":
        assert isinstance(mask, mx.array)
        assert mask.dtype == mx.bool_
        assert mask.shape[-2:] == (num_queries, offset + num_queries)
    else:
        assert mask == kind


# ---------------------------------------------------------------- a prefix, and rows in their own slots


def float64_attention(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, window: int | None
) -> np.ndarray:
    """[H, D] of the last of the tokens whose keys [H, L, D] are given."""
    first = 0 if window is None else max(0, keys.shape[1] - window)
    scores = 0.5 * np.einsum("hd,hld->hl", query.astype(np.float64), keys[:, first:].astype(np.float64))
    terms = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("hl,hld->hd", terms / terms.sum(axis=1, keepdims=True), values[:, first:])


@settings(deadline=None, max_examples=60)
@given(layouts(), st.sampled_from([None, 1, 3, 100]), st.integers(1, 5), st.booleans())
def test_rows_behind_a_prefix_see_it_and_their_own_tokens(
    given_layout: Layout, window: int | None, step: int, return_array: bool
) -> None:
    rows, slots, far = given_layout.num_rows, given_layout.num_slots, given_layout.prefix_len
    length = int(given_layout.lengths.max())
    prefix = (random_arrays(0, 1, 2, far, 4), random_arrays(1, 1, 2, far, 4)) if far else None
    own = (random_arrays(2, rows, 2, slots, 4), random_arrays(3, rows, 2, slots, 4)) if slots else None
    queries, keys, values = (random_arrays(4 + seed, rows, 2, length, 4) for seed in range(3))
    cache = BranchCache(given_layout, prefix=prefix, own=own, window=window)
    pieces = []
    for begin in range(0, length, step):
        parts = [array[:, :, begin : begin + step] for array in (queries, keys, values)]
        pieces.append(attend(cache, *parts, return_array=return_array))
    result = np.concatenate(pieces, axis=2)
    for row in range(rows):
        filled = given_layout.positions[row] >= 0
        known = [
            np.concatenate(
                [
                    np.zeros((2, 0, 4)) if prefix is None else np.array(prefix[place][0]),
                    np.zeros((2, 0, 4)) if own is None else np.array(own[place])[row][:, filled],
                    np.array(new[row]),
                ],
                axis=1,
            )
            for place, new in enumerate((keys, values))
        ]
        for token in range(int(given_layout.lengths[row])):
            seen = far + int(filled.sum()) + token + 1
            expected = float64_attention(
                np.array(queries[row, :, token]), known[0][:, :seen], known[1][:, :seen], window
            )
            np.testing.assert_allclose(result[row, :, token], expected, rtol=0, atol=ROUNDING)


def test_split_attention_is_given_own_keys_only_and_masks_without_the_prefix() -> None:
    prefix = (mx.zeros((1, 2, 3, 4)), mx.zeros((1, 2, 3, 4)))
    new = mx.zeros((2, 2, 2, 4))
    ragged = layout(3, [[True, True], [True, False]], [2, 2])
    own = (mx.zeros((2, 2, 2, 4)), mx.zeros((2, 2, 2, 4)))
    for splits, columns in ((True, 4), (False, 7)):
        cache = BranchCache(ragged, prefix=prefix, own=own, splits_attention=splits)
        mask = cache.make_mask(2)
        assert isinstance(mask, mx.array)
        assert mask.shape == (2, 1, 2, columns)
        assert cache.update_and_fetch(new, new)[0].shape == (2, 2, columns, 4)
        assert cache.keys_and_values()[1].shape == (2, 2, columns, 4)
    windowed = BranchCache(ragged, prefix=prefix, own=own, window=3, splits_attention=True)
    mask = windowed.make_mask(2)
    assert isinstance(mask, mx.array)
    assert mask.shape == (2, 1, 2, 7)  # the window hides a part of the prefix


def test_a_cache_says_what_mlx_lm_asks() -> None:
    fresh = BranchCache(EMPTY_LAYOUT)
    assert fresh.empty()
    assert not fresh.is_trimmable()
    assert fresh.state == (None, None)
    behind = BranchCache(layout(1, [[]], [1]), prefix=(mx.zeros((1, 1, 1, 4)), mx.zeros((1, 1, 1, 4))))
    assert not behind.empty()
    assert not hasattr(fresh, "bits")  # which would mean quantised keys


# ---------------------------------------------------------------- rows that go on


def test_own_slots_are_gathered_from_several_parents() -> None:
    first, second = BranchCache(layout(0, [[]] * 2, [3, 3])), BranchCache(layout(0, [[]] * 3, [2, 2, 1]))
    for cache, rows, length in ((first, 2, 3), (second, 3, 2)):
        arrays = [random_arrays(length + seed, rows, 1, length, 4) for seed in (0, 10)]
        cache.update_and_fetch(*arrays)
    parents = [(first, np.array([1, 1, 0], np.int32)), (second, np.array([2], np.int32))]
    gathered = gather_own(parents, num_direct=1, num_slots=3)
    assert gathered is not None
    for made, theirs in zip(gathered, zip(first.state, second.state, strict=True), strict=True):
        assert made.shape == (5, 1, 3, 4)
        assert made[0].tolist() == mx.zeros((1, 3, 4)).tolist()
        assert made[1].tolist() == made[2].tolist() == theirs[0][1].tolist()
        assert made[3].tolist() == theirs[0][0].tolist()
        assert made[4, :, :2].tolist() == theirs[1][2].tolist()
        assert made[4, :, 2:].tolist() == mx.zeros((1, 1, 4)).tolist()
    assert gather_own([], num_direct=2, num_slots=0) is None


def test_slots_that_no_row_uses_are_left_behind() -> None:
    cache = BranchCache(layout(0, [[]] * 2, [5, 2]))
    cache.update_and_fetch(random_arrays(0, 2, 1, 5, 4), random_arrays(1, 2, 1, 5, 4))
    gathered = gather_own([(cache, np.array([1], np.int32))], num_direct=0, num_slots=2)
    assert gathered is not None
    assert [array.shape for array in gathered] == [(1, 1, 2, 4)] * 2


def test_a_row_becomes_a_prefix_without_its_padding_behind_its_own_prefix() -> None:
    cache = BranchCache(layout(0, [[]] * 2, [4, 2]))
    cache.update_and_fetch(random_arrays(0, 2, 1, 4, 4), random_arrays(1, 2, 1, 4, 4))
    before = (random_arrays(2, 1, 1, 3, 4), random_arrays(3, 1, 1, 3, 4))
    for row, slots in ((0, [0, 1, 2, 3]), (1, [0, 1]), (1, [0, 3])):
        made = as_prefix(cache, row, np.array(slots), before)
        for array, own, far in zip(made, cache.state, before, strict=True):
            assert own is not None
            assert array.shape == (1, 1, 3 + len(slots), 4)
            assert array[0, :, :3].tolist() == far[0].tolist()
            assert array[0, 0, 3:].tolist() == [own[row, 0, slot].tolist() for slot in slots]
        alone = as_prefix(cache, row, np.array(slots), None)
        assert alone[0].tolist() == made[0][:, :, 3:].tolist()


def test_a_prefix_lies_in_one_piece() -> None:
    """Values come as a transposed view; whatever reads a prefix over and over would copy it each time."""
    layout = Layout(0, np.zeros((1, 0), np.int32), np.zeros(1, np.int32), np.full(1, 5, np.int32))
    cache = BranchCache(layout)
    view = mx.arange(40.0).reshape(1, 5, 2, 4).swapaxes(1, 2)
    cache.update_and_fetch(view, view)
    pair = as_prefix(cache, 0, np.arange(5), None)
    assert pair is not None
    for array in pair:
        assert np.asarray(array).flags.c_contiguous
        assert memoryview(array).strides == (160, 80, 16, 4)
        assert array.tolist() == view.tolist()
