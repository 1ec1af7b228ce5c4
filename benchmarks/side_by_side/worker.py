"""One process of the comparison: load one backend, score one work, measure. Knows nothing of the others.

    python -m benchmarks.side_by_side.worker JOB.json RESULT.json

CPU seconds are the process's own, user and system over all threads, of the scoring alone: the backend is
loaded and has scored a few short requests by then. Encoding the texts is part of scoring, for all backends.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.side_by_side.backends import (
    BACKENDS,
    Answer,
    Backend,
    Computed,
    Ours,
    Seconds,
    stopwatch,
    warm_up,
)
from benchmarks.side_by_side.works import Work


@dataclass(frozen=True, slots=True)
class Job:
    """What one process is to do."""

    backend: str
    model: str
    work: str
    """As `Work.to_json` writes it."""
    num_questions: int
    """Of the work, from its start."""
    batch_size: str
    threads: int
    repeat: int
    bare: bool = False
    """Whether to run the plan's forwards alone too, for ours."""


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """What our plan says of itself, where the time went, and what its forwards alone would take."""

    unique_tokens: int
    planned_tokens: int
    padding: int
    num_forwards: int
    peak_kv_bytes: int
    seconds: dict[str, Seconds]
    """`plan` and `run` of the last repeat; `bare`, the median of as many."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one process found."""

    wall: float
    """Seconds, median of the repeats, as for `cpu`."""
    cpu: float
    computed: Computed
    """In one run."""
    peak_mlx_bytes: int | None
    """Most that MLX held at once while scoring, the model with it; None without MLX."""
    peak_rss_bytes: int
    """Most that the process held at once, loading included."""
    share: float
    """Context tokens of the questions that were answered, of those of all questions."""
    scored_tokens: tuple[int, ...]
    """Continuation tokens of each request."""
    answers: tuple[Answer, ...]
    plan: PlanFigures | None = None
    """Of ours."""

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Measurement:
        """Read what `dataclasses.asdict` wrote."""
        plan = fields.get("plan")
        if plan is not None:
            seconds = {name: Seconds(**taken) for name, taken in plan["seconds"].items()}
            plan = PlanFigures(**{**plan, "seconds": seconds})
        made = {
            "plan": plan,
            "computed": Computed(**fields["computed"]),
            "scored_tokens": tuple(fields["scored_tokens"]),
            "answers": tuple((score, is_greedy) for score, is_greedy in fields["answers"]),
        }
        return cls(**{**fields, **made})


def context_share(part: Work, whole: Work, backend: Backend) -> float:
    """Which share of the contexts' tokens a part of a work has; a text to be rolled over is all context."""
    if part == whole:
        return 1.0

    def tokens(work: Work) -> int:
        contexts = {(question, texts[0]) for question, texts in zip(work.questions, work.texts, strict=True)}
        return sum(backend.num_tokens(context) for _, context in contexts)

    return tokens(part) / tokens(whole)


def run(job: Job) -> Measurement:
    """Measure in this process."""
    whole = Work.from_json(job.work)
    part = whole.first(job.num_questions)
    if job.backend == "hf":
        import torch

        torch.set_num_threads(job.threads)
    backend = BACKENDS[job.backend](job.model, job.batch_size)
    warm_up(backend, part)
    _reset_peak()
    bare = BareForwards(backend) if job.bare and isinstance(backend, Ours) else None
    taken: list[Seconds] = []
    for _ in range(job.repeat):
        with stopwatch() as seconds:
            answers = backend.score(part)
        taken.append(seconds())
        computed = backend.computed()
        if len(taken) == 1:  # later peaks would be those of the bare forwards too
            peak, peak_mlx = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, _peak()
        if bare is not None:  # in turn, so that other work on the machine touches both alike
            bare.run()
    middle = median(taken)
    return Measurement(
        wall=middle.wall,
        cpu=middle.cpu,
        computed=computed,
        peak_mlx_bytes=peak_mlx,
        peak_rss_bytes=peak if sys.platform == "darwin" else peak * 1024,
        share=context_share(part, whole, backend),
        scored_tokens=tuple(backend.num_tokens(texts[-1]) for texts in part.texts),
        answers=tuple(answers),
        plan=plan_figures(backend, bare) if isinstance(backend, Ours) else None,
    )


def median(taken: Sequence[Seconds]) -> Seconds:
    """Of wall and CPU seconds, each for itself."""
    return Seconds(statistics.median(one.wall for one in taken), statistics.median(one.cpu for one in taken))


class BareForwards:
    """Runs the forwards of our last plan alone, and remembers how long each time took."""

    def __init__(self, backend: Ours) -> None:
        self._backend = backend
        self._model: Any = None
        self.taken: list[Seconds] = []

    def run(self) -> None:
        """Once."""
        from benchmarks.side_by_side.bare import BareModel, forward_shapes

        scorer = self._backend.scorer
        shapes = list(forward_shapes(scorer.plan_made, scorer.requests))
        if self._model is None:
            self._model = BareModel(self._backend.model, scorer.sharing.way.splits_attention)
            self._model.run(shapes[:1])  # to warm up
        self.taken.append(self._model.run(shapes))


def plan_figures(backend: Ours, bare: BareForwards | None) -> PlanFigures:
    """Read the last plan."""
    plan, seconds = backend.scorer.plan_made, dict(backend.scorer.seconds)
    if bare is not None:
        seconds["bare"] = median(bare.taken)
    figures = {name: getattr(plan, name) for name in PlanFigures.__dataclass_fields__ if name != "seconds"}
    return PlanFigures(**figures, seconds=seconds)


def _reset_peak() -> None:
    if "mlx.core" in sys.modules:
        import mlx.core as mx

        mx.reset_peak_memory()


def _peak() -> int | None:
    if "mlx.core" not in sys.modules:
        return None
    import mlx.core as mx

    return int(mx.get_peak_memory())


def main() -> None:
    job_file, result_file = sys.argv[1:]
    job = Job(**json.loads(Path(job_file).read_text(encoding="utf-8")))
    wanted = str(job.threads)
    if os.environ.get("OPENBLAS_NUM_THREADS") != wanted or os.environ.get("OMP_NUM_THREADS") != wanted:
        raise SystemExit("the number of threads must be in the environment when the process starts")
    Path(result_file).write_text(json.dumps(asdict(run(job))), encoding="utf-8")


if __name__ == "__main__":
    main()
