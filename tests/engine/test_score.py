from __future__ import annotations

import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx import nn
from mlx_eval_kernels import NO_TARGET

from mlx_eval import config
from mlx_eval.engine import budget, execute
from mlx_eval.engine.batches import CacheSize, Level, Limits, ScoringPlan, Sharing
from mlx_eval.engine.execute import Executor, Tally
from mlx_eval.engine.held import Held
from mlx_eval.engine.kv import CacheFactory
from mlx_eval.engine.plan import plan_scoring
from mlx_eval.engine.score import Scorer
from mlx_eval.engine.sharing import WAYS, ModelSharing, Way
from mlx_eval.errors import OutOfMemoryError
from mlx_eval.models.head import RowHead
from mlx_eval.records import Score, ScoringRequest
from tests.engine.forests import POLICIES, Policy, prefixes_of, shared_requests, with_order
from tests.tiny import RECURRENT, ScriptedModel, assert_scores, oracle_generate, tiny_model

VOCAB = 64
RAGGED, RAGGED_COPIED, EQUAL, EQUAL_COPIED, EQUAL_CACHES, ROWS, ALONE = WAYS


@functools.cache
def model(kind: str = "llama") -> nn.Module:
    return tiny_model(kind.split(maxsplit=1)[0], VOCAB, **KINDS.get(kind, {}))


@functools.cache
def head_of(kind: str, max_rows: int = 10**6) -> RowHead:
    return RowHead(model(kind), max_rows * 4 * VOCAB)


@functools.cache
def sharing_of(kind: str, way: Way) -> ModelSharing:
    factory = CacheFactory(model(kind), branches=way.branches, splits_attention=way.splits_attention)
    return ModelSharing(way, factory.keys_only, CacheSize())


def planned(
    requests: Sequence[ScoringRequest], limits: Limits, scorer: Scorer, split: int = 1
) -> ScoringPlan:
    return plan_scoring(requests, limits, scorer.sharing.sharing, scorer.sharing.cache, split)


def run(scorer: Scorer, plan: ScoringPlan, requests: Sequence[ScoringRequest]) -> list[Score]:
    """Answers in the order of the requests, each given exactly once."""
    answers: dict[int, Score] = {}
    calls: Counter[int] = Counter()

    def on_score(index: int, score: Score) -> None:
        calls[index] += 1
        answers[index] = score

    scorer.run(plan, requests, on_score)
    assert calls == Counter(range(len(requests)))
    return [answers[index] for index in range(len(requests))]


def scores(scorer: Scorer, requests: Sequence[ScoringRequest], batch_size: int = 3) -> list[Score]:
    return run(scorer, planned(requests, Limits(batch_size), scorer), requests)


def pairs(requests: Sequence[ScoringRequest]) -> list[tuple[list[int], list[int]]]:
    return [(request.context_ids.tolist(), request.continuation_ids.tolist()) for request in requests]


def random_requests(count: int, longest: int = 20, seed: int = 0) -> list[ScoringRequest]:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, longest, (count, 2))
    return [
        ScoringRequest(generator.integers(0, VOCAB, context), generator.integers(0, VOCAB, continuation))
        for context, continuation in lengths
    ]


def family(stem: int = 12, branches: int = 4, leaves: int = 3, seed: int = 0) -> list[ScoringRequest]:
    """A header, questions of unequal length behind it, answers of unequal length behind them."""
    generator = np.random.default_rng(seed)

    def ids(count: int) -> list[int]:
        return generator.integers(0, VOCAB, count).tolist()

    header = ids(stem)
    requests = []
    for branch in range(branches):
        question = header + ids(3 + 2 * branch)
        requests += [ScoringRequest(question, ids(1 + leaf)) for leaf in range(leaves)]
    return requests


# ---------------------------------------------------------------- against the oracle

WINDOWED = {"query_pre_attn_scalar": 8, "sliding_window": 8, "sliding_window_pattern": 2}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0},
    "gemma2 ungrouped": {"query_pre_attn_scalar": 8, "num_key_value_heads": 4},
    "gemma3_text": WINDOWED,
    "cohere": {"logit_scale": 0.25},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_scaling": None,
    },
    **RECURRENT,
}
ALLOWED = [
    *(("llama", way) for way in WAYS),
    *(("qwen2", way) for way in WAYS),
    *(("gemma2 ungrouped", way) for way in WAYS if not way.splits_attention),
    *(("gemma2", way) for way in (EQUAL_CACHES, ROWS, ALONE)),
    *(("gemma3_text", way) for way in WAYS if way != EQUAL_CACHES),
    *(("gpt_oss", way) for way in (RAGGED, RAGGED_COPIED, EQUAL)),
    *(("mamba", way) for way in (EQUAL, EQUAL_CACHES, ROWS, ALONE)),
    *(("mamba2", way) for way in (RAGGED, EQUAL_CACHES)),
    *(("recurrent_gemma", way) for way in (EQUAL, EQUAL_COPIED, ROWS)),
]
"""Models with every way of `WAYS` that they can be run in."""


def named(value: Any) -> str | None:
    if isinstance(value, Way):
        marks = [name for name in ("branches", "splits_attention") if getattr(value, name)]
        return " ".join([value.level.name, *marks])
    return None


FORESTS = shared_requests(vocab=VOCAB, max_requests=8, longest_piece=5, max_pieces=3).filter(len)
LIMITS = st.builds(
    Limits,
    max_rows=st.integers(1, 6),
    batch_tokens=st.sampled_from([8, 24, 60, 2048]),
    kv_bytes=st.sampled_from([50, 2**30]),
    step=st.sampled_from([1, 2, 3, 5, 2048]),
)


@pytest.mark.parametrize(("kind", "way"), ALLOWED, ids=named)
@settings(max_examples=8, deadline=None)
@given(FORESTS, LIMITS, st.sampled_from([1, 2, 5, 10**6]), POLICIES)
def test_any_forest_in_any_batch_and_chunk_scores_as_the_oracle(  # noqa: PLR0917
    kind: str, way: Way, requests: list[ScoringRequest], limits: Limits, head_rows: int, policy: Policy
) -> None:
    if kind == "mamba2":
        limits = replace(limits, step=config.PREFILL_STEP)  # mlx-lm computes its padded chunks wrongly
    scorer = Scorer(model(kind), head_of(kind, head_rows), sharing_of(kind, way))
    with policy.applied():
        plan = planned(requests, limits, scorer)
    assert_scores(model(kind), pairs(requests), run(scorer, plan, requests))


@pytest.mark.parametrize("name", KINDS)
def test_architectures_score_as_the_oracle_in_the_way_that_they_are_found_to_allow(name: str) -> None:
    """Tied embeddings, soft-capped and scaled logits, sliding windows, sinks and recurrent states."""
    scorer = Scorer(model(name))
    assert scorer._head.is_split
    requests = [*random_requests(5), *family()]
    assert_scores(model(name), pairs(requests), scores(scorer, requests, 5))


@settings(max_examples=15, deadline=None)
@given(FORESTS, st.integers(1, 6), st.randoms(use_true_random=False))
def test_the_order_of_requests_does_not_change_a_bit(
    requests: list[ScoringRequest], size: int, random: Any
) -> None:
    shuffled, order = with_order(requests, random)
    scorer = Scorer(model(), head_of("llama"), sharing_of("llama", RAGGED))
    plain = scores(scorer, requests, size)
    assert [plain[index] for index in order] == scores(scorer, shuffled, size)


@pytest.mark.parametrize("step", [1, 3, 5, 16])
@pytest.mark.parametrize("way", [RAGGED, RAGGED_COPIED, EQUAL], ids=named)
def test_sliding_windows_over_several_prefill_steps(step: int, way: Way) -> None:
    """The prefix is longer than the window."""
    scorer = Scorer(model("gemma3_text"), head_of("gemma3_text"), sharing_of("gemma3_text", way))
    requests = family(stem=20)
    plan = planned(requests, Limits(6, step=step), scorer)
    assert any(batch.prefix_len > 8 for batch in plan.batches)
    assert_scores(model("gemma3_text"), pairs(requests), run(scorer, plan, requests))


def test_a_model_without_a_split_is_scored_on_full_logits() -> None:
    scripted = ScriptedModel("abc", "xyz")
    scorer = Scorer(scripted)
    assert not scorer._head.is_split
    requests = [
        ScoringRequest([261], list(b"abc")),
        ScoringRequest([1, 262], list(b"xyq")),
        ScoringRequest([5], [5]),
    ]
    answers = scores(scorer, requests)
    assert_scores(scripted, pairs(requests), answers)
    assert [answer.is_greedy for answer in answers] == [True, False, False]


@pytest.mark.parametrize("rows", [0, 1, 2, 5])
def test_the_head_in_many_blocks_scores_as_the_oracle(rows: int) -> None:
    head = RowHead(model(), rows * 4 * VOCAB)
    assert head.max_rows == max(1, rows)
    requests = [*family(), *random_requests(6)]
    scorer = Scorer(model(), head, sharing_of("llama", RAGGED))
    assert_scores(model(), pairs(requests), scores(scorer, requests))


def test_requests_equal_but_for_their_split_are_not_mixed_up() -> None:
    requests = [
        ScoringRequest([1, 2], [3, 4]),
        ScoringRequest([1], [2, 3, 5]),
        ScoringRequest([1, 2, 3], [4]),
        ScoringRequest([1, 2], [3, 4]),
    ]
    scorer = Scorer(model(), head_of("llama"), sharing_of("llama", RAGGED))
    answers = scores(scorer, requests)
    assert_scores(model(), pairs(requests), answers)
    assert answers[0] == answers[3]


def test_a_continuation_that_crosses_several_nodes_is_one_sum() -> None:
    requests = [
        ScoringRequest([1], [2, 3, 4, 5, 6, 7]),
        *(ScoringRequest([1, 2, 3], [branch, 1]) for branch in (8, 9)),
        *(ScoringRequest([1, 2, 3, 4, 5], [branch, 1]) for branch in (8, 9)),
    ]
    scorer = Scorer(model(), head_of("llama"), sharing_of("llama", RAGGED))
    plan = planned(requests, Limits(2), scorer)
    assert (
        sum(
            any(answer.request == 0 for answer in row.answers) for batch in plan.batches for row in batch.rows
        )
        > 2
    )
    assert_scores(model(), pairs(requests), run(scorer, plan, requests))


def test_greedy_is_said_of_greedy_continuations_only() -> None:
    greedy, _ = oracle_generate(model(), (3, 1), 4)
    wrong_last, wrong_first = [*greedy[:3], (greedy[3] + 1) % VOCAB], [(greedy[0] + 1) % VOCAB, *greedy[1:]]
    requests = [ScoringRequest([3, 1], ids) for ids in (greedy, wrong_last, wrong_first)]
    scorer = Scorer(model(), head_of("llama"), sharing_of("llama", RAGGED))
    assert [answer.is_greedy for answer in scores(scorer, requests)] == [True, False, False]


def test_half_precision_weights_are_accumulated_in_float32() -> None:
    network = tiny_model("llama", VOCAB)
    network.set_dtype(mx.bfloat16)
    scorer = Scorer(network, None, sharing_of("llama", ALONE))
    requests = random_requests(5)
    # the logits of a row alone are those of the oracle: only what comes after them is ours
    assert_scores(network, pairs(requests), scores(scorer, requests))


def test_half_precision_differs_by_its_rounding_when_rows_share() -> None:
    network = tiny_model("llama", VOCAB)
    network.set_dtype(mx.bfloat16)
    scorer = Scorer(network)
    assert scorer.sharing.way == RAGGED
    requests = family()
    alone = scores(Scorer(network, None, sharing_of("llama", ALONE)), requests)
    for one, other, request in zip(alone, scores(scorer, requests), requests, strict=True):
        # bfloat16 has 8 bits and these logits reach 8: one place is 1/32, and a few layers add up
        assert abs(one.logprob - other.logprob) < 0.15 * request.continuation_ids.size


# ---------------------------------------------------------------- counts


class Calls:
    """The shapes of tokens that a model is called with; attention windows and caches untouched."""

    def __init__(self, network: Any, fail: Callable[[tuple[int, ...]], None] = lambda shape: None) -> None:
        self.shapes: list[tuple[int, ...]] = []
        cls = type(network)
        calls = self

        class Counted(cls):  # type: ignore[misc,valid-type]
            def __call__(self, inputs: mx.array, *args: Any, **kwargs: Any) -> mx.array:
                calls.shapes.append(tuple(inputs.shape))
                fail(tuple(inputs.shape))
                return super().__call__(inputs, *args, **kwargs)

        network.__class__ = Counted


@contextmanager
def watched(kind: str, way: Way, fail: Callable[[tuple[int, ...]], None]) -> Iterator[tuple[Scorer, Calls]]:
    """A scorer whose model calls are counted and may fail."""
    network = tiny_model(kind.split(maxsplit=1)[0], VOCAB, **KINDS[kind])
    armed: list[bool] = []
    calls = Calls(network, lambda shape: fail(shape) if armed else None)
    scorer = Scorer(network, None, sharing_of(kind, way))
    calls.shapes.clear()
    armed.append(True)
    yield scorer, calls


@pytest.mark.parametrize(
    ("kind", "way"),
    [("llama", RAGGED), ("llama", EQUAL_CACHES), ("llama", ALONE), ("mamba", EQUAL)],
    ids=named,
)
@pytest.mark.parametrize("limits", [Limits(4), Limits(4, batch_tokens=12), Limits(2, step=3)], ids=str)
@pytest.mark.parametrize("has_one_stem", [False, True])
def test_forwards_and_tokens_are_those_of_the_plan_and_nothing_is_held_afterwards(
    kind: str, way: Way, limits: Limits, has_one_stem: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    executors: list[Executor] = []
    keep = Executor.run

    def remembered(self: Executor) -> None:
        executors.append(self)
        keep(self)

    monkeypatch.setattr(Executor, "run", remembered)
    requests = family() if has_one_stem else [*family(), *random_requests(3)]
    counted: list[int] = []
    with watched(kind, way, lambda shape: None) as (scorer, calls):
        plan = planned(requests, limits, scorer)
        scorer.run(plan, requests, lambda index, score: None, counted.append)
    assert len(calls.shapes) == plan.num_forwards
    assert sum(rows * length for rows, length in calls.shapes) == plan.planned_tokens + plan.padding
    assert counted == [batch.num_tokens for batch in plan.batches]
    assert sum(counted) == plan.planned_tokens
    (executor,) = executors
    assert len(executor._held) == 0


def test_the_models_memory_is_wired_once_for_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []

    @contextmanager
    def wired(network: Any) -> Iterator[None]:
        events.append(network)
        yield
        events.append("released")

    monkeypatch.setattr(budget, "wired", wired)
    scorer = Scorer(model(), head_of("llama"), sharing_of("llama", RAGGED))
    requests = [*family(), ScoringRequest([1], [VOCAB])]  # one is no number, and computed again
    scorer.run(planned(requests, Limits(4), scorer), requests, lambda index, score: events.append("score"))
    assert events == [model(), *["score"] * len(requests), "released"]


def test_shared_prefixes_are_computed_once_and_rows_that_start_afresh_each_time() -> None:
    requests = family(stem=30)
    fed = {}
    for way in (RAGGED, ROWS):
        with watched("llama", way, lambda shape: None) as (scorer, calls):
            scores(scorer, requests, 100)
        fed[way] = sum(rows * length for rows, length in calls.shapes)
    prefixes = prefixes_of(requests)
    assert len(prefixes) <= fed[RAGGED] < 1.3 * len(prefixes)  # the rest is padding
    assert fed[ROWS] > 4 * len(prefixes)


def test_scores_come_as_soon_as_a_batch_is_done() -> None:
    """One batch later, so that the device need not wait."""
    requests = random_requests(6)
    events: list[str] = []
    with watched("llama", ALONE, lambda shape: events.append("forward")) as (scorer, _):
        scorer.run(
            planned(requests, Limits(1), scorer), requests, lambda index, score: events.append("score")
        )
    assert events == ["forward", *["forward", "score"] * 5, "score"]


def test_kv_that_is_held_is_no_more_than_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    keep = Held.keep

    def measured(self: Held, index: int, batch: Any, state: Any) -> None:
        arrays = [*execute.kv.arrays_of(state.caches)]
        for other in self._states.values():
            arrays += execute.kv.arrays_of(other.caches)
        for prefix in self._prefixes.values():
            arrays += prefix.arrays()
        held.append(sum(array.nbytes for array in arrays))
        keep(self, index, batch, state)

    monkeypatch.setattr(Held, "keep", measured)
    sharing = Scorer(model(), head_of("llama")).sharing
    assert sharing.way == RAGGED
    assert sharing.cache == CacheSize(
        token_bytes=2 * 2 * 2 * 8 * 4
    )  # layers, keys and values, heads, width, float32
    scorer = Scorer(model(), head_of("llama"), sharing)
    for requests in (family(), family(leaves=5, branches=6), nested_family(3, 3), nested_family(6, 2)):
        held.clear()
        plan = planned(requests, Limits(64), scorer, split=config.SPLIT_TOKENS)
        run(scorer, plan, requests)
        assert max(held) <= plan.peak_kv_bytes


def nested_family(levels: int, children: int, seed: int = 0) -> list[ScoringRequest]:
    """A tree whose nodes have unequal lengths all the way down."""
    generator = np.random.default_rng(seed)
    paths: list[list[int]] = [[]]
    for _ in range(levels):
        paths = [
            path + generator.integers(0, VOCAB, generator.integers(2, 20)).tolist()
            for path in paths
            for _ in range(children)
        ]
    return [ScoringRequest(path, generator.integers(0, VOCAB, 3)) for path in paths]


def test_a_target_that_many_requests_share_is_looked_up_once() -> None:
    requests = [ScoringRequest([1, 2], [3, 4])] * 50 + [ScoringRequest([1, 2], [3, 5])]
    wanted = execute._wanted_positions(plan_scoring(requests, Limits(8)).batches[0], requests)
    assert wanted.flat.tolist() == [1, 2]
    assert wanted.targets.tolist() == [[3, NO_TARGET], [4, 5]]
    found = {request: (r.tolist(), k.tolist()) for request, r, k in wanted.answers}
    assert found[49] == ([0, 1], [0, 0])
    assert found[50] == ([0, 1], [0, 1])


def test_a_tally_adds_up_stretches_in_any_order() -> None:
    requests = [ScoringRequest([1], [2, 3, 4]), ScoringRequest([1], [2])]
    given_scores: list[tuple[int, Score]] = []
    tally = Tally(requests, lambda index, score: given_scores.append((index, score)))
    tally.add(0, np.array([-1.0]), True)
    tally.add(1, np.array([-4.0]), True)
    assert tally.missing.tolist() == [2, 0]
    tally.add(0, np.array([-2.0, -0.5]), False)
    assert given_scores == [(1, Score(-4.0, True)), (0, Score(-3.5, False))]


def test_nothing_to_score_calls_nothing() -> None:
    scorer = Scorer(model(), head_of("llama"), sharing_of("llama", RAGGED))
    scorer.run(plan_scoring([], Limits(4)), [], pytest.fail, pytest.fail)


def test_a_plan_of_the_scorer_takes_what_the_model_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def spied(requests: Any, limits: Limits, sharing: Sharing, cache: CacheSize) -> ScoringPlan:
        seen.append((limits.max_rows, sharing, cache))
        return plan_scoring(requests, limits, sharing, cache)

    monkeypatch.setattr("mlx_eval.engine.score.plan_scoring", spied)
    sharing = ModelSharing(EQUAL, False, CacheSize(7, 9))
    scorer = Scorer(model(), head_of("llama"), sharing)
    requests = random_requests(3)
    scorer.plan(requests, 5)
    scorer.plan(requests)
    assert seen == [
        (5, Sharing(Level.EQUAL, prefix_once=True, keys_only=False), CacheSize(7, 9)),
        (config.MAX_ROWS, Sharing(Level.EQUAL, prefix_once=True, keys_only=False), CacheSize(7, 9)),
    ]


# ---------------------------------------------------------------- memory runs out

NO_MEMORY = "[malloc] Unable to allocate 123456 bytes."


def fails_above(num_tokens: int) -> Callable[[tuple[int, ...]], None]:
    def fail(shape: tuple[int, ...]) -> None:
        if shape[0] * shape[1] > num_tokens:
            raise RuntimeError(NO_MEMORY)

    return fail


@pytest.mark.parametrize("way", [RAGGED, EQUAL, ROWS], ids=named)
@pytest.mark.parametrize("num_tokens", [24, 40, 100])
def test_when_memory_runs_out_less_is_tried_and_nothing_is_lost(
    way: Way, num_tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    requests = [*family(), *random_requests(6, longest=10, seed=1)]
    with watched("llama", way, fails_above(num_tokens)) as (scorer, calls), caplog.at_level(logging.WARNING):
        answers = scores(scorer, requests, 16)
    assert_scores(model(), pairs(requests), answers)
    retries = [record for record in caplog.records if "memory ran out" in record.getMessage()]
    if max(rows * length for rows, length in calls.shapes) > num_tokens:
        assert [record.args for record in retries] == [
            (config.BATCH_TOKENS // 2**halving, max(1, 16 // 2**halving))
            for halving in range(1, len(retries) + 1)
        ]
        assert retries
    else:
        assert not retries


def test_requests_that_were_answered_are_not_computed_again() -> None:
    requests = random_requests(8, longest=10)
    answered: list[int] = []
    after: list[int] = []

    def fail(shape: tuple[int, ...]) -> None:
        if len(answered) == 4 and not after:
            after.append(0)
            raise RuntimeError(NO_MEMORY)
        if after:
            after[0] += shape[0] * shape[1]

    with watched("llama", ALONE, fail) as (scorer, _):
        plan = planned(requests, Limits(2), scorer)
        scorer.run(plan, requests, lambda index, score: answered.append(index))
    assert sorted(answered) == list(range(8))
    left = [requests[index] for index in answered[4:]]
    inputs = {(*one.context_ids.tolist(), *one.continuation_ids[:-1].tolist()) for one in left}
    assert after == [sum(map(len, inputs))]


def test_memory_that_runs_out_while_results_are_read_is_no_loss_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MLX computes late: the error may come with the first look at a result."""
    finish = Executor._finish
    times = [0]

    def failing(self: Executor, running: Any) -> None:
        times[0] += 1
        if times[0] == 2:
            raise RuntimeError(NO_MEMORY)
        finish(self, running)

    monkeypatch.setattr(Executor, "_finish", failing)
    requests = [*family(), *random_requests(4)]
    scorer = Scorer(model(), head_of("llama"), sharing_of("llama", RAGGED))
    assert_scores(model(), pairs(requests), scores(scorer, requests))


def test_one_row_that_does_not_fit_is_an_error_that_says_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    with watched("llama", RAGGED, fails_above(5)) as (scorer, calls):
        plan = planned([ScoringRequest([1] * 20, [2])], Limits(4), scorer)
        with caplog.at_level(logging.WARNING), pytest.raises(OutOfMemoryError, match="max_length") as caught:
            scorer.run(plan, [ScoringRequest([1] * 20, [2])], pytest.fail)
    assert isinstance(caught.value.__cause__, RuntimeError)
    # each try computes a whole row of a real model until it fails: no more of them than halving can change
    assert len(calls.shapes) <= 12


def test_halving_ends_at_rows_that_fit_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "SMALLEST_STEP", 2)
    requests = family(stem=20)
    with watched("llama", RAGGED, fails_above(4)) as (scorer, calls):
        plan = planned(requests, Limits(8, step=16), scorer)
        answers = run(scorer, plan, requests)
    assert_scores(model(), pairs(requests), answers)
    assert calls.shapes[-1][0] * calls.shapes[-1][1] <= 4


@pytest.mark.parametrize(
    "error", [RuntimeError("[conv] Invalid shape"), ValueError(NO_MEMORY), KeyError("x")]
)
def test_other_errors_pass_through_when_no_way_is_left(error: Exception) -> None:
    def fail(shape: tuple[int, ...]) -> None:
        raise error

    with watched("llama", RAGGED, fail) as (scorer, calls):
        requests = family()
        with pytest.raises(type(error)) as caught:
            scores(scorer, requests)
    assert caught.value is error
    assert len(calls.shapes) == 2  # the batch, and the first row alone


def test_a_batch_that_the_model_refuses_is_computed_in_a_way_that_it_takes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What the self-test is too short to show."""

    def fail(shape: tuple[int, ...]) -> None:
        if shape[0] > 1 and shape[1] > 30:
            raise ValueError("no two rows of more than 30 tokens")

    rng = np.random.default_rng(3)
    requests = [ScoringRequest(rng.integers(1, 20, 40), rng.integers(1, 20, 2)) for _ in range(3)]
    with watched("llama", RAGGED, fail) as (scorer, _):
        found = scores(scorer, requests)
        assert scorer.sharing.way.level is Level.ALONE
    with watched("llama", RAGGED, lambda shape: None) as (scorer, _):
        expected = scores(scorer, requests)
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in expected], abs=1e-4)
    assert "the model refuses a batch (no two rows of more than 30 tokens)" in caplog.text


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RuntimeError(NO_MEMORY), RuntimeError("broken")], ids=repr
)
def test_the_attention_of_mlx_lm_is_given_back_whatever_happens(error: BaseException) -> None:
    from mlx_lm.models import base, llama

    def fail(shape: tuple[int, ...]) -> None:
        patched.append(llama.scaled_dot_product_attention is not base.scaled_dot_product_attention)
        raise error

    patched: list[bool] = []

    with watched("llama", RAGGED, fail) as (scorer, _):
        requests = [ScoringRequest([1, 2], [3])]
        with pytest.raises((type(error), OutOfMemoryError)):
            scorer.run(planned(requests, Limits(1), scorer), requests, pytest.fail)
    assert patched[0]
    assert llama.scaled_dot_product_attention is base.scaled_dot_product_attention


# ---------------------------------------------------------------- numbers that are none


def test_damaged_weights_give_nan_and_not_a_number_that_looks_right() -> None:
    damaged = tiny_model("llama", VOCAB)
    damaged.model.norm.weight = mx.full((32,), math.nan)
    answers = scores(Scorer(damaged), family())
    assert all(math.isnan(answer.logprob) and not answer.is_greedy for answer in answers)


@pytest.mark.parametrize("way", [RAGGED, RAGGED_COPIED, EQUAL_CACHES, ROWS, ALONE], ids=named)
@pytest.mark.parametrize("token", [0, 7])
def test_one_damaged_token_spoils_what_reads_it_and_nothing_else(way: Way, token: int) -> None:
    """0 is what rows are padded with."""
    damaged = tiny_model("llama", VOCAB)
    damaged.model.embed_tokens.weight[token] = math.nan
    clean = [
        ScoringRequest([3, 4, 5], [6, 9]),
        ScoringRequest([3, 4, 5], [8]),
        ScoringRequest([3, 4, 5, 6, 9, 10, 11], [12, 13]),
        *(ScoringRequest([3, 4, 5, 20 + branch], [1, 2, 3]) for branch in range(3)),
    ]
    spoilt = [ScoringRequest([3, 4, token], [5]), ScoringRequest([3, 4, 5], [6, token, 4])]
    requests = [*clean, *spoilt]
    answers = scores(Scorer(damaged, None, sharing_of("llama", way)), requests)
    assert_scores(damaged, pairs(clean), answers[: len(clean)])
    assert all(math.isnan(answer.logprob) for answer in answers[len(clean) :])


def test_a_clean_request_that_shares_all_its_rows_with_a_damaged_one_keeps_its_number() -> None:
    damaged = tiny_model("llama", VOCAB)
    damaged.model.embed_tokens.weight[7] = math.nan
    requests = [ScoringRequest([3, 4], [5]), ScoringRequest([3, 4, 7], [5])]
    answers = scores(Scorer(damaged, None, sharing_of("llama", RAGGED)), requests)
    assert_scores(damaged, pairs(requests[:1]), answers[:1])
    assert math.isnan(answers[1].logprob)


def test_a_token_outside_the_vocabulary_is_nan() -> None:
    scorer = Scorer(model(), head_of("llama"), sharing_of("llama", RAGGED))
    answers = scores(scorer, [ScoringRequest([1], [VOCAB]), ScoringRequest([1], [2])])
    assert math.isnan(answers[0].logprob)
    assert math.isfinite(answers[1].logprob)


def test_impossible_tokens_are_minus_infinity() -> None:
    network = tiny_model("llama", VOCAB, logit_scale=1.0)
    cls = type(network)

    class Masked(cls):  # type: ignore[misc,valid-type]
        def __call__(self, inputs: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            logits = super().__call__(inputs, *args, **kwargs)
            return mx.where(mx.arange(VOCAB) == 5, -mx.inf, logits)

    network.__class__ = Masked
    requests = [ScoringRequest([1, 2], [3, 5]), ScoringRequest([1, 2], [3, 6])]
    answers = scores(Scorer(network), requests)
    assert answers[0] == Score(-math.inf, False)
    assert_scores(network, pairs(requests[1:]), answers[1:])
