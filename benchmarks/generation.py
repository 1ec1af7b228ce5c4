"""This project beside mlx_lm.evaluate and lm-eval's `hf` on the same prompts: time, tokens, memory, texts.

    MLX_EVAL_REFERENCE=DIR python benchmarks/generation.py --model ./model
    python benchmarks/generation.py --model ./model --requests requests.json --speculate off,auto,4

Each backend runs in a process of its own, in turn, in float32, with the same number of threads and, where it is MLX,
the same BLAS, and is called by the method that lm-eval calls, `generate_until`. lm-eval makes the requests once, from
the rows of the folder that MLX_EVAL_REFERENCE names; or they come from a file: {"name": ..., "prompts": [...],
"options": [{"until": [...], "max_gen_toks": ...}, ...]}. A task that sets no limit has 256 tokens, lm-eval's own
default, with every backend. The peers take eight rows at a time, mlx_lm.evaluate's default.

CPU seconds (user and system, all threads, of `generate_until` alone, encoding among it) are the bar, as wall time
moves with whatever else the machine does; on Metal, where the work is not the processor's, look at wall time instead.
That `hf` needs less time a token says something of torch's CPU kernels beside MLX's on Linux, where they are two to
four times as fast, and nothing of a Mac.

Tokens: `computed` are those of prompts that went through the model, of a peer its padding with them; `generated` are
those up to the end of each answer, `discarded` those that were computed behind it. Forwards are those that read
prompts + those that give tokens. Where a text is not ours, the model is asked how near its two best tokens were at
the first difference: below 1e-4 rounding decides, and both are right. The status is 1 where it does not explain one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from benchmarks.scoring import names_among
from benchmarks.side_by_side.backends import backend_versions
from benchmarks.side_by_side.generation_backends import GENERATION_BACKENDS
from benchmarks.side_by_side.generation_report import (
    Difference,
    Line,
    differences_text,
    make_line,
    speculation_table,
    table,
)
from benchmarks.side_by_side.generation_worker import GenerationJob, GenerationMeasurement
from benchmarks.side_by_side.generation_works import (
    GENERATION_RECIPES,
    GenerationWork,
    build_generation_works,
)
from benchmarks.side_by_side.near_ties import Gap, Parting
from benchmarks.side_by_side.processes import in_own_process
from benchmarks.side_by_side.store import Documents, model_digest
from benchmarks.side_by_side.works import reference_folder

OURS: Final = "ours"
WORKER: Final = "benchmarks.side_by_side.generation_worker"
NEAR_TIES: Final = "benchmarks.side_by_side.near_ties"


def jobs_of(work: GenerationWork, arguments: argparse.Namespace) -> list[GenerationJob]:
    """What is to be run for one work, ours first, once for each way to speculate."""
    ways = [(OURS, speculate) for speculate in arguments.speculate] if OURS in arguments.backends else []
    ways += [(backend, "off") for backend in arguments.backends if backend != OURS]
    return [
        GenerationJob(
            backend=backend,
            model=arguments.model,
            work=work.to_json(),
            batch_size=arguments.batch_size if backend == OURS else str(arguments.peer_batch_size),
            speculate=speculate,
            threads=arguments.threads,
            repeat=arguments.repeat,
        )
        for backend, speculate in ways
    ]


def key_of(job: GenerationJob, work: GenerationWork, machine: str) -> dict[str, Any]:
    """What must be equal for a stored measurement to stand in for a new one."""
    return {
        "model": model_digest(Path(job.model)),
        "work": work.digest(),
        "batch_size": job.batch_size,
        "speculate": job.speculate,
        "threads": job.threads,
        "machine": machine,
        "versions": backend_versions(job.backend),
    }


def differences_from(
    ours: GenerationMeasurement, found: GenerationMeasurement, work: GenerationWork, job: GenerationJob
) -> list[Difference]:
    """Where a backend's texts are not ours, and how near the model's best tokens were there."""
    pairs = list(zip(ours.answers, found.answers, strict=True))
    texts = [
        {"question": index, "prompt": work.prompts[index], "ours": own.text, "ids": other.ids}
        for index, (own, other) in enumerate(pairs)
        if own.text != other.text
    ]
    if not texts:
        return []
    answers = in_own_process(NEAR_TIES, {"model": job.model, "texts": texts}, job.threads)
    return [
        Difference(Parting(**one["parting"]), None if one["gap"] is None else Gap(**one["gap"]))
        for one in answers
    ]


def compare(work: GenerationWork, arguments: argparse.Namespace, machine: str) -> list[Line]:
    """Measure all backends on one work, or take their stored measurements."""
    store = Documents(arguments.answers) if arguments.answers else None
    ours: GenerationMeasurement | None = None
    lines = []
    for job in jobs_of(work, arguments):
        key = key_of(job, work, machine)
        document = None
        if store is not None and arguments.reuse and job.backend != OURS:
            document = store.read_document(work.name, job.backend, key)
        stored = document is not None
        if document is None:
            what = f"{job.backend}, speculate {job.speculate}" if job.backend == OURS else job.backend
            print(f"{work.name}: {what}, {len(work.prompts)} questions ...", file=sys.stderr, flush=True)
            document = in_own_process(WORKER, asdict(job), job.threads)
            if store is not None:
                store.write_document(work.name, job.backend, key, document)
        found = GenerationMeasurement.from_dict(document)
        if job.backend == OURS and ours is None:
            ours = found
        differences = [] if ours is None else differences_from(ours, found, work, job)
        lines.append(
            make_line(
                work.name,
                found,
                ours,
                differences,
                backend=job.backend,
                speculate=job.speculate if job.backend == OURS else None,
                batch_size=job.batch_size,
                stored=stored,
            )
        )
    return lines


def find_works(arguments: argparse.Namespace) -> list[GenerationWork]:
    """From a file, or from lm-eval."""
    if arguments.requests:
        works = [GenerationWork.from_json(arguments.requests.read_text(encoding="utf-8"))]
    else:
        recipes = {name: GENERATION_RECIPES[name] for name in arguments.work}
        works = list(build_generation_works(recipes, reference_folder()).values())
    return [work.first(arguments.limit) for work in works]


def ways_to_speculate(text: str) -> list[str]:
    """A type for argparse: a comma list of `off`, `auto` and numbers."""
    ways = [way for way in text.split(",") if way]
    if not ways or not all(way in {"off", "auto"} or way.isdecimal() for way in ways):
        raise argparse.ArgumentTypeError(f"expected a list of off, auto and numbers; got {text!r}")
    return ways


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    recipes, backends = list(GENERATION_RECIPES), list(GENERATION_BACKENDS)
    add("--model", required=True, help="a model directory that mlx-lm and transformers read")
    add("--work", type=names_among(recipes), default=recipes, help=f"of {','.join(recipes)} (default: all)")
    add("--requests", type=Path, metavar="FILE", help="continue these prompts instead")
    add(
        "--backends",
        type=names_among(backends),
        default=backends,
        help=f"of {','.join(backends)} (default: all)",
    )
    add("--limit", type=int, help="questions of each work (default: all)")
    add("--batch_size", default="auto", help="of ours")
    add("--peer_batch_size", type=int, default=8, help="of the peers (default: %(default)s)")
    add(
        "--speculate",
        type=ways_to_speculate,
        default=["off"],
        metavar="LIST",
        help="of off, auto and numbers: a line of ours for each (default: off)",
    )
    add("--threads", type=int, default=2, help="of every backend (default: %(default)s)")
    add("--repeat", type=int, default=1, help="take the median of so many runs (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the figures here too")
    add("--answers", type=Path, metavar="DIR", help="keep measurements and answers here")
    add("--reuse", action="store_true", help="take a peer's stored measurement from --answers where it fits")
    return parser.parse_args()


def print_report(lines: Sequence[Line], heading: str) -> None:
    print(heading)
    print(table(lines))
    if any(line.backend == "hf" for line in lines):
        print(
            "\nhf: torch's kernels on the CPU. On Linux they take a half to a quarter of MLX's time for a token."
        )
    if len({line.speculate for line in lines if line.backend == OURS}) > 1:
        print("\nours: drafts, verified several tokens in a step")
        print(speculation_table(lines))
    if parted := differences_text(lines):
        print(f"\nfirst differences from ours\n{parted}")


def main() -> None:
    arguments = parse_arguments()
    from mlx_eval.models.runtime import device

    lines: list[Line] = []
    for work in find_works(arguments):
        found = compare(work, arguments, device().name)
        print(table(found), file=sys.stderr, flush=True)
        lines += found
    print_report(
        lines,
        f"{device().name}, {arguments.threads} threads, float32, BLAS {device().blas}; median of {arguments.repeat}",
    )
    if arguments.json:
        document = [{**asdict(line), "num_unexplained": line.num_unexplained} for line in lines]
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if any(line.num_unexplained for line in lines):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
