from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from mlx_eval.engine.kv import CacheFactory, Prefix
from mlx_eval.engine.row_caches import PlainCaches, ReadRows, RowCaches
from mlx_eval.engine.rows import ForkError
from mlx_eval.engine.slots import SlotCache

WINDOW = 4
HEADS, WIDTH = 2, 4


def factory(*caches: Any) -> CacheFactory:
    """Of a model that has these caches."""
    return CacheFactory(SimpleNamespace(make_cache=lambda: copy.deepcopy(list(caches))))


def as_keys(rows: Sequence[Sequence[float]]) -> mx.array:
    """[k, 1, S, 1] tokens told by their numbers; short rows have another number behind."""
    width = max(map(len, rows))
    return mx.array(
        np.array([[*row, *[999.0] * (width - len(row))] for row in rows], np.float32)[:, None, :, None]
    )


class Walk:
    """Rows that come and go at random, and what each of them has read."""

    def __init__(self, seed: int, *, has_state: bool) -> None:
        self.rng = np.random.default_rng(seed)
        self.has_state = has_state
        state = [ArraysCache(1)] if has_state else []
        self.caches = RowCaches(factory(KVCache(), RotatingKVCache(WINDOW), *state))
        self.prefixes: list[tuple[Prefix | None, list[float]]] = [(None, [])]
        for length in (2, 5):
            tokens = self.tokens(length)
            keys = as_keys([tokens])
            self.prefixes.append(
                (Prefix(length, [(keys, -keys), (keys, -keys), None][: 2 + has_state]), tokens)
            )
        self.texts: dict[int, list[float]] = {}
        """All tokens of each row, those of its prefix included."""
        self.bad: set[int] = set()
        """Rows whose keys are no numbers."""
        self.places: list[int | None] = []
        self.num_joined = 0

    def tokens(self, size: int) -> list[float]:
        return [float(token) for token in self.rng.integers(1, 900, size)]

    def join(self, count: int) -> None:
        prefix, before = self.prefixes[self.rng.integers(len(self.prefixes))]
        least = 1 if self.has_state else 0
        owns = [self.tokens(int(self.rng.integers(least, 7))) for _ in range(count)]
        names = list(range(self.num_joined, self.num_joined + count))
        self.num_joined += count
        for name, own in zip(names, owns, strict=True):
            if self.rng.random() < 0.2 and own:
                own[-1] = float("nan")
                self.bad.add(name)
            self.texts[name] = [*before, *own]
        lengths = np.array([len(self.texts[name]) for name in names], np.int32)
        layers: list[Any] = [None, None]
        if any(owns):
            keys = as_keys(owns)
            layers[0] = keys, -keys
        if lengths.any():
            kept = as_keys([self.texts[name][max(0, len(self.texts[name]) - WINDOW) :] for name in names])
            layers[1] = kept, -kept
        if self.has_state:
            state = ArraysCache(1)
            state[0] = mx.array([[float(sum(self.texts[name]))] for name in names])
            layers.append(state)
        places = self.caches.join(ReadRows(lengths, prefix, layers if lengths.any() else []))
        for name, place in zip(names, places, strict=True):
            self.places += [None] * (place + 1 - len(self.places))
            assert self.places[place] is None
            self.places[place] = name

    def leave(self) -> None:
        going = [
            place for place, name in enumerate(self.places) if name is not None and self.rng.random() < 0.25
        ]
        self.caches.leave(going)
        for place in going:
            self.places[place] = None

    def compact(self) -> None:
        order = self.caches.compact()
        if order is not None:
            self.places = [self.places[place] for place in order]
        assert None not in self.places
        assert self.caches.num_rows == len(self.places)

    def step(self) -> None:
        names = [name for name in self.places if name is not None]
        if not names:
            return
        table, objects = self.caches.table, self.caches.objects
        num_new = 1 if self.has_state else int(self.rng.integers(1, 4))
        new = [self.tokens(num_new) for _ in names]
        self.caches.begin_step(num_new)
        assert table.offset.tolist() == [len(self.texts[name]) for name in names]
        for leaf in objects[:2]:
            fetched = leaf.update_and_fetch(as_keys(new), -as_keys(new))
            base = table.base(leaf.window)
            for place, name in enumerate(names):
                own = [*self.texts[name], *new[place]][base[place] :]
                for array, sign in zip(fetched, (1, -1), strict=True):
                    row = np.array(array)[place, 0, :, 0]
                    np.testing.assert_array_equal(row[: len(own)], sign * np.array(own))
                    assert name in self.bad or np.isfinite(row).all()
            for run in table.runs:
                slots = np.array(leaf.of_run(run)[0])
                np.testing.assert_array_equal(
                    slots, np.array(fetched[0])[run.begin : run.end, :, : slots.shape[2]]
                )
        for run in table.runs:
            before = {id(prefix): tokens for prefix, tokens in self.prefixes}[id(run.prefix)]
            for place in range(run.begin, run.end):
                assert self.texts[names[place]][: len(before)] == before
        if self.has_state:
            state = objects[2]
            sums = [[sum(self.texts[name])] for name in names]
            np.testing.assert_array_equal(np.array(state[0]), np.array(sums, np.float32))
            state[0] = state[0] + as_keys(new)[:, 0, :, 0]
        read = np.array([self.rng.integers(1, num_new + 1) for _ in names], np.int32)
        for place, name in enumerate(names):
            self.texts[name] += new[place][: read[place]]
        self.caches.advance(read)


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_every_row_keeps_what_it_has_read_whoever_comes_and_goes(seed: int, has_state: bool) -> None:
    """Behind two prefixes and none, drafts that are forgotten included; rows with NaN spoil no other."""
    walk = Walk(seed, has_state=has_state)
    for _ in range(12):
        for _ in range(walk.rng.integers(0, 3)):
            walk.join(int(walk.rng.integers(1, 4)))
        walk.compact()
        walk.step()
        walk.leave()
        if walk.rng.random() < 0.5:
            walk.compact()


# ---------------------------------------------------------------- places


def rows_of(lengths: Sequence[int], prefix: Prefix | None = None, heads: int = HEADS) -> ReadRows:
    """Rows of random keys for a model of one layer."""
    own = max(lengths) - (0 if prefix is None else prefix.length)
    rng = np.random.default_rng(sum(lengths))
    keys = mx.array(rng.standard_normal((len(lengths), heads, own, WIDTH)).astype(np.float32))
    return ReadRows(np.array(lengths, np.int32), prefix, [(keys, -keys)])


def stem(length: int = 3) -> Prefix:
    keys = mx.random.normal((1, HEADS, length, WIDTH))
    return Prefix(length, [(keys, -keys)])


def test_rows_behind_one_prefix_are_neighbours_and_take_the_places_of_those_that_left() -> None:
    first, second = stem(), stem()
    caches = RowCaches(factory(KVCache()))
    assert caches.join(rows_of([4, 5], first)) == [0, 1]
    assert caches.join(rows_of([4], second)) == [2]
    assert caches.join(rows_of([6])) == [3]
    caches.leave([0, 2])
    assert caches.num_rows == 2
    assert caches.join(rows_of([5, 6], first)) == [0, 4]  # the second finds no hole in its run
    assert caches.join(rows_of([4], first)) == [5]
    assert caches.num_rows == 5
    assert caches.compact() is not None
    found = [(run.prefix, run.begin, run.end) for run in caches.table.runs]
    assert found == [(first, 0, 2), (None, 2, 3), (first, 3, 5)]
    assert caches.table.lengths.tolist() == [
        5,
        5,
        6,
        4,
        6,
    ]  # the last one moved, to where the third run begins now


def test_runs_that_meet_become_one() -> None:
    prefix = stem()
    caches = RowCaches(factory(KVCache()))
    caches.join(rows_of([4], prefix))
    caches.join(rows_of([6]))
    caches.join(rows_of([5, 5], prefix))
    caches.leave([1])
    assert caches.compact().tolist() == [0, 3, 2]  # type: ignore[union-attr]  # something moves
    assert [(run.begin, run.end) for run in caches.table.runs] == [(0, 3)]
    assert caches.compact() is None


def test_a_batch_that_everyone_has_left_is_begun_again() -> None:
    caches = RowCaches(factory(KVCache()))
    caches.join(rows_of([4, 5], stem()))
    caches.leave([0, 1])
    assert caches.num_rows == 0
    assert caches.compact().tolist() == []  # type: ignore[union-attr]
    assert caches.table.runs == []
    assert caches.prefix_bytes() == 0
    assert caches.join(rows_of([3])) == [0]


@pytest.mark.parametrize("seed", range(40))
def test_as_few_rows_are_moved_as_can_be(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prefixes = [None, stem(), stem()]
    caches = RowCaches(factory(KVCache()))
    behind: list[Prefix | None] = []
    for prefix in prefixes:
        count = int(rng.integers(1, 5))
        caches.join(rows_of([4] * count, prefix))
        behind += [prefix] * count
    holes = [place for place in range(len(behind)) if rng.random() < 0.4]
    caches.leave(holes)
    alive = [
        [place for place, one in enumerate(behind) if one is prefix and place not in holes]
        for prefix in prefixes
    ]
    fewest = 0
    begin = 0
    for run in alive:  # runs stay in their order: within each, every order of its rows
        orders = itertools.permutations(run)
        fewest += min(sum(old != begin + at for at, old in enumerate(order)) for order in orders)
        begin += len(run)
    moved: list[int] = []

    class Counted(SlotCache):
        def put(self, places: Sequence[int], copies: Sequence[mx.array]) -> None:
            moved.extend(places)
            super().put(places, copies)

    caches.objects[0].__class__ = Counted
    caches.compact()
    assert len(moved) == fewest


# ---------------------------------------------------------------- memory


def test_a_prefix_counts_once_however_many_stand_behind_it() -> None:
    prefix = stem(100)
    caches = RowCaches(factory(KVCache()))
    size = 2 * HEADS * 100 * WIDTH * 4
    assert caches.prefix_bytes() == caches.nbytes == 0
    assert caches.prefix_bytes(prefix) == size
    caches.join(rows_of([101] * 5, prefix))
    caches.join(rows_of([3]))
    caches.join(rows_of([101], prefix))  # in another run
    assert caches.prefix_bytes() == caches.prefix_bytes(prefix) == size
    assert caches.prefix_bytes(stem(50)) == size * 3 // 2
    assert caches.nbytes == size + caches.objects[0].nbytes
    assert caches.num_slots == 3


def peak_of(caches: RowCaches, action: Any) -> int:
    """Bytes above those in use that an action takes in between."""
    mx.eval([leaf.state for leaf in caches.objects])
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    action()
    mx.eval([leaf.state for leaf in caches.objects])
    mx.synchronize()
    return max(0, int(mx.get_peak_memory()) - int(before))  # the peak is 0 until something is allocated


@pytest.fixture
def wide() -> RowCaches:
    """32 rows of 8 MiB together."""
    caches = RowCaches(factory(KVCache()))
    caches.join(rows_of([1000] * 32, heads=8))
    assert caches.nbytes == 2 * 32 * 8 * 1024 * WIDTH * 4
    return caches


def step(caches: RowCaches) -> None:
    """A step that some of the device's work may still read."""
    new = mx.ones((caches.num_rows, 8, 1, WIDTH))
    caches.begin_step(1)
    keys, values = caches.objects[0].update_and_fetch(new, new)
    mx.async_eval(mx.sum(keys) + mx.sum(values))
    caches.advance(1)


def test_rows_are_moved_within_their_buffers(wide: RowCaches) -> None:
    """Nothing but copies of the rows that move is made: two of 32."""
    step(wide)
    size = wide.nbytes
    wide.leave([3, 5])
    peak = peak_of(wide, wide.compact)
    assert wide.nbytes == size
    assert peak < size / 8
    wide.leave([29])  # the last one: nobody moves
    assert peak_of(wide, wide.compact) == 0


def test_a_row_that_joins_is_written_into_the_buffers(wide: RowCaches) -> None:
    step(wide)
    size = wide.nbytes
    wide.leave([3])
    rows = rows_of([900], heads=8)
    mx.eval(rows.arrays())
    assert peak_of(wide, lambda: wide.join(rows)) < size / 8
    assert wide.nbytes == size


def test_a_step_writes_into_the_buffers(wide: RowCaches) -> None:
    step(wide)
    size = wide.nbytes
    # the sums read what lies behind the rows' slots too, which is no copy
    assert peak_of(wide, lambda: step(wide)) < size / 8
    assert wide.nbytes == size


def test_memory_is_given_back_once_half_of_the_rows_have_left(wide: RowCaches) -> None:
    size = wide.nbytes
    wide.leave(range(16))
    wide.compact()
    assert wide.nbytes == size / 2


# ---------------------------------------------------------------- what a model remembers beside keys and values


def state_rows(values: Sequence[float]) -> ReadRows:
    state = ArraysCache(2)
    state[0] = mx.array([[value] for value in values])
    state[1] = mx.array([[[-value]] for value in values])
    return ReadRows(np.ones(len(values), np.int32), None, [state])


def test_states_are_put_together_and_taken_apart_by_row() -> None:
    caches = RowCaches(factory(ArraysCache(2)))
    caches.join(state_rows([1, 2, 3]))
    caches.join(state_rows([4]))
    caches.leave([1, 2])
    assert caches.join(state_rows([5])) == [1]
    order = caches.compact()
    assert order is not None
    assert order.tolist() == [0, 1, 3]
    (state,) = caches.objects
    assert state[0][:, 0].tolist() == [1, 5, 4]
    assert state[1][:, 0, 0].tolist() == [-1, -5, -4]


def test_states_that_differ_in_more_than_rows_cannot_be_put_together() -> None:
    caches = RowCaches(factory(ArraysCache(1)))
    narrow, broad = ArraysCache(1), ArraysCache(1)
    narrow[0], broad[0] = mx.zeros((1, 2)), mx.zeros((1, 3))
    one = np.ones(1, np.int32)
    caches.join(ReadRows(one, None, [narrow]))
    with pytest.raises(ForkError):
        caches.join(ReadRows(one, None, [broad]))


def test_some_of_the_rows_that_were_read_together() -> None:
    state = ArraysCache(1)
    state[0] = mx.array([[1.0], [2.0], [3.0]])
    keys = mx.arange(6.0).reshape(3, 1, 2, 1)
    rows = ReadRows(np.array([5, 6, 7], np.int32), stem(), [(keys, -keys), None, state])
    assert rows.take(slice(0, 3)) is rows
    assert len(rows.arrays()) == 3
    some = rows.take(slice(1, None))
    assert some.lengths.tolist() == [6, 7]
    assert some.prefix is rows.prefix
    assert some.layers[0][0][:, 0, :, 0].tolist() == [[2, 3], [4, 5]]
    assert some.layers[1] is None
    assert some.layers[2][0].tolist() == [[2.0], [3.0]]


def test_a_row_alone_has_the_caches_that_it_was_read_into() -> None:
    caches = PlainCaches()
    layers = [KVCache()]
    one = np.ones(1, np.int32)
    assert caches.compact().tolist() == []  # type: ignore[union-attr]
    assert caches.join(ReadRows(one, None, layers)) == [0]
    assert caches.objects is layers
    with pytest.raises(ValueError, match="one at a time"):
        caches.join(ReadRows(one, None, [KVCache()]))
    caches.begin_step(1)
    caches.advance(1)
    assert caches.compact() is None
    caches.leave([])
    assert caches.num_rows == 1
    caches.leave([0])
    assert (caches.num_rows, caches.objects, caches.nbytes) == (0, [], 0)
    with pytest.raises(ValueError, match="one at a time"):
        caches.join(ReadRows(np.ones(2, np.int32), None, layers))


def test_buffers_are_as_wide_as_the_rows_that_are_left_need() -> None:
    caches = RowCaches(factory(KVCache()))
    keys = mx.zeros((1, 1, 1000, 4))
    caches.join(ReadRows(np.array([1000], np.int32), None, [(keys, keys)]))
    short = mx.zeros((3, 1, 10, 4))
    caches.join(ReadRows(np.full(3, 10, np.int32), None, [(short, short)]))
    (leaf,) = caches.objects
    assert leaf.num_slots == 1024
    caches.leave([0])
    assert leaf.num_slots == 64
    assert caches.compact() is not None
    caches.join(ReadRows(np.full(3, 10, np.int32), None, [(short, short)]))
    assert caches.nbytes == 2 * 6 * 64 * 4 * 4
