"""Scores without logits: those of the default head, in less memory."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_eval_kernels import linear_logprob

from mlx_eval.engine.batches import CacheSize, Limits
from mlx_eval.engine.kv import CacheFactory
from mlx_eval.engine.score import Scorer
from mlx_eval.engine.sharing import WAYS, ModelSharing
from mlx_eval.models.head import RowHead
from mlx_eval.models.output_layer import output_layer
from mlx_eval.records import Score, ScoringRequest
from tests.engine.test_score import family, pairs, planned, random_requests, run
from tests.models.test_output_layer import PLAIN, make
from tests.tiny import TOLERANCE, assert_scores, oracle_logits, tiny_model

REQUESTS = [*family(), *random_requests(6)]


def scorer(model: nn.Module, *, low_memory: bool = True, logits_bytes: int = 2**28) -> Scorer:
    head = RowHead(model, logits_bytes)
    factory = CacheFactory(model, branches=True, splits_attention=True)
    sharing = ModelSharing(WAYS[0], factory.keys_only, CacheSize())
    return Scorer(model, head, sharing, output_layer(model, head) if low_memory else None)


def scores(one: Scorer, requests: Sequence[ScoringRequest] = REQUESTS, step: int = 2048) -> list[Score]:
    return run(one, planned(requests, Limits(5, step=step), one), requests)


@pytest.mark.parametrize("bits", [0, 4, 8])
@pytest.mark.parametrize("name", PLAIN)
def test_scores_are_those_of_the_oracle(name: str, bits: int) -> None:
    model = make(name, bits=bits)
    assert_scores(model, pairs(REQUESTS), scores(scorer(model)))


@pytest.mark.parametrize("step", [1, 3, 16])
def test_prompts_in_several_steps(step: int) -> None:
    model = make("llama tied")
    assert_scores(model, pairs(REQUESTS), scores(scorer(model), step=step))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_half_types_differ_by_the_rounding_of_logits(dtype: mx.Dtype) -> None:
    model = make("llama", dtype)
    low, default = scores(scorer(model)), scores(scorer(model, low_memory=False))
    for (context, continuation), one, other in zip(pairs(REQUESTS), low, default, strict=True):
        largest = float(np.abs(oracle_logits(model, [*context, *continuation])).max())
        # a token's logit and the logsumexp are rounded by half an epsilon of their size each; beside that, what
        # the two computed is the same
        allowed = len(continuation) * float(mx.finfo(dtype).eps) * largest + TOLERANCE
        assert abs(one.logprob - other.logprob) <= allowed


def test_no_logits_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    one = scorer(model)

    def logits(*_: Any) -> Any:
        raise AssertionError("the head was asked for logits")

    monkeypatch.setattr(RowHead, "logits", logits)
    monkeypatch.setattr(RowHead, "logits_of", logits)
    assert_scores(model, pairs(REQUESTS), scores(one))


def test_damaged_weights_give_nan() -> None:
    model = make("llama")
    one = scorer(model)
    model.model.norm.weight = mx.full((32,), math.nan)
    assert all(math.isnan(score.logprob) and not score.is_greedy for score in scores(one))


LARGE = 40_000


@functools.cache
def large_model(bits: int) -> nn.Module:
    model = tiny_model("llama", LARGE)
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
    mx.eval(model.parameters())
    return model


def peak(low_memory: bool, bits: int) -> int:
    """Bytes that scoring about 800 positions takes beside what was there before."""
    one = scorer(large_model(bits), low_memory=low_memory)
    rng = np.random.default_rng(0)
    requests = [ScoringRequest(rng.integers(0, LARGE, 1), rng.integers(0, LARGE, 50)) for _ in range(16)]
    plan = planned(requests, Limits(16), one)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run(one, plan, requests)
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("bits", [0, 4])
def test_the_block_of_logits_is_not_there(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[linear_logprob.__module__], "BLOCK_BYTES", 2**20)
    block = 4 * 16 * 50 * LARGE
    assert peak(low_memory=False, bits=bits) > 2 * block
    assert peak(low_memory=True, bits=bits) < block / 4
