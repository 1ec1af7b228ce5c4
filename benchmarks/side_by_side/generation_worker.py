"""One process of the comparison: load one backend, generate one work, measure. Knows nothing of the others.

    python -m benchmarks.side_by_side.generation_worker JOB.json RESULT.json

CPU seconds are the process's own, user and system over all threads, of `generate_until` alone, encoding among it: the
backend is loaded, the model tested, and two short prompts continued by then.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.side_by_side.backends import Seconds, stopwatch
from benchmarks.side_by_side.generation_backends import (
    GENERATION_BACKENDS,
    WARM_UP,
    Answer,
    GenerationCounts,
    Ours,
)
from benchmarks.side_by_side.generation_works import GenerationWork


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """What one process is to do."""

    backend: str
    model: str
    work: str
    """As `GenerationWork.to_json` writes it."""
    batch_size: str
    speculate: str
    """Of ours: `off`, `auto` or a number."""
    threads: int
    repeat: int


@dataclass(frozen=True, slots=True)
class GenerationMeasurement:
    """What one process found."""

    wall: float
    """Seconds, median of the repeats, as for `cpu`."""
    cpu: float
    counts: GenerationCounts
    """In one run."""
    peak_mlx_bytes: int | None
    """Most that MLX held at once while generating, the model with it; None without MLX."""
    peak_rss_bytes: int
    """Most that the process held at once, loading included."""
    answers: tuple[Answer, ...]
    self_test_wall: float | None = None
    """Seconds that the checks of the model took before the clock started; of ours."""

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> GenerationMeasurement:
        """Read what `dataclasses.asdict` wrote."""
        answers = tuple(Answer(one["text"], tuple(one["ids"])) for one in fields["answers"])
        return cls(**{**fields, "counts": GenerationCounts(**fields["counts"]), "answers": answers})


def run(job: GenerationJob) -> GenerationMeasurement:
    """Measure in this process."""
    work = GenerationWork.from_json(job.work)
    if job.backend == "hf":
        import torch

        torch.set_num_threads(job.threads)
    backend = GENERATION_BACKENDS[job.backend](job.model, job.batch_size, job.speculate)
    backend.generate(WARM_UP)
    self_test = backend.seconds.get("self_test") if isinstance(backend, Ours) else None
    if "mlx.core" in sys.modules:
        import mlx.core as mx

        mx.clear_cache()
        mx.reset_peak_memory()
    taken: list[Seconds] = []
    for _ in range(job.repeat):
        with stopwatch() as seconds:
            texts = backend.generate(work)
        taken.append(seconds())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_mlx = int(mx.get_peak_memory()) if "mlx.core" in sys.modules else None
    answers, counts = backend.results(work, texts)
    return GenerationMeasurement(
        wall=statistics.median(one.wall for one in taken),
        cpu=statistics.median(one.cpu for one in taken),
        counts=counts,
        peak_mlx_bytes=peak_mlx,
        peak_rss_bytes=peak if sys.platform == "darwin" else peak * 1024,
        answers=tuple(answers),
        self_test_wall=self_test,
    )


def main() -> None:
    job_file, result_file = sys.argv[1:]
    job = GenerationJob(**json.loads(Path(job_file).read_text(encoding="utf-8")))
    wanted = str(job.threads)
    if os.environ.get("OPENBLAS_NUM_THREADS") != wanted or os.environ.get("OMP_NUM_THREADS") != wanted:
        raise SystemExit("the number of threads must be in the environment when the process starts")
    Path(result_file).write_text(json.dumps(asdict(run(job))), encoding="utf-8")


if __name__ == "__main__":
    main()
