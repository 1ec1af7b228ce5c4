"""SmolLM2-135M-Instruct from its GGUF file against lm-eval's own `hf` backend, request by request.

The reference answers are those of torch on the CPU in float32, one file a task, with each request's
arguments. Tolerances: 1e-3 nats a continuation, the sum of a few dozen tokens' rounding at about 1e-5 a
token, on both sides. A page may be off by 0.05 nats or by 2e-5 a token: the float32 log_softmax that the
reference was made with errs by 1.7e-5 a token, always to the same side. benchmarks/page_precision.py measures it:
on the page of 5,349 tokens the reference is 0.091 nats from a float64 run of the model, ours 0.003.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_eval.harness.lm import MLXEvalLM
from mlx_eval.models.load import load_model

pytestmark = pytest.mark.slow

CONTINUATION_NATS = 1e-3
PAGE_NATS = 0.05
PAGE_NATS_A_TOKEN = 2e-5
NEAR_TIE = 1e-3
"""Difference of the two best logits below which two implementations may choose differently. The logits of this
model are around 20, where 30 layers of float32 rounding in another order move one by about 1e-4."""

LOGLIKELIHOOD = (
    "arc_easy",
    "arc_easy_chat",
    "blimp_adjunct_island",
    "boolq",
    "hellaswag",
    "mmlu_anatomy",
    "mmlu_world_religions",
)


@pytest.fixture(scope="module")
def lm(real_model_path: Path) -> MLXEvalLM:
    return MLXEvalLM(load_model(real_model_path, dtype="float32", dequantize=True), batch_size=8)


def requests(golden: dict[str, Any]) -> Iterator[tuple[SimpleNamespace, Any]]:
    for sample in golden["samples"]:
        for arguments, (answer,) in zip(sample["arguments"], sample["resps"], strict=True):
            yield SimpleNamespace(args=tuple(arguments)), answer


@pytest.mark.parametrize("task", LOGLIKELIHOOD)
def test_log_probabilities_equal_the_reference(lm: MLXEvalLM, golden: Any, task: str) -> None:
    asked, wanted = zip(*requests(golden(task)), strict=True)
    got = lm.loglikelihood(list(asked))
    worst = max(abs(a - b) for (a, _), (b, _) in zip(got, wanted, strict=True))
    assert worst <= CONTINUATION_NATS
    assert [greedy for _, greedy in got] == [greedy for _, greedy in wanted]


def test_pages_of_text_equal_the_reference(lm: MLXEvalLM, golden: Any) -> None:
    asked, wanted = zip(*requests(golden("wikitext")), strict=True)
    alone = MLXEvalLM(lm.loaded, batch_size=1)  # pages of very different length pad each other
    got = alone.loglikelihood_rolling(list(asked))
    for request, ours, theirs in zip(asked, got, wanted, strict=True):
        num_tokens = lm.count_rolling_tokens(request.args[0])
        assert abs(ours - theirs) <= max(PAGE_NATS, PAGE_NATS_A_TOKEN * num_tokens)


def test_texts_equal_the_reference_up_to_the_first_near_tie(lm: MLXEvalLM, golden: Any) -> None:
    asked, wanted = zip(*requests(golden("gsm8k_cot")), strict=True)
    got = lm.generate_until(list(asked))
    for request, ours, theirs in zip(asked, got, wanted, strict=True):
        if ours != theirs:
            gap = logit_gap_where_texts_part(lm, request.args[0], ours, theirs)
            assert gap < NEAR_TIE, f"{ours!r} instead of {theirs!r}, the best logits {gap} apart"


def logit_gap_where_texts_part(lm: MLXEvalLM, prompt: str, ours: str, theirs: str) -> float:
    """How far apart the two best logits are at the first token in which two continuations differ."""
    ids = lm.tok_encode(prompt)
    first = lm.tok_encode(prompt + ours)
    second = lm.tok_encode(prompt + theirs)
    shared = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    assert shared >= len(ids)
    logits = np.array(lm.loaded.model(mx.array([first[:shared]]))[0, -1].astype(mx.float32))
    best, next_best = np.sort(logits)[::-1][:2]
    return float(best - next_best)
