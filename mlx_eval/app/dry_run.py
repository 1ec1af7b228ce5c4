"""What a run would compute, before it does: the plan's figures, what the model may share, and about how long.

Knows the order of these steps; computes nothing but a short calibration.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from mlx_eval import config
from mlx_eval.app.evaluate import Job, load_tasks
from mlx_eval.engine.known import (
    identity_of_source,
    known_sharing,
    model_identity,
    remember_source,
    sharing_of,
)
from mlx_eval.engine.score import Scorer
from mlx_eval.engine.sharing import ModelSharing, untested_sharing
from mlx_eval.harness.adapter import LmEvalAdapter
from mlx_eval.harness.dry_run import PlannedGeneration, PlannedScoring, PlanningLM
from mlx_eval.models.head import RowHead
from mlx_eval.models.load import check_source, load_model
from mlx_eval.models.loaded import LoadedModel
from mlx_eval.models.outline import load_outline
from mlx_eval.models.output_layer import output_layer

WRITES: Final = ("use_cache", "cache_requests", "rewrite_requests_cache", "delete_requests_cache")
"""Arguments of lm-eval that a dry run leaves out, as it is to write nothing."""
LOW_MEMORY_HEAD: Final = "low_memory_head"
"""Argument of the backend that changes no plan and cannot be tested without the weights."""
BLOCK: Final = 8
"""Neighbouring requests of a sample: those of two questions with four choices."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a run would cost."""

    scoring: tuple[PlannedScoring, ...]
    generation: PlannedGeneration | None
    sharing: ModelSharing
    is_tested: bool
    """Whether the self-test was run, now or before; False: `sharing` is hoped for."""
    tokens_per_second: float | None
    """Measured on a sample of the scoring requests; None: not measured."""

    @property
    def seconds(self) -> float | None:
        """About how long scoring would take; None: not measured, or nothing to score."""
        if self.tokens_per_second is None:
            return None
        return sum(one.plan.planned_tokens for one in self.scoring) / self.tokens_per_second


def forecast(
    job: Job, *, weights: bool = True, on_stage: Callable[[str], None] = lambda text: None
) -> Forecast:
    """Plan a job.

    Args:
        job: what would be done.
        weights: whether to load the model, to test and time it.
        on_stage: told what begins, for somebody who waits.

    Raises:
        MlxEvalError: whatever a run would raise before it computes.
    """
    check_source(job.model)
    evaluation = {**job.evaluation, "predict_only": True, "bootstrap_iters": 0}
    for name in WRITES:
        evaluation.pop(name, None)
    on_stage("reading lm-eval's task files and the data")
    tasks = load_tasks(job)
    on_stage(f"loading {job.model}" if weights else f"reading what {job.model} is")
    loaded = load_model(job.model, **job.loading) if weights else load_outline(job.model, **job.loading)
    scorer = _scorer(loaded, job) if weights else None
    tested = _known_sharing(job) if scorer is None else scorer.sharing
    sharing = tested or untested_sharing(loaded.model)
    lm = PlanningLM(
        loaded,
        sharing,
        reserved_bytes=0 if weights else loaded.num_bytes,
        **{name: value for name, value in job.backend.items() if name != LOW_MEMORY_HEAD},
    )
    on_stage("planning")
    LmEvalAdapter(lm).evaluate(tasks, **evaluation)
    speed = None
    if scorer is not None and lm.scoring:
        on_stage("timing a sample")
        speed = _tokens_per_second(scorer, max(lm.scoring, key=lambda one: one.plan.planned_tokens))
    return Forecast(
        tuple(lm.scoring),
        lm.generation,
        sharing,
        is_tested=tested is not None,
        tokens_per_second=speed,
    )


def _scorer(loaded: LoadedModel, job: Job) -> Scorer:
    head = RowHead(loaded.model, config.LOGITS_BYTES)
    layer = output_layer(loaded.model, head) if job.backend.get(LOW_MEMORY_HEAD) else None
    scorer = Scorer(loaded.model, head, sharing_of(loaded, head), layer)
    remember_source(job.model, job.loading, model_identity(loaded, loaded.fingerprint()))
    return scorer


def _known_sharing(job: Job) -> ModelSharing | None:
    identity = identity_of_source(job.model, job.loading)
    return None if identity is None else known_sharing(identity)


def _tokens_per_second(scorer: Scorer, work: PlannedScoring) -> float:
    """Planned tokens a second of wall time, on blocks of neighbours, which share what they share in the run."""
    share = min(1.0, config.CALIBRATION_TOKENS / work.plan.planned_tokens)
    num_blocks = max(1, round(len(work.requests) * share / BLOCK))
    starts = [block * len(work.requests) // num_blocks for block in range(num_blocks)]
    sample = [request for start in starts for request in work.requests[start : start + BLOCK]]
    scorer.run(scorer.plan(sample[:1]), sample[:1], lambda index, score: None)  # the first run compiles
    plan = scorer.plan(sample, work.plan.limits.max_rows)
    start = time.perf_counter()
    scorer.run(plan, sample, lambda index, score: None)
    return plan.planned_tokens / (time.perf_counter() - start)
