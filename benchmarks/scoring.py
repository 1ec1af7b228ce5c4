"""This project beside mlx_lm.evaluate and lm-eval's `hf` on the same requests: time, tokens, memory, answers.

    MLX_EVAL_REFERENCE=DIR python benchmarks/scoring.py --model ./model
    python benchmarks/scoring.py --model ./model --requests requests.json --backends ours,mlx_lm

Each backend runs in a process of its own, in turn, in float32, with the same number of threads and, where it is MLX,
the same BLAS. lm-eval makes the requests once, from the rows of the folder that MLX_EVAL_REFERENCE names; or they
come from a file: {"name": ..., "kind": "loglikelihood", "texts": [[context, continuation], ...],
"questions": [the number of each request's question, ...]}.

CPU seconds (user and system, all threads, of scoring alone) are the bar, as wall time moves with whatever else the
machine does; on Metal, where the work is not the processor's, look at wall time instead. A peer's cost is constant
a question: where the whole would take ten minutes or more it answers the first questions only, and its figures are
scaled by their share of the context tokens and marked `~`. Ours is measured whole, always. That `hf` computes more
tokens a second says something of torch's CPU kernels beside MLX's on Linux and nothing of a Mac.

A further backend, `oracle`, scores one sequence at a time with float64 normalisers: to check answers, not to be
beaten. The status is 1 where answers disagree.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from benchmarks.side_by_side.backends import BACKENDS, backend_versions
from benchmarks.side_by_side.report import Line, make_line, plan_table, table
from benchmarks.side_by_side.store import Store, model_digest
from benchmarks.side_by_side.worker import Job, Measurement
from benchmarks.side_by_side.works import QUIET, RECIPES, Work, build_works, reference_folder

OURS: Final = "ours"
COMPARED: Final = (OURS, "mlx_lm", "hf")


def measure(job: Job) -> Measurement:
    """Run a job in a process of its own."""
    threads = str(job.threads)
    environment = {**os.environ, **QUIET, "OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
    with tempfile.TemporaryDirectory() as folder:
        asked, found = Path(folder, "job.json"), Path(folder, "result.json")
        asked.write_text(json.dumps(asdict(job)), encoding="utf-8")
        command = [sys.executable, "-m", "benchmarks.side_by_side.worker", str(asked), str(found)]
        subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
        return Measurement.from_dict(json.loads(found.read_text(encoding="utf-8")))


def jobs_of(work: Work, backends: Sequence[str], arguments: argparse.Namespace) -> list[Job]:
    """What is to be run for one work, ours first."""
    recipe = RECIPES.get(work.name)
    wanted = arguments.peer_questions or (recipe.peer_questions if recipe else None) or work.num_questions
    peer_batch_size = arguments.peer_batch_size or (recipe.peer_batch_size if recipe else 8)
    return [
        Job(
            backend=backend,
            model=arguments.model,
            work=work.to_json(),
            num_questions=work.num_questions if backend == OURS else min(wanted, work.num_questions),
            batch_size=arguments.batch_size if backend == OURS else str(peer_batch_size),
            threads=arguments.threads,
            repeat=arguments.repeat,
            bare=backend == OURS and not arguments.no_bare,
        )
        for backend in sorted(backends, key=lambda name: name != OURS)
    ]


def key_of(job: Job, work: Work, machine: str) -> dict[str, Any]:
    """What must be equal for a stored measurement to stand in for a new one."""
    return {
        "model": model_digest(Path(job.model)),
        "work": work.digest(),
        "questions": job.num_questions,
        "batch_size": job.batch_size,
        "threads": job.threads,
        "machine": machine,
        "versions": backend_versions(job.backend),
    }


def compare(work: Work, arguments: argparse.Namespace, machine: str) -> list[Line]:
    """Measure all backends on one work, or take their stored measurements."""
    store = Store(arguments.answers) if arguments.answers else None
    ours: Measurement | None = None
    lines = []
    for job in jobs_of(work, arguments.backends, arguments):
        key = key_of(job, work, machine)
        may_reuse = store is not None and arguments.reuse and job.backend != OURS
        found = store.read(work.name, job.backend, key) if store is not None and may_reuse else None
        stored = found is not None
        if found is None:
            print(
                f"{work.name}: {job.backend}, {job.num_questions} questions ...", file=sys.stderr, flush=True
            )
            found = measure(job)
            if store is not None:
                store.write(work.name, job.backend, key, found)
        if job.backend == OURS:
            ours = found
        lines.append(make_line(work, job.backend, found, job.num_questions, ours, stored=stored))
    return lines


def find_works(arguments: argparse.Namespace) -> list[Work]:
    """From a file, or from lm-eval."""
    if arguments.requests:
        return [Work.from_json(arguments.requests.read_text(encoding="utf-8"))]
    recipes = {name: RECIPES[name] for name in arguments.work}
    return list(build_works(recipes, reference_folder()).values())


def names_among(known: Sequence[str]) -> Any:
    """A type for argparse: a comma list of known names."""

    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}; got {text!r}")
        return names

    return parse


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="a model directory that mlx-lm and transformers read")
    add("--work", type=names_among(list(RECIPES)), default=list(RECIPES), help=f"of {','.join(RECIPES)}")
    add("--requests", type=Path, metavar="FILE", help="score these requests instead")
    add(
        "--backends",
        type=names_among(list(BACKENDS)),
        default=list(COMPARED),
        help=f"of {','.join(BACKENDS)} (default: {','.join(COMPARED)})",
    )
    add("--batch_size", default="auto", help="of ours")
    add("--peer_batch_size", type=int, help="of the peers (default: set for each work)")
    add("--peer_questions", type=int, help="questions that a peer answers (default: set for each work)")
    add("--threads", type=int, default=2, help="of every backend (default: %(default)s)")
    add("--repeat", type=int, default=1, help="take the median of so many runs (default: %(default)s)")
    add("--no_bare", action="store_true", help="leave out the bare forwards of our plan")
    add("--json", type=Path, metavar="FILE", help="write the figures here too")
    add("--answers", type=Path, metavar="DIR", help="keep measurements and answers here")
    add("--reuse", action="store_true", help="take a peer's stored measurement from --answers where it fits")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    from mlx_eval.models.runtime import device

    lines: list[Line] = []
    for work in find_works(arguments):
        lines += compare(work, arguments, device().name)
        print(table(lines[-len(arguments.backends) :]), file=sys.stderr, flush=True)
    print(
        f"{device().name}, {arguments.threads} threads, float32, BLAS {device().blas}; median of {arguments.repeat}"
    )
    print(table(lines))
    if any(line.plan is not None for line in lines):
        print("\nours: the plan, and scoring (encoding and planning with it) over the plan's forwards alone")
        print(plan_table(lines))
    if arguments.json:
        arguments.json.write_text(
            json.dumps([asdict(line) for line in lines], indent=1) + "\n", encoding="utf-8"
        )
    beyond = [line for line in lines if line.agreement is not None and line.agreement.num_beyond]
    for line in beyond:
        print(f"{line.work}: {line.backend} and ours disagree", file=sys.stderr)
    if beyond:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
