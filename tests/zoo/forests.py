"""Random requests whose beginnings overlap in every way, and the plans that compute them. Knows no model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final
from unittest import mock

import numpy as np

from mlx_eval import config
from mlx_eval.engine.batches import CacheSize, Limits, ScoringPlan, Sharing
from mlx_eval.engine.forest import NO_SHARING
from mlx_eval.engine.plan import plan_scoring
from mlx_eval.records import IntArray, ScoringRequest
from tests.zoo.build import VOCAB

SHORT_STEP: Final = 16
"""Tokens of a row in one forward pass, few enough for several passes."""
LONG_ROWS: Final = (300, 256, 200)
"""Around 256 tokens, the chunk of mlx-lm's state-space layers: padded rows go wrong in steps that cut it."""


def forest(seed: int) -> list[ScoringRequest]:
    """Three stems of unequal length, branches and leaves, the longest paths of 60 to 90 tokens."""
    rng = np.random.default_rng(seed)
    requests = []
    for stem_len in (37, 21, 5):
        stem = _ids(rng, stem_len)
        for branch_len in rng.integers(1, 30, 3):
            branch = np.concatenate([stem, _ids(rng, branch_len)])
            lengths = [*rng.integers(2, 20, 2), 1, 1]
            requests += [ScoringRequest(branch, _ids(rng, length)) for length in lengths]
        requests += [ScoringRequest(stem, _ids(rng, length)) for length in (1, 7, 40)]
        whole = np.concatenate([stem, _ids(rng, 24)])
        requests += [ScoringRequest(whole[:1], whole[1:]), ScoringRequest(stem[:2], stem[2:])]
    requests += [requests[0], requests[3]]
    single = _ids(rng, 1)
    return requests + [ScoringRequest(single, _ids(rng, length)) for length in (1, 1, 64)]


def long_forest(seed: int) -> list[ScoringRequest]:
    """Stems of `LONG_ROWS`, each scored at its end, with a longer and a shorter row behind it."""
    rng = np.random.default_rng(seed)
    requests = []
    for length in LONG_ROWS:
        stem = _ids(rng, length)
        requests += [ScoringRequest(stem[:-8], stem[-8:])]
        requests += [ScoringRequest(stem, _ids(rng, tail)) for tail in (30, 5)]
    return requests


def plans(
    requests: list[ScoringRequest], sharing: Sharing, cache: CacheSize
) -> Iterator[tuple[str, ScoringPlan]]:
    """Plans that differ in all that may be shared, each with its name."""
    row_bytes = 100 * cache.token_bytes + cache.row_bytes
    small = Limits(max_rows=7, batch_tokens=64)
    tight = Limits(max_rows=16, batch_tokens=400, kv_bytes=5 * row_bytes // 2)
    yield "small batches", plan_scoring(requests, small, sharing, cache, split_tokens=1)
    for copies in (1, 100):  # tokens that are copied to rows before they are stored once for all
        with mock.patch.object(config, "PREFIX_COPIES", copies):
            plan = plan_scoring(requests, small, sharing, cache, split_tokens=1)
            yield f"prefixes of more than {copies} copied tokens", plan
    yield "memory for two rows", plan_scoring(requests, tight, sharing, cache, split_tokens=4)
    yield "nothing shared", plan_scoring(requests, tight, sharing, cache, split_tokens=NO_SHARING)
    if sharing.keys_only:
        steps = Limits(max_rows=4, batch_tokens=400, step=SHORT_STEP)
        yield "short steps", plan_scoring(requests, steps, sharing, cache)


def long_plans(
    requests: list[ScoringRequest], sharing: Sharing, cache: CacheSize
) -> Iterator[tuple[str, ScoringPlan]]:
    """Plans of rows that are longer than a step, which state-space layers allow only in chunks of theirs."""
    for rows in (1, 3):
        limits = Limits(max_rows=rows, step=config.SMALLEST_STEP)
        yield f"long rows, {rows} together", plan_scoring(requests, limits, sharing, cache)


def _ids(rng: np.random.Generator, count: int) -> IntArray:
    return rng.integers(1, VOCAB, count, dtype=np.int32)
