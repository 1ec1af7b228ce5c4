from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx import nn
from mlx_eval_kernels import NO_TARGET

from mlx_eval.engine.plan import plan_scoring
from mlx_eval.engine.score import Scorer, _wanted_positions
from mlx_eval.records import Score, ScoringRequest
from tests.tiny import RECURRENT, ScriptedModel, assert_scores, tiny_model

VOCAB = 64
IDS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9).map(tuple)
REQUESTS = st.lists(st.builds(ScoringRequest, IDS, IDS), min_size=1, max_size=8)


@functools.cache
def model(kind: str = "llama", **changes: Any) -> nn.Module:
    return tiny_model(kind, VOCAB, **changes)


def scores(scorer: Scorer, requests: Sequence[ScoringRequest], batch_size: int = 3) -> list[Score]:
    """Answers in the order of the requests, each given exactly once."""
    answers: dict[int, Score] = {}
    calls: Counter[int] = Counter()

    def on_score(index: int, score: Score) -> None:
        calls[index] += 1
        answers[index] = score

    scorer.run(plan_scoring(requests, batch_size), requests, on_score)
    assert calls == Counter(range(len(requests)))
    return [answers[index] for index in range(len(requests))]


def pairs(requests: Sequence[ScoringRequest]) -> list[tuple[Sequence[int], Sequence[int]]]:
    return [(request.context_ids, request.continuation_ids) for request in requests]


def random_requests(count: int, longest: int = 20, seed: int = 0) -> list[ScoringRequest]:
    generator = np.random.default_rng(seed)
    requests = []
    for _ in range(count):
        context, continuation = generator.integers(1, longest, 2)
        requests.append(
            ScoringRequest(
                tuple(generator.integers(0, VOCAB, context).tolist()),
                tuple(generator.integers(0, VOCAB, continuation).tolist()),
            )
        )
    return requests


WINDOWED = {"query_pre_attn_scalar": 8, "sliding_window": 8, "sliding_window_pattern": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0},
    "gemma3_text": WINDOWED,
    "cohere": {"logit_scale": 0.25},
    **RECURRENT,
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_score_as_the_oracle_with_the_head_on_chosen_rows(name: str) -> None:
    """Tied embeddings, soft-capped and scaled logits, sliding windows and recurrent states."""
    network = tiny_model(name.split(maxsplit=1)[0], VOCAB, **ARCHITECTURES[name])
    scorer = Scorer(network)
    assert scorer._head.is_split
    requests = random_requests(7)
    assert_scores(network, pairs(requests), scores(scorer, requests))


@pytest.mark.parametrize("step", [1, 3, 5, 16])
def test_sliding_windows_over_several_prefill_steps(step: int) -> None:
    network = tiny_model("gemma3_text", VOCAB, **WINDOWED)
    requests = random_requests(6, longest=30)
    assert_scores(network, pairs(requests), scores(Scorer(network, prefill_step=step), requests))


def test_a_model_without_a_split_is_scored_on_full_logits() -> None:
    scripted = ScriptedModel("abc", "xyz")
    scorer = Scorer(scripted)
    assert not scorer._head.is_split
    requests = [
        ScoringRequest((261,), tuple(b"abc")),
        ScoringRequest((1, 262), tuple(b"xyq")),
        ScoringRequest((5,), (5,)),
    ]
    answers = scores(scorer, requests)
    assert_scores(scripted, pairs(requests), answers)
    assert [answer.is_greedy for answer in answers] == [True, False, False]


@settings(max_examples=25, deadline=None)
@given(REQUESTS, st.integers(1, 6))
def test_any_requests_in_any_batch_size_score_as_the_oracle(
    requests: list[ScoringRequest], size: int
) -> None:
    assert_scores(model(), pairs(requests), scores(Scorer(model()), requests, size))


@settings(max_examples=15, deadline=None)
@given(REQUESTS, st.integers(1, 6), st.randoms(use_true_random=False))
def test_the_order_of_requests_does_not_change_a_number(
    requests: list[ScoringRequest], size: int, random: Any
) -> None:
    order = list(range(len(requests)))
    random.shuffle(order)
    plain = scores(Scorer(model()), requests, size)
    shuffled = scores(Scorer(model()), [requests[index] for index in order], size)
    assert [plain[index] for index in order] == shuffled  # the plan is the same, so is every bit


@pytest.mark.parametrize("step", [1, 3, 4, 7])
def test_rows_longer_than_a_prefill_step_score_as_the_oracle(step: int) -> None:
    requests = random_requests(6)
    assert_scores(model(), pairs(requests), scores(Scorer(model(), prefill_step=step), requests))


@pytest.mark.parametrize("rows", [0, 1, 2, 5])
def test_the_head_in_many_chunks_scores_as_the_oracle(rows: int) -> None:
    scorer = Scorer(model(), logits_bytes=rows * 4 * VOCAB)
    assert scorer._head.max_rows == max(1, rows)
    requests = random_requests(6)
    assert_scores(model(), pairs(requests), scores(scorer, requests))


def test_chunks_and_steps_together_score_as_the_oracle() -> None:
    requests = random_requests(9, longest=30, seed=4)
    scorer = Scorer(
        tiny_model("gemma2", VOCAB, query_pre_attn_scalar=8), prefill_step=5, logits_bytes=4 * VOCAB * 2
    )
    assert_scores(scorer._model, pairs(requests), scores(scorer, requests, 4))


def test_requests_equal_but_for_their_split_are_not_mixed_up() -> None:
    requests = [
        ScoringRequest((1, 2), (3, 4)),
        ScoringRequest((1,), (2, 3, 5)),
        ScoringRequest((1, 2, 3), (4,)),
        ScoringRequest((1, 2), (3, 4)),
    ]
    answers = scores(Scorer(model()), requests)
    assert_scores(model(), pairs(requests), answers)
    assert answers[0] == answers[3]
    assert len(plan_scoring(requests, 8).batches[0].rows) == 1


def test_greedy_is_said_of_greedy_continuations_only() -> None:
    from tests.tiny import oracle_generate

    greedy, _ = oracle_generate(model(), (3, 1), 4)
    other = [*greedy[:3], (greedy[3] + 1) % VOCAB]
    requests = [ScoringRequest((3, 1), tuple(greedy)), ScoringRequest((3, 1), tuple(other))]
    assert [answer.is_greedy for answer in scores(Scorer(model()), requests)] == [True, False]


def test_the_model_is_called_once_a_batch_and_tokens_are_counted_without_padding() -> None:
    scripted = ScriptedModel("abc")
    scorer = Scorer(scripted)
    scripted.calls.clear()
    requests = [ScoringRequest(tuple(range(length)), (1, 2)) for length in (1, 2, 3, 4, 5)]
    counted: list[int] = []
    plan = plan_scoring(requests, 2)
    scorer.run(plan, requests, lambda index, score: None, counted.append)
    assert scripted.calls == [(2, 6), (2, 4), (1, 2)]
    assert counted == [11, 7, 2]
    assert sum(counted) == plan.planned_tokens


def test_a_target_that_many_requests_share_is_looked_up_once() -> None:
    requests = [ScoringRequest((1, 2), (3, 4))] * 50 + [ScoringRequest((1, 2), (3, 5))]
    wanted = _wanted_positions(plan_scoring(requests, 8).batches[0], requests)
    assert wanted.targets.tolist() == [[3, NO_TARGET], [4, 5]]
    assert wanted.places[49] == [(0, 0), (1, 0)]
    assert wanted.places[50] == [(0, 0), (1, 1)]


def test_nothing_to_score_calls_nothing() -> None:
    Scorer(model()).run(plan_scoring([], 4), [], pytest.fail, pytest.fail)


def test_damaged_weights_give_nan_and_not_a_number_that_looks_right() -> None:
    damaged = tiny_model("llama", VOCAB)
    damaged.model.norm.weight = mx.full((32,), math.nan)
    answers = scores(Scorer(damaged), random_requests(3))
    assert all(math.isnan(answer.logprob) for answer in answers)


def test_a_token_outside_the_vocabulary_is_nan() -> None:
    answers = scores(Scorer(model()), [ScoringRequest((1,), (VOCAB,)), ScoringRequest((1,), (2,))])
    assert math.isnan(answers[0].logprob)
    assert math.isfinite(answers[1].logprob)


def test_half_precision_weights_are_accumulated_in_float32() -> None:
    network = tiny_model("llama", VOCAB)
    network.set_dtype(mx.bfloat16)
    requests = random_requests(5)
    for answer, pair in zip(scores(Scorer(network), requests, 1), pairs(requests), strict=True):
        # the logits of a batch of one are those of the oracle: only what comes after them is ours
        assert_scores(network, [pair], [answer])
