"""SmolLM2-135M-Instruct from its GGUF file against lm-eval's own `hf` backend, request by request.

The reference answers are those of torch on the CPU in float32, one file a task, with each request's
arguments and the scores. The same rows go through lm-eval again, so prompts, few-shot examples and the
chat template are compared too. Tolerances: 1e-3 nats a continuation, the sum of a few dozen tokens' rounding
at about 1e-5 a token, on both sides. A page of text may be off by 0.05 nats or by 2e-5 a token, whichever is
more, because the reference itself is not nearer to the truth: on the page of 5,349 tokens it is 0.091 nats
from a float64 run of the model, 1.7e-5 a token, and ours 0.003 (benchmarks/page_precision.py, benchmarks/LOG.md).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_eval.harness.adapter import LmEvalAdapter
from mlx_eval.harness.lm import MLXEvalLM
from mlx_eval.harness.tasks import task_manager
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


@pytest.fixture(scope="module")
def tasks(reference: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """lm-eval's task manager with the task files over the reference's rows."""
    folder = tmp_path_factory.mktemp("tasks")
    subprocess.run(
        [sys.executable, str(reference / "offline_tasks.py"), "--out", str(folder)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return task_manager(folder, include_defaults=False)


def evaluate(lm: MLXEvalLM, tasks: Any, golden: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The same task, rows and settings as in a reference file, through lm-eval."""
    shots = None if golden["num_fewshot"] == "-" else int(golden["num_fewshot"])
    return LmEvalAdapter(lm).evaluate(
        golden["task"],
        task_manager=tasks,
        limit=golden["limit"],
        num_fewshot=shots,
        apply_chat_template=golden["chat"],
        bootstrap_iters=0,
        **options,
    )


def answers(samples: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """(arguments, answer) of every request, by document."""
    ordered = sorted(samples, key=lambda sample: sample["doc_id"])
    return [
        (list(arguments), answer)
        for sample in ordered
        for arguments, (answer,) in zip(sample["arguments"], sample["resps"], strict=True)
    ]


def scores(results: dict[str, Any]) -> dict[str, float]:
    """Metrics by name, without their standard errors."""
    return {
        name: value
        for name, value in results.items()
        if "," in name and "_stderr" not in name and isinstance(value, float)
    }


@pytest.mark.parametrize("task", LOGLIKELIHOOD)
def test_multiple_choice_equals_the_reference(lm: MLXEvalLM, tasks: Any, golden: Any, task: str) -> None:
    stored = golden(task)
    results = evaluate(lm, tasks, stored)
    got, wanted = answers(results["samples"][stored["task"]]), answers(stored["samples"])
    assert [arguments for arguments, _ in got] == [arguments for arguments, _ in wanted]
    worst = max(abs(ours[0] - theirs[0]) for (_, ours), (_, theirs) in zip(got, wanted, strict=True))
    print(f"{task}: {len(got)} requests, worst difference {worst:.1e} nats")  # shown with ARGS=-rP
    assert worst <= CONTINUATION_NATS
    assert [ours[1] for _, ours in got] == [theirs[1] for _, theirs in wanted]
    assert scores(results["results"][stored["task"]]) == scores(stored["results"])


def test_pages_of_text_equal_the_reference(lm: MLXEvalLM, tasks: Any, golden: Any) -> None:
    stored = golden("wikitext")
    # pages of very different length would only pad each other
    results = evaluate(lm, tasks, stored, batch_size=1)
    got, wanted = answers(results["samples"][stored["task"]]), answers(stored["samples"])
    for ((text,), ours), (_, theirs) in zip(got, wanted, strict=True):
        num_tokens = lm.count_rolling_tokens(text)
        print(f"page of {num_tokens} tokens: {ours:.4f} nats, reference {theirs:.4f}")
        assert abs(ours - theirs) <= max(PAGE_NATS, PAGE_NATS_A_TOKEN * num_tokens)
    assert scores(results["results"][stored["task"]]) == pytest.approx(scores(stored["results"]), rel=1e-4)


def test_texts_equal_the_reference_up_to_the_first_near_tie(lm: MLXEvalLM, tasks: Any, golden: Any) -> None:
    stored = golden("gsm8k_cot")
    results = evaluate(lm, tasks, stored)
    got, wanted = answers(results["samples"][stored["task"]]), answers(stored["samples"])
    assert [arguments[0] for arguments, _ in got] == [arguments[0] for arguments, _ in wanted]
    for ((prompt, _), ours), (_, theirs) in zip(got, wanted, strict=True):
        if ours != theirs:
            gap = logit_gap_where_texts_part(lm, prompt, ours, theirs)
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
