from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_eval.engine import kv
from mlx_eval.engine.batches import Batch, Level, Limits, RowKey, ScoringPlan, Sharing
from mlx_eval.engine.branch import BranchCache, Layout
from mlx_eval.engine.plan import plan_scoring
from mlx_eval.engine.rows import ForkError
from mlx_eval.records import ScoringRequest
from tests.engine.forests import POLICIES, Policy, shared_requests

WINDOW = 3


def model_with(*kinds: Callable[[], Any]) -> Any:
    """What the factory asks of a model: its caches."""
    return SimpleNamespace(make_cache=lambda: [kind() for kind in kinds], layers=[])


def plain() -> Any:
    from mlx_lm.models.cache import KVCache

    return KVCache()


def sliding(keep: int = 0) -> Any:
    from mlx_lm.models.cache import RotatingKVCache

    return RotatingKVCache(WINDOW, keep)


def recurrent() -> Any:
    from mlx_lm.models.cache import ArraysCache

    return ArraysCache(1)


def listed(*kinds: Callable[[], Any]) -> Callable[[], Any]:
    from mlx_lm.models.cache import CacheList

    return lambda: CacheList(*(kind() for kind in kinds))


# ---------------------------------------------------------------- what rows see, forest by forest


def seen_by_attention(cache: Any, tokens: mx.array) -> list[list[list[int]]]:
    """The tokens that each query of each row sees, in their order: their ids are the keys."""
    rows, length = tokens.shape
    keys = tokens.astype(mx.float32)[:, None, :, None]
    mask = cache.make_mask(length, window_size=None, return_array=False)
    whole = np.array(cache.update_and_fetch(keys, keys)[0])[:, 0, :, 0].astype(int)
    if mask is None or isinstance(mask, str):
        size = whole.shape[1]
        place = np.arange(size - length, size)[:, None]
        visible = np.broadcast_to(np.arange(size) <= place, (rows, length, size))
    else:
        visible = np.broadcast_to(np.array(mask), (rows, 1, length, whole.shape[1]))[:, 0]
    return [[whole[row][visible[row, query]].tolist() for query in range(length)] for row in range(rows)]


def seen_by_state(cache: Any, tokens: mx.array) -> list[list[list[int]]]:
    """The same of a recurrent state that keeps all it reads, padding too."""
    state = tokens if cache[0] is None else mx.concatenate([cache[0], tokens], axis=1)
    cache[0] = state
    before = state.shape[1] - tokens.shape[1]
    return [[row[: before + query + 1] for query in range(tokens.shape[1])] for row in state.tolist()]


def seen_by(cache: Any, tokens: mx.array) -> list[tuple[list[list[list[int]]], int | None]]:
    """What each layer of a model sees, with the window that it should see through."""
    if isinstance(inner := getattr(cache, "caches", None), tuple | list):
        return [layer for one in inner for layer in seen_by(one, tokens)]
    if hasattr(cache, "update_and_fetch"):
        window = getattr(cache, "window", None) or getattr(cache, "max_size", None)
        return [(seen_by_attention(cache, tokens), window)]
    return [(seen_by_state(cache, tokens), None)]


class Walk:
    """Runs a plan over caches alone and compares what each token sees with its row's sequence."""

    def __init__(self, plan: ScoringPlan, factory: kv.CacheFactory) -> None:
        self.plan = plan
        self.factory = factory
        self.states: dict[int, kv.State] = {}
        self.prefixes: dict[RowKey, kv.Prefix] = {}
        for index, batch in enumerate(plan.batches):
            self.run(index, batch)

    def run(self, index: int, batch: Batch) -> None:
        starts = np.array([row.start for row in batch.rows], np.int32)
        lengths = np.array([row.length for row in batch.rows], np.int32)
        sources: dict[int, list[int]] = {}
        for row in batch.rows:
            if row.parent is not None:
                sources.setdefault(row.parent.batch, []).append(row.parent.row)
        parents = [(self.states[key], np.array(rows, np.int32)) for key, rows in sources.items()]
        prefix = None if batch.prefix is None else self.prefixes[batch.prefix]
        layout = kv.next_layout(starts, lengths, batch.prefix_len, parents)
        caches = self.factory.start(layout, prefix, parents)
        tokens = mx.array(self.plan.token_array(batch))
        for begin in range(0, batch.length, self.plan.limits.step):
            piece = tokens[:, begin : begin + self.plan.limits.step]
            for cache in caches:
                for seen, window in seen_by(cache, piece):
                    self.compare(batch, begin, seen, window)
        state = kv.State(layout, batch.length, caches)
        self.states[index] = state
        for row in batch.new_prefixes:
            made = self.factory.prefix(state, row, prefix)
            assert made.length == batch.rows[row].end
            self.prefixes[RowKey(index, row)] = made

    def compare(self, batch: Batch, begin: int, seen: list[list[list[int]]], window: int | None) -> None:
        for row, queries in zip(batch.rows, seen, strict=True):
            for place, found in enumerate(queries, row.start + begin):
                if place < row.end:
                    path = self.plan.sequences[row.sequence][: place + 1].tolist()
                    assert found == (path if window is None else path[-window:])


LIMITS = st.builds(
    Limits,
    max_rows=st.integers(1, 6),
    batch_tokens=st.sampled_from([6, 20, 2048]),
    kv_bytes=st.sampled_from([100, 2**30]),
    step=st.sampled_from([1, 2, 2048]),
)
REQUESTS = shared_requests(max_requests=10)
BRANCHED = {
    "plain": (plain,),
    "sliding": (sliding, plain),
    "listed": (listed(plain, sliding), listed(listed(plain))),
}


@pytest.mark.parametrize("name", BRANCHED)
@settings(deadline=None, max_examples=40)
@given(REQUESTS, LIMITS, POLICIES)
def test_tokens_see_the_way_to_them_and_nothing_else(
    name: str, requests: list[ScoringRequest], limits: Limits, policy: Policy
) -> None:
    factory = kv.CacheFactory(model_with(*BRANCHED[name]))
    assert factory.keys_only
    for level in (Level.RAGGED, Level.EQUAL):
        with policy.applied():
            plan = plan_scoring(requests, limits, Sharing(level), split_tokens=0)
        Walk(plan, factory)


@settings(deadline=None, max_examples=60)
@given(REQUESTS, LIMITS, POLICIES)
def test_recurrent_states_beside_keys_hold_the_way_to_them_where_parents_have_no_padding(
    requests: list[ScoringRequest], limits: Limits, policy: Policy
) -> None:
    factory = kv.CacheFactory(model_with(recurrent, listed(sliding, recurrent)))
    assert not factory.keys_only
    sharing = Sharing(Level.EQUAL, keys_only=False)
    with policy.applied():
        plan = plan_scoring(requests, limits, sharing, split_tokens=0)
    Walk(plan, factory)


@settings(deadline=None, max_examples=60)
@given(REQUESTS, LIMITS, POLICIES)
def test_caches_of_mlx_lm_are_copied_with_their_prefixes(
    requests: list[ScoringRequest], limits: Limits, policy: Policy
) -> None:
    factory = kv.CacheFactory(model_with(plain, recurrent), branches=False)
    assert not factory.keys_only
    sharing = Sharing(Level.EQUAL, prefix_once=False, keys_only=False)
    with policy.applied():
        plan = plan_scoring(requests, limits, sharing, split_tokens=0)
    Walk(plan, factory)


# ---------------------------------------------------------------- pieces


def kinds_of(caches: Sequence[Any]) -> list[Any]:
    return [kinds_of(cache.caches) if hasattr(cache, "caches") else type(cache).__name__ for cache in caches]


def test_plain_and_sliding_keys_are_branched_and_everything_else_is_left_as_it_is() -> None:
    class Plain(type(plain())):  # type: ignore[misc]
        """A kind of its own, which may compute something else."""

    model = model_with(
        plain, sliding, recurrent, listed(plain, recurrent), functools.partial(sliding, 4), Plain
    )
    layout = Layout(0, np.zeros((1, 0), np.int32), np.zeros(1, np.int32), np.ones(1, np.int32))
    caches = kv.CacheFactory(model).start(layout, None, [])
    assert kinds_of(caches) == [
        "BranchCache",
        "BranchCache",
        "ArraysCache",
        ["BranchCache", "ArraysCache"],
        "RotatingKVCache",  # it keeps the first four tokens for good
        "Plain",
    ]
    assert [caches[0].window, caches[1].window] == [None, WINDOW]
    own = kv.CacheFactory(model, branches=False).start(layout, None, [])
    assert kinds_of(own)[:4] == ["KVCache", "RotatingKVCache", "ArraysCache", ["KVCache", "ArraysCache"]]


def test_only_keys_and_values_say_so() -> None:
    assert kv.CacheFactory(model_with(plain, listed(sliding, plain))).keys_only
    assert not kv.CacheFactory(model_with(plain, listed(sliding, recurrent))).keys_only
    assert not kv.CacheFactory(model_with(plain), branches=False).keys_only


def test_a_model_without_caches_of_its_own_gets_plain_ones() -> None:
    layout = Layout(0, np.zeros((1, 0), np.int32), np.zeros(1, np.int32), np.ones(1, np.int32))
    factory = kv.CacheFactory(SimpleNamespace(layers=[0, 1, 2]), splits_attention=True)
    caches = factory.start(layout, None, [])
    assert kinds_of(caches) == ["BranchCache"] * 3
    assert [cache.splits_attention for cache in caches] == [False] * 3  # there is no prefix to read


def test_layouts_of_rows_from_several_batches_and_of_rows_from_the_prefix_alone() -> None:
    first = kv.State(
        Layout(4, np.zeros((2, 0), np.int32), np.array([4, 4], np.int32), np.array([3, 1], np.int32)), 3, []
    )
    second = kv.State(
        Layout(4, np.array([[4, -1]], np.int32), np.array([5], np.int32), np.array([2], np.int32)), 2, []
    )
    sources = [(first, np.array([1, 0], np.int32)), (second, np.array([0], np.int32))]
    starts, lengths = np.array([4, 5, 7, 7], np.int32), np.array([2, 2, 1, 2], np.int32)
    layout = kv.next_layout(starts, lengths, 4, sources)
    assert layout.positions.tolist() == [[-1] * 4, [4, -1, -1, -1], [4, 5, 6, -1], [4, -1, 5, 6]]
    assert (layout.prefix_len, layout.starts.tolist(), layout.lengths.tolist()) == (
        4,
        [4, 5, 7, 7],
        [2, 2, 1, 2],
    )
    short = kv.next_layout(starts[1:2], lengths[1:2], 4, [(first, np.array([1], np.int32))])
    assert short.positions.tolist() == [[4]]  # slots that only other rows use are left behind


def test_caches_that_ask_are_told_of_padding_and_of_its_end() -> None:
    asked, other = recurrent(), plain()
    inside = listed(recurrent, plain)()
    kv.prepare([asked, other, inside], np.array([2, 3], np.int32), 3)
    assert asked.lengths.tolist() == inside[0].lengths.tolist() == [2, 3]
    assert asked.make_mask(3).tolist() == [[True, True, False], [True] * 3]
    kv.finalize([asked, other, inside])
    assert asked.lengths is None
    assert inside[0].lengths is None
    kv.prepare([asked], np.array([3, 3], np.int32), 3)
    assert asked.lengths is None  # no row is padded: the model need not mask


def test_every_array_is_found_for_evaluation() -> None:
    keys = mx.zeros((1, 1, 2, 4))
    branch = BranchCache(
        Layout(0, np.zeros((1, 0), np.int32), np.zeros(1, np.int32), np.full(1, 2, np.int32))
    )
    assert kv.arrays_of([branch, plain(), recurrent()]) == []
    branch.update_and_fetch(keys, keys)
    held = listed(plain, recurrent)()
    held[0].update_and_fetch(keys, keys)
    held[1][0] = mx.zeros((1, 3))
    assert len(kv.arrays_of([branch, held])) == 2 + 3
    assert len(kv.Prefix(2, [(keys, keys), held]).arrays()) == 2 + 3


def test_rows_that_cannot_be_copied_say_so() -> None:
    class Crossed:
        def __init__(self) -> None:
            self.by_row, self.by_head = mx.zeros((2, 3)), mx.zeros((4, 3))

    factory = kv.CacheFactory(model_with(Crossed))
    layout = Layout(0, np.zeros((2, 0), np.int32), np.zeros(2, np.int32), np.full(2, 3, np.int32))
    state = kv.State(layout, 3, factory.start(layout, None, []))
    with pytest.raises(ForkError, match="Crossed"):
        factory.prefix(state, 0, None)
    rows = np.array([0], np.int32)
    after = kv.next_layout(np.array([3], np.int32), np.array([1], np.int32), 0, [(state, rows)])
    with pytest.raises(ForkError, match="Crossed"):
        factory.start(after, None, [(state, rows)])
