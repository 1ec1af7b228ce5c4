from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_eval.engine.kv import Prefix
from mlx_eval.engine.slots import GROWTH, Run, SlotCache, Table

HEADS, WIDTH = 2, 4


def prefix_of(length: int) -> Prefix:
    return Prefix(length, [(mx.zeros((1, HEADS, length, WIDTH)), mx.zeros((1, HEADS, length, WIDTH)))])


def table_of(runs: list[tuple[int, list[int]]], read: list[int] | None = None) -> Table:
    """Runs of (tokens of the prefix, tokens of each row when it joined); then each row has read so many more."""
    table = Table()
    for shared, lengths in runs:
        begin = table.num_rows
        table.runs.append(Run(prefix_of(shared) if shared else None, begin, begin + len(lengths)))
        table.place(range(begin, begin + len(lengths)), np.array(lengths, np.int32))
    table.advance(np.array(read, np.int32) if read else 0)
    return table


def random_keys(seed: int, rows: int, tokens: int) -> mx.array:
    return mx.array(
        np.random.default_rng(seed).standard_normal((rows, HEADS, tokens, WIDTH)).astype(np.float32)
    )


@st.composite
def tables(draw: Any) -> Table:
    runs = []
    for _ in range(draw(st.integers(1, 3))):
        shared = draw(st.integers(0, 6))
        runs.append((shared, draw(st.lists(st.integers(shared, shared + 7), min_size=1, max_size=3))))
    num_rows = sum(len(lengths) for _, lengths in runs)
    table = table_of(runs, draw(st.lists(st.integers(0, 5), min_size=num_rows, max_size=num_rows)))
    table.begin_step(draw(st.integers(1, 3)))
    return table


WINDOWS = st.sampled_from([None, 1, 2, 3, 5, 8, 100])


def seen(table: Table, row: int, token: int, window: int | None) -> set[int]:
    """Positions that a new token of a row sees."""
    now = int(table.lengths[row]) + token
    return {place for place in range(now + 1) if window is None or now - place < window}


def test_a_table_counts_from_each_rows_first_slot() -> None:
    table = table_of([(10, [12, 10]), (0, [3])], read=[1, 0, 4])
    assert table.num_rows == 3
    assert table.shared().tolist() == [10, 10, 0]
    assert table.lengths.tolist() == [13, 10, 7]
    assert table.filled(None).tolist() == [3, 0, 7]
    # a layer that keeps what it sees has the last 4 tokens of each row's prompt
    assert table.base(4).tolist() == [8, 6, 0]
    assert table.filled(4).tolist() == [5, 4, 7]
    table.keep(np.array([2, 0], np.int32))
    assert table.lengths.tolist() == [7, 13]


@settings(max_examples=40)
@given(tables(), st.booleans(), WINDOWS)
def test_a_mask_shows_each_token_what_its_row_has_before_it(
    table: Table, keeps: bool, window: int | None
) -> None:
    """`keeps`: the layer keeps a window of tokens itself, else all of them behind the prefix."""
    kept = window if keeps else None
    mask = np.array(table.mask(kept, window))
    base, filled = table.base(kept), table.filled(kept)
    assert mask.shape == (table.num_rows, 1, table.num_new, filled.max() + table.num_new)
    for row, token in np.ndindex(table.num_rows, table.num_new):
        found = {int(base[row]) + int(slot) for slot in np.flatnonzero(mask[row, 0, token])}
        own = {place for place in seen(table, row, token, window) if place >= base[row]}
        assert found == own
        if kept is not None:  # nothing that the window shows was left out when the row joined
            assert own == seen(table, row, token, window)


@settings(max_examples=40)
@given(tables(), st.booleans(), WINDOWS)
def test_a_runs_own_mask_has_the_prefix_where_a_window_hides_a_part_of_it(
    table: Table, keeps: bool, window: int | None
) -> None:
    kept = window if keeps else None
    for run in table.runs:
        base, filled = table.base(kept)[run.begin : run.end], table.filled(kept)[run.begin : run.end]
        num_slots = int(filled.max()) + table.num_new
        hides = table.hides_prefix(run, kept, window)
        before = run.shared if hides else 0
        given_mask = table.run_mask(run, kept, window)
        shape = (run.num_rows, 1, table.num_new, before + num_slots)
        mask = np.ones(shape, bool) if given_mask is None else np.array(given_mask)
        assert mask.shape == shape
        assert given_mask is None or not mask.all()
        for row, token in np.ndindex(run.num_rows, table.num_new):
            columns = np.flatnonzero(mask[row, 0, token])
            found = {int(one) if one < before else int(base[row] + one - before) for one in columns}
            if not hides and kept is None:
                found |= set(range(run.shared))  # which is read where it is stored, all of it
            assert found == seen(table, run.begin + row, token, window)


@settings(max_examples=40)
@given(tables(), st.booleans(), WINDOWS)
def test_no_mask_is_given_only_where_everything_is_seen(
    table: Table, keeps: bool, window: int | None
) -> None:
    kept = window if keeps else None
    if table.sees_all(kept, window):
        assert np.array(table.mask(kept, window)).all()
        for run in table.runs:
            assert not table.hides_prefix(run, kept, window)
    elif window is None and table.num_new == 1:
        assert not np.array(table.mask(kept, window)).all()


def test_a_mask_is_known_again_by_its_window_until_the_next_step() -> None:
    table = table_of([(0, [3, 5])])
    table.begin_step(1)
    whole, narrow = table.mask(None, None), table.mask(None, 4)
    assert (table.window_of(whole), table.window_of(narrow)) == (None, 4)
    with pytest.raises(ValueError, match="a mask of its own"):
        table.window_of(mx.logical_and(whole, narrow))
    table.begin_step(1)
    with pytest.raises(ValueError, match="a mask of its own"):
        table.window_of(whole)


def test_masks_of_a_run_are_made_once_a_step_for_all_layers() -> None:
    table = table_of([(0, [3, 5])])
    table.begin_step(1)
    (run,) = table.runs
    first = table.run_mask(run, None, None)
    assert first is table.run_mask(run, None, None)
    table.advance(1)
    table.begin_step(1)
    assert first is not table.run_mask(run, None, None)


# ---------------------------------------------------------------- one layer


def test_new_keys_stand_behind_those_of_their_own_row() -> None:
    table = table_of([(0, [0, 0, 0])])
    cache = SlotCache(table, 0, None)
    expected: list[list[Any]] = [[], [], []]
    assert cache.empty()
    for seed, read in enumerate([[3, 1, 2], [1, 1, 1], [2, 3, 1]]):
        table.begin_step(3)
        new = random_keys(seed, 3, 3)
        keys, values = cache.update_and_fetch(new, -new)
        for row in range(3):
            known = [*expected[row], *np.array(new[row]).transpose(1, 0, 2)]
            np.testing.assert_array_equal(np.array(keys[row]).transpose(1, 0, 2)[: len(known)], known)
            np.testing.assert_array_equal(
                np.array(values[row]).transpose(1, 0, 2)[: len(known)], -np.array(known)
            )
            expected[row] = known[: len(expected[row]) + read[row]]  # the rest is forgotten
        table.advance(np.array(read, np.int32))
    assert not cache.empty()
    assert not cache.is_trimmable()


def test_the_offset_is_that_of_the_next_token() -> None:
    """Models ask before they write, some after it."""
    table = table_of([(4, [6, 5])])
    cache = SlotCache(table, 0, None)
    cache.write([0, 1], random_keys(0, 2, 2), random_keys(1, 2, 2))
    table.begin_step(2)
    assert cache.offset.tolist() == [6, 5]
    cache.update_and_fetch(random_keys(2, 2, 2), random_keys(3, 2, 2))
    assert cache.offset.tolist() == [8, 7]
    table.advance(np.array([2, 1], np.int32))
    table.begin_step(1)
    assert cache.offset.tolist() == [8, 6]


@pytest.mark.parametrize("num_slots", [1, GROWTH - 1, GROWTH, GROWTH + 1])
def test_buffers_grow_by_whole_steps_and_a_quarter_at_least(num_slots: int) -> None:
    table = table_of([(0, [num_slots])])
    cache = SlotCache(table, 0, None)
    first = random_keys(0, 1, num_slots)
    cache.write([0], first, -first)
    sizes = {cache.keys.shape[2]}
    assert sizes == {-(-num_slots // GROWTH) * GROWTH}
    for _ in range(10 * GROWTH):
        table.begin_step(1)
        cache.update_and_fetch(mx.ones((1, HEADS, 1, WIDTH)), mx.ones((1, HEADS, 1, WIDTH)))
        table.advance(1)
        sizes.add(cache.keys.shape[2])
    ordered = sorted(sizes)
    assert all(size % GROWTH == 0 for size in ordered)
    assert all(size >= before * 5 // 4 for before, size in itertools.pairwise(ordered))
    np.testing.assert_array_equal(np.array(cache.keys)[:, :, :num_slots], np.array(first))
    assert np.array(cache.values)[:, :, num_slots : num_slots + 10 * GROWTH].min() == 1
    assert cache.nbytes == 2 * HEADS * ordered[-1] * WIDTH * 4


def test_a_row_that_joins_finds_nothing_of_the_one_before_it() -> None:
    """Zero times NaN is NaN: slots that no mask shows count all the same."""
    table = table_of([(0, [5, 5, 5])])
    cache = SlotCache(table, 0, None)
    stale = mx.full((3, HEADS, 5, WIDTH), float("nan"))
    cache.write([0, 1, 2], stale, stale)
    short = random_keys(1, 1, 2)
    cache.write([1], short, -short)
    cache.clear([2, 7])
    keys = np.array(cache.keys)
    assert np.isnan(keys[0, :, :5]).all()
    np.testing.assert_array_equal(keys[1, :, :2], np.array(short[0]))
    assert not keys[1, :, 2:].any()
    assert not keys[2].any()
    np.testing.assert_array_equal(np.array(cache.values)[1:], -keys[1:])


def test_a_row_that_joins_behind_the_last_one_finds_nothing_of_former_rows() -> None:
    table = table_of([(0, [3, 3])])
    cache = SlotCache(table, 0, None)
    stale = mx.full((1, HEADS, 3, WIDTH), float("nan"))
    cache.write([0], random_keys(6, 1, 3), random_keys(7, 1, 3))
    cache.write([1], stale, stale)
    table.runs[0].end = 1
    table.keep(np.array([0], np.int32))
    for _ in range(2):  # a step beside the place that is not used
        table.begin_step(1)
        _, values = cache.update_and_fetch(random_keys(0, 1, 1), random_keys(1, 1, 1))
        assert np.isfinite(np.array(values)).all()
        table.advance(1)
    table.runs[0].end = 2
    table.place([1], np.array([1], np.int32))
    cache.write([1], random_keys(2, 1, 1), random_keys(3, 1, 1))
    table.begin_step(1)
    _, values = cache.update_and_fetch(random_keys(4, 2, 1), random_keys(5, 2, 1))
    assert np.isfinite(np.array(values)).all()


def test_rows_are_copied_out_before_they_are_laid_elsewhere() -> None:
    table = table_of([(0, [2, 2, 2])])
    cache = SlotCache(table, 0, None)
    cache.write([0, 1, 2], random_keys(0, 3, 2), random_keys(1, 3, 2))
    before = np.array(cache.keys), np.array(cache.values)
    copies = cache.rows([2, 0])
    mx.eval(copies)
    cache.put([0, 2], copies)
    np.testing.assert_array_equal(np.array(cache.keys), before[0][[2, 1, 0]])
    np.testing.assert_array_equal(np.array(cache.values), before[1][[2, 1, 0]])


@pytest.mark.parametrize(("num_rows", "kept"), [(5, 8), (4, 4), (1, 1)])
def test_memory_of_places_is_given_back_once_half_of_them_is_empty(num_rows: int, kept: int) -> None:
    table = table_of([(0, [2] * 8)])
    cache = SlotCache(table, 0, None)
    cache.write(range(8), random_keys(0, 8, 2), random_keys(1, 8, 2))
    before = np.array(cache.keys)
    cache.shrink(num_rows)
    assert cache.keys.shape[0] == cache.values.shape[0] == kept
    np.testing.assert_array_equal(np.array(cache.keys), before[:kept])


def test_a_layer_that_keeps_nothing_has_nothing() -> None:
    """As that of a model whose layers share the keys of others."""
    cache = SlotCache(table_of([(0, [2])]), 0, None)
    cache.clear([0])
    cache.shrink(0)
    assert cache.rows([0]) == []
    cache.put([0], [])
    assert (cache.nbytes, cache.state, cache.empty()) == (0, (None, None), True)


def test_a_layer_with_a_window_of_its_own_stands_behind_no_prefix() -> None:
    prefix = prefix_of(6)
    table = Table()
    table.runs = [Run(prefix, 0, 1), Run(None, 1, 2)]
    table.place([0, 1], np.array([8, 3], np.int32))
    assert SlotCache(table, 0, None).prefix_of(table.runs[0]) is prefix.caches[0]
    assert SlotCache(table, 0, 4).prefix_of(table.runs[0]) is None
    assert SlotCache(table, 0, None).prefix_of(table.runs[1]) is None
