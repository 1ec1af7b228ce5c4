from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_eval import config
from mlx_eval.engine.batches import PAD_ID, Batch, CacheSize, Level, Limits, Row, RowKey, ScoringPlan, Sharing
from mlx_eval.engine.plan import plan_prompts, plan_scoring
from mlx_eval.records import ScoringRequest
from tests.engine.forests import (
    POLICIES,
    Policy,
    input_of,
    maximal_inputs,
    prefixes_of,
    shared_requests,
    with_order,
)

LEVELS = st.sampled_from(Level)
SHARINGS = st.builds(Sharing, LEVELS, st.booleans(), st.booleans())
CACHES = st.sampled_from([CacheSize(), CacheSize(10, 0), CacheSize(3, 50)])
LIMITS = st.builds(
    Limits,
    max_rows=st.integers(1, 6),
    batch_tokens=st.sampled_from([1, 6, 20, 60, 2048]),
    kv_bytes=st.sampled_from([1, 100, 400, 2**30]),
    step=st.sampled_from([1, 3, 2048]),
)
SPLITS = st.sampled_from([0, 1, 3, config.SPLIT_TOKENS])
REQUESTS = shared_requests(max_requests=16)


def tokens_of(plan: ScoringPlan, row: Row, start: int = 0) -> tuple[int, ...]:
    """The tokens up to the row's end, from its root or from `start`."""
    return tuple(plan.sequences[row.sequence][start : row.end].tolist())


def rows_of(plan: ScoringPlan) -> list[Row]:
    return [row for batch in plan.batches for row in batch.rows]


class Ledger:
    """Walks a plan as the executor would, holds what it says to hold, and complains."""

    def __init__(self, plan: ScoringPlan, sharing: Sharing, cache: CacheSize) -> None:
        self.plan = plan
        self.sharing = sharing
        self.cache = cache
        self.held: dict[int | RowKey, int] = {}
        self.freed: list[int | RowKey] = []
        self.peak = 0
        self.num_slots: list[int] = []
        """Of each batch: the slots of its own that a row goes on from, up to its parent's last token."""
        for index, batch in enumerate(plan.batches):
            self.num_slots.append(max((self.slots_of(row) for row in batch.rows), default=0))
            self.check_sources(batch)
            self.check_limits(batch)
            self.check_level(batch)
            self.settle(index, batch)
        assert self.held == {}
        assert len(set(self.freed)) == len(self.freed)

    def check_sources(self, batch: Batch) -> None:
        """What rows go on from is held, was computed before, spells the same tokens and ends where they start."""
        if batch.prefix is None:
            assert batch.prefix_len == 0
        else:
            assert batch.prefix in self.held
            assert self.row(batch.prefix).end == batch.prefix_len
        for row in batch.rows:
            source = row.parent or batch.prefix
            if row.parent is not None:
                assert row.parent.batch in self.held
                parent_batch = self.plan.batches[row.parent.batch]
                assert parent_batch.prefix == batch.prefix
                assert row.parent.row not in parent_batch.new_prefixes
            if source is None:
                assert row.start == 0
            else:
                assert row.start == self.row(source).end
                path = tokens_of(self.plan, row)
                assert path[: row.start] == tokens_of(self.plan, self.row(source))
        # rows of one parent batch stand together, in the order of the batches; those of the prefix come first
        assert list(batch.rows) == sorted(batch.rows, key=lambda row: row.parent or RowKey(-1, -1))

    def check_limits(self, batch: Batch) -> None:
        limits = self.plan.limits
        assert batch.rows
        assert all(row.length > 0 for row in batch.rows)
        if len(batch.rows) == 1:
            return
        assert len(batch.rows) <= limits.max_rows
        assert len(batch.rows) * batch.length <= limits.batch_tokens
        assert self.running_bytes(batch) + sum(self.held.values()) <= limits.kv_bytes
        assert batch.padding <= config.FORWARD_TOKENS + config.PADDING_SHARE * batch.num_tokens

    def check_level(self, batch: Batch) -> None:
        level = self.sharing.level
        if level <= Level.ROWS:
            assert (batch.prefix, batch.is_parent, batch.new_prefixes) == (None, False, ())
        if level is Level.ALONE:
            assert len(batch.rows) == 1
        if level is Level.EQUAL:
            assert len({row.start for row in batch.rows}) == 1
        if not self.sharing.keys_only:
            assert len({row.parent is None for row in batch.rows}) == 1

    def settle(self, index: int, batch: Batch) -> None:
        running = self.running_bytes(batch)
        self.peak = max(self.peak, running + sum(self.held.values()))
        for key in batch.frees:
            del self.held[key]
        self.freed += batch.frees
        if batch.is_parent:
            self.held[index] = running
        for row in batch.new_prefixes:
            size = batch.rows[row].end * self.cache.token_bytes + self.cache.row_bytes
            self.held[RowKey(index, row)] = size

    def running_bytes(self, batch: Batch) -> int:
        """What the rows of a batch go on from, copied to each, and the new tokens, padded."""
        own, start = self.num_slots[-1], max(row.start for row in batch.rows)
        behind = own if self.sharing.prefix_once else start
        return len(batch.rows) * ((behind + batch.length) * self.cache.token_bytes + self.cache.row_bytes)

    def slots_of(self, row: Row) -> int:
        """Padding stays where it is, so a parent's row begins where its batch's longest ancestor ends."""
        return 0 if row.parent is None else self.num_slots[row.parent.batch] + self.row(row.parent).length

    def row(self, key: RowKey) -> Row:
        return self.plan.batches[key.batch].rows[key.row]


@given(REQUESTS, LIMITS, SHARINGS, CACHES, SPLITS, POLICIES)
def test_what_a_batch_needs_is_held_until_then_and_no_longer(  # noqa: PLR0917
    requests: list[ScoringRequest],
    limits: Limits,
    sharing: Sharing,
    cache: CacheSize,
    split: int,
    policy: Policy,
) -> None:
    with policy.applied():
        plan = plan_scoring(requests, limits, sharing, cache, split)
    ledger = Ledger(plan, sharing, cache)
    assert plan.peak_kv_bytes == ledger.peak
    used = [
        max(
            (
                place
                for place, later in enumerate(plan.batches)
                if key in (later.prefix, *(row.parent.batch for row in later.rows if row.parent is not None))
            ),
            default=None,
        )
        for key in ledger.freed
    ]
    freed_in = [place for place, batch in enumerate(plan.batches) for _ in batch.frees]
    assert used == freed_in  # as soon as the last batch that needs it is sent


@given(REQUESTS, LIMITS, SHARINGS, SPLITS, POLICIES)
def test_every_request_is_answered_once_and_figures_are_those_of_a_recount(
    requests: list[ScoringRequest], limits: Limits, sharing: Sharing, split: int, policy: Policy
) -> None:
    with policy.applied():
        plan = plan_scoring(requests, limits, sharing, split_tokens=split)
    answered: Counter[tuple[int, int]] = Counter()
    for row in rows_of(plan):
        for answer in row.answers:
            for index in range(answer.first, answer.stop):
                one = requests[answer.request]
                place = one.context_ids.size - 1 + index
                assert row.start <= place < row.end
                assert tokens_of(plan, row)[: place + 1] == input_of(one)[: place + 1]
                answered[answer.request, index] += 1
    assert answered == Counter(
        (number, index) for number, one in enumerate(requests) for index in range(one.continuation_ids.size)
    )
    assert plan.num_requests == len(requests)
    assert plan.naive_tokens == sum(len(input_of(one)) for one in requests)
    assert plan.unique_tokens == len(prefixes_of(requests))
    assert plan.planned_tokens == sum(row.end - row.start for row in rows_of(plan))
    widths = [len(batch.rows) * max(row.end - row.start for row in batch.rows) for batch in plan.batches]
    assert plan.padding == sum(widths) - plan.planned_tokens
    steps = [
        range(0, max(row.end - row.start for row in batch.rows), plan.limits.step) for batch in plan.batches
    ]
    assert plan.num_forwards == sum(map(len, steps))


@given(REQUESTS, LIMITS, st.booleans())
def test_with_free_splits_every_distinct_prefix_is_computed_once(
    requests: list[ScoringRequest], limits: Limits, prefix_once: bool
) -> None:
    for level in (Level.EQUAL, Level.RAGGED):
        plan = plan_scoring(requests, limits, Sharing(level, prefix_once), split_tokens=0)
        computed = [
            tokens_of(plan, row)[:size] for row in rows_of(plan) for size in range(row.start + 1, row.end + 1)
        ]
        assert Counter(computed) == Counter(prefixes_of(requests))


@given(REQUESTS, LIMITS)
def test_models_that_share_no_prefix_compute_each_input_that_begins_no_other(
    requests: list[ScoringRequest], limits: Limits
) -> None:
    plan = plan_scoring(requests, limits, Sharing(Level.ROWS))
    assert sorted(tokens_of(plan, row) for row in rows_of(plan)) == maximal_inputs(requests)


@given(REQUESTS, LIMITS)
def test_rows_alone_hold_nothing_but_their_own_input_in_one_step(
    requests: list[ScoringRequest], limits: Limits
) -> None:
    """In such models a token may change what those before it give."""
    plan = plan_scoring(requests, limits, Sharing(Level.ALONE))
    inputs = {(*one.context_ids.tolist(), *one.continuation_ids[:-1].tolist()) for one in requests}
    assert sorted(tokens_of(plan, row) for row in rows_of(plan)) == sorted(inputs)
    assert plan.num_forwards == len(plan.batches) == len(inputs)


@given(REQUESTS, LIMITS, st.booleans(), POLICIES)
def test_rows_that_are_gone_on_from_have_no_padding_where_padding_would_be_read(
    requests: list[ScoringRequest], limits: Limits, keys_only: bool, policy: Policy
) -> None:
    """Level EQUAL: a recurrent state runs over padding, so what becomes a parent or a prefix has none."""
    with policy.applied():
        plan = plan_scoring(requests, limits, Sharing(Level.EQUAL, keys_only=keys_only), split_tokens=0)
    goes_on = {
        row.parent or batch.prefix
        for batch in plan.batches
        for row in batch.rows
        if row.parent is not None or batch.prefix is not None
    }
    for key in goes_on:
        assert key is not None
        batch = plan.batches[key.batch]
        assert batch.rows[key.row].length == batch.length


@given(REQUESTS, LIMITS, SHARINGS, SPLITS, st.randoms(use_true_random=False))
def test_the_order_of_requests_does_not_change_the_plan(
    requests: list[ScoringRequest], limits: Limits, sharing: Sharing, split: int, random: Any
) -> None:
    shuffled, order = with_order(requests, random)
    first = plan_scoring(requests, limits, sharing, split_tokens=split)
    second = plan_scoring(shuffled, limits, sharing, split_tokens=split)

    def seen(plan: ScoringPlan, names: Sequence[int]) -> list[Any]:
        return [
            (
                [
                    (
                        tokens_of(plan, row),
                        row.start,
                        row.parent,
                        sorted((names[answer.request], answer.first, answer.stop) for answer in row.answers),
                    )
                    for row in batch.rows
                ],
                (batch.prefix, batch.prefix_len, batch.new_prefixes, batch.is_parent, batch.frees),
            )
            for batch in plan.batches
        ]

    assert seen(first, range(len(requests))) == seen(second, order)
    assert first.peak_kv_bytes == second.peak_kv_bytes


# ---------------------------------------------------------------- plans written by hand


def brief(plan: ScoringPlan) -> list[Any]:
    """The tokens that each row adds, the rows gone on from, and what is freed."""
    return [
        (
            [tuple(plan.sequences[row.sequence][row.start : row.end].tolist()) for row in batch.rows],
            [row.parent for row in batch.rows],
            batch.prefix,
            list(batch.frees),
        )
        for batch in plan.batches
    ]


SPLIT = 8
"""Given to the plans below, so that they do not hang on what the device is thought to cost."""


def questions(stem: int, branches: int, branch: int = 3, leaves: int = 2) -> list[ScoringRequest]:
    """One stem, then questions, then answers of two tokens."""
    return [
        ScoringRequest([1] * stem + [100 + question] * branch, [50 + leaf, 60, 61])
        for question in range(branches)
        for leaf in range(leaves)
    ]


def test_no_requests_make_no_batches() -> None:
    plan = plan_scoring([], Limits(8))
    assert plan.batches == ()
    assert (plan.num_requests, plan.naive_tokens, plan.planned_tokens, plan.padding) == (0, 0, 0, 0)
    assert (plan.unique_tokens, plan.num_forwards, plan.peak_kv_bytes) == (0, 0, 0)


def test_requests_that_feed_the_same_tokens_share_a_row() -> None:
    requests = [
        ScoringRequest([1, 2], [3, 4]),
        ScoringRequest([1, 2], [3, 9]),
        ScoringRequest([1], [2, 3, 5]),
    ]
    plan = plan_scoring(requests, Limits(8))
    (row,) = rows_of(plan)
    assert tokens_of(plan, row) == (1, 2, 3)
    assert sorted(answer.request for answer in row.answers) == [0, 1, 2]
    assert (plan.naive_tokens, plan.planned_tokens, plan.padding) == (9, 3, 0)


def test_a_header_becomes_a_prefix_and_small_families_copy_their_parents() -> None:
    plan = plan_scoring(questions(stem=10, branches=2, branch=8), Limits(8), split_tokens=SPLIT)
    header, first, second = RowKey(0, 0), RowKey(1, 0), RowKey(1, 1)
    assert brief(plan) == [
        ([(1,) * 10], [None], None, []),
        ([(101,) * 8, (100,) * 8], [None, None], header, []),
        ([(51, 60), (50, 60), (51, 60), (50, 60)], [first, first, second, second], header, [1, header]),
    ]
    assert [batch.new_prefixes for batch in plan.batches] == [(0,), (), ()]
    assert [batch.is_parent for batch in plan.batches] == [False, True, False]
    assert (plan.planned_tokens, plan.unique_tokens, plan.num_forwards) == (34, 34, 3)


def test_parents_are_planned_ahead_as_far_as_their_kv_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = questions(stem=10, branches=3, branch=8)
    limits = Limits(2, batch_tokens=100)
    header, leaves = RowKey(0, 0), [(51, 60), (50, 60)]
    assert brief(plan_scoring(requests, limits, split_tokens=SPLIT)) == [
        ([(1,) * 10], [None], None, []),
        ([(102,) * 8, (101,) * 8], [None, None], header, []),
        ([(100,) * 8], [None], header, []),
        (leaves, [RowKey(2, 0)] * 2, header, [2]),
        (leaves, [RowKey(1, 1)] * 2, header, []),
        (leaves, [RowKey(1, 0)] * 2, header, [1, header]),
    ]
    monkeypatch.setattr(config, "AHEAD_TOKENS", 0)
    assert brief(plan_scoring(requests, limits, split_tokens=SPLIT)) == [
        ([(1,) * 10], [None], None, []),
        ([(102,) * 8, (101,) * 8], [None, None], header, []),
        (leaves, [RowKey(1, 1)] * 2, header, []),
        (leaves, [RowKey(1, 0)] * 2, header, [1]),
        ([(100,) * 8], [None], header, [header]),  # no family is left to share its children's batch: a prefix
        (leaves, [None, None], RowKey(4, 0), [RowKey(4, 0)]),
    ]


def test_leaves_fill_the_room_that_parents_leave() -> None:
    lone = [ScoringRequest([token] * 6, [1]) for token in (5, 6)]
    plan = plan_scoring([*questions(stem=0, branches=2, branch=8), *lone], Limits(8), split_tokens=SPLIT)
    assert [[row.length for row in batch.rows] for batch in plan.batches] == [[8, 8, 6, 6], [2, 2, 2, 2]]


def test_leaves_that_wait_above_join_keys_and_values_but_not_recurrent_states() -> None:
    short = ScoringRequest([9, 9], [1])
    requests = [*questions(stem=0, branches=2, branch=40), short]
    limits = Limits(8, batch_tokens=80)
    joined = plan_scoring(requests, limits, split_tokens=SPLIT)
    apart = plan_scoring(requests, limits, Sharing(keys_only=False), split_tokens=SPLIT)
    assert [[row.length for row in batch.rows] for batch in joined.batches] == [[40, 40], [2, 2, 2, 2, 2]]
    assert [[row.length for row in batch.rows] for batch in apart.batches] == [[40, 40], [2, 2, 2, 2], [2]]


def test_rows_of_unequal_length_are_apart_where_only_equal_ones_may_be_gone_on_from() -> None:
    requests = [
        *questions(stem=0, branches=1, branch=8),
        ScoringRequest([9] * 10, [1, 5]),
        ScoringRequest([9] * 10, [2, 5]),
    ]
    ragged = plan_scoring(requests, Limits(8, batch_tokens=64), split_tokens=SPLIT)
    equal = plan_scoring(requests, Limits(8, batch_tokens=64), Sharing(Level.EQUAL), split_tokens=SPLIT)
    assert [[row.length for row in batch.rows] for batch in ragged.batches] == [[10, 8], [1, 1, 2, 2]]
    assert sorted([row.length for row in batch.rows] for batch in equal.batches) == [
        [1, 1],
        [2, 2],
        [8],
        [10],
    ]


def test_parents_leave_as_much_memory_for_their_children() -> None:
    requests = questions(stem=0, branches=8, branch=10)
    plan = plan_scoring(requests, Limits(8, kv_bytes=80), split_tokens=SPLIT)
    parents = [len(batch.rows) for batch in plan.batches if batch.rows[0].start == 0]
    assert parents[0] == 4  # eight of them would take all of it
    assert plan.peak_kv_bytes <= 80


def test_a_lone_row_may_exceed_every_limit() -> None:
    plan = plan_scoring(
        [ScoringRequest([1] * 100, [2])],
        Limits(1, batch_tokens=10, kv_bytes=10, step=30),
        cache=CacheSize(7, 5),
    )
    assert (len(plan.batches), plan.num_forwards, plan.peak_kv_bytes) == (1, 4, 705)


def test_token_arrays_are_padded_on_the_right() -> None:
    requests = [ScoringRequest([length] * length, [7]) for length in (5, 3)]
    plan = plan_scoring(requests, Limits(2))
    array = plan.token_array(plan.batches[0])
    assert array.dtype == np.int32
    assert array.tolist() == [[5] * 5, [3] * 3 + [PAD_ID] * 2]
    assert (plan.planned_tokens, plan.padding) == (8, 2)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_longest_rows_come_first(size: int) -> None:
    requests = [ScoringRequest([length] * length, [2]) for length in (2, 9, 4, 7)]
    lengths = [batch.length for batch in plan_scoring(requests, Limits(size)).batches]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 9


def test_padding_is_bounded() -> None:
    requests = [ScoringRequest([length] * length, [2]) for length in (300, 200, 199, 10)]
    plan = plan_scoring(requests, Limits(8))
    assert [[row.length for row in batch.rows] for batch in plan.batches] == [[300], [200, 199], [10]]


def test_less_is_tried_when_memory_ran_out_down_to_one_row_and_no_further() -> None:
    limits = Limits(max_rows=8, batch_tokens=2048, kv_bytes=1000, step=2048)
    assert limits.halved() == Limits(4, 1024, 500, 1024)
    seen = [limits]
    while seen[-1].halved() != seen[-1]:
        seen.append(seen[-1].halved())
    assert seen[-1] == Limits(1, 1, 1, config.SMALLEST_STEP)
    assert all(
        after.max_rows <= before.max_rows and after.kv_bytes <= before.kv_bytes and after.step <= before.step
        for before, after in itertools.pairwise(seen)
    )


def test_a_deep_chain_is_planned_without_recursion() -> None:
    depth = 2 * sys.getrecursionlimit()
    ones = np.ones(depth, np.int32)
    requests = [ScoringRequest(np.append(ones[:size], np.int32(2)), [3]) for size in range(depth)]
    sharing, cache = Sharing(), CacheSize()
    plan = plan_scoring(requests, Limits(64), sharing, cache)
    Ledger(plan, sharing, cache)
    assert sorted(answer.request for row in rows_of(plan) for answer in row.answers) == list(range(depth))


def test_kv_does_not_grow_with_the_number_of_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "AHEAD_TOKENS", 1000)
    few, many = (
        plan_scoring(questions(300, count, branch=40), Limits(16), cache=CacheSize(100)).peak_kv_bytes
        for count in (48, 480)
    )
    assert many <= 1.1 * few


def test_planning_needs_no_mlx() -> None:
    code = """
import sys, types
for name in ("mlx", "mlx.core", "mlx_lm"):
    sys.modules[name] = None  # any import of it fails
package = types.ModuleType("mlx_eval.engine")  # its own __init__ brings the BLAS in, for the engine's other half
import mlx_eval
package.__path__ = [mlx_eval.__path__[0] + "/engine"]
sys.modules["mlx_eval.engine"] = package
from mlx_eval.engine.batches import Limits
from mlx_eval.engine.plan import plan_prompts, plan_scoring
from mlx_eval.records import ScoringRequest
print(plan_scoring([ScoringRequest([1, 2], [3])], Limits(1)).planned_tokens)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout.strip(), done.stderr) == ("2", "")


# ---------------------------------------------------------------- prompts that are gone on from

PROMPTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=10), max_size=10)


@given(PROMPTS, LIMITS, SHARINGS, POLICIES)
def test_each_prompt_ends_in_a_row_of_its_own_or_of_its_equals(
    prompts: list[list[int]], limits: Limits, sharing: Sharing, policy: Policy
) -> None:
    with policy.applied():
        plan = plan_prompts(prompts, limits, sharing)
    found: list[int] = []
    for row in rows_of(plan):
        for answer in row.answers:
            assert tokens_of(plan, row) == tuple(prompts[answer.request])
            assert (answer.first, answer.stop) == (0, 1)
            found.append(answer.request)
    assert sorted(found) == list(range(len(prompts)))
    assert plan.naive_tokens == sum(map(len, prompts))
    distinct = {tuple(ids[:size]) for ids in prompts for size in range(1, len(ids) + 1)}
    assert plan.unique_tokens == len(distinct) <= plan.planned_tokens


@given(PROMPTS, LIMITS, st.booleans(), POLICIES)
def test_rows_in_which_prompts_end_have_no_padding_where_it_would_be_read(
    prompts: list[list[int]], limits: Limits, keys_only: bool, policy: Policy
) -> None:
    """Level EQUAL: a recurrent state runs over padding, and the answer would go on from there."""
    with policy.applied():
        plan = plan_prompts(prompts, limits, Sharing(Level.EQUAL, keys_only=keys_only))
    for batch in plan.batches:
        for row in batch.rows:
            if row.answers:
                assert row.length == batch.length


@given(PROMPTS, LIMITS, POLICIES)
def test_what_prompts_stand_behind_is_held_until_they_were_read(
    prompts: list[list[int]], limits: Limits, policy: Policy
) -> None:
    with policy.applied():
        plan = plan_prompts(prompts, limits)
    held: set[Any] = set()
    for index, batch in enumerate(plan.batches):
        needed: set[Any] = {row.parent.batch for row in batch.rows if row.parent is not None}
        needed |= {batch.prefix} - {None}
        assert needed <= held
        if batch.is_parent:
            held.add(index)
        held |= {RowKey(index, row) for row in batch.new_prefixes}
        held -= set(batch.frees)
    assert not held


def test_a_prompt_that_begins_another_is_read_on_the_way_to_it() -> None:
    plan = plan_prompts([[1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3]], Limits(8))
    assert [(tokens_of(plan, row), len(row.answers)) for row in rows_of(plan)] == [
        ((1, 2, 3), 2),
        ((1, 2, 3, 4, 5), 1),
    ]
    assert plan.planned_tokens == plan.unique_tokens == 5


def test_no_prompts_make_no_batches() -> None:
    assert plan_prompts([], Limits(8)).batches == ()
