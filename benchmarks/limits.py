"""How near does scoring come to what the processor can do, and where does the rest go?

    MLX_EVAL_REFERENCE=DIR python benchmarks/limits.py --model ./model --work mmlu_anatomy
    python benchmarks/limits.py --model ./model --requests requests.json

The limit is the operations that the unique tokens need, at the rate of the model's own linear layers over a full
batch, measured in the same run. Scoring is run whole; then each part of its forwards is run by itself on the plan's
own shapes, and what a part takes beyond its operations at that rate has a line. CPU seconds, and one thread unless
told otherwise: they add up then, while a second thread of the BLAS waits spinning for the others and is counted too.
The last line is what the parts do not explain; the status is 1 where that is more than a fifth of the whole.
Models of llama's form only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tabulate import tabulate

from benchmarks.side_by_side.works import RECIPES, Work, build_works, reference_folder

if TYPE_CHECKING:
    from benchmarks.side_by_side.parts import Sizes

MAY_BE_UNEXPLAINED: Final = 0.2


@dataclass(frozen=True, slots=True)
class Counts:
    """What a plan has to compute."""

    unique_tokens: int
    planned_tokens: int
    padding: int
    pairs: int
    """Of a planned token and one that it sees, itself included."""
    positions: int
    """To be predicted."""


@dataclass(frozen=True, slots=True)
class Taken:
    """CPU seconds, measured."""

    whole: float
    encoding: float
    planning: float
    python: float
    """Of the thread that builds the graphs and reads the results, while batches run."""
    linear: float
    attention: float
    elementwise: dict[str, float]
    """By what it is."""
    head: float
    normaliser: float
    copies: float


def ledger(sizes: Sizes, counts: Counts, rate: float, taken: Taken) -> list[tuple[str, float]]:
    """From the limit to the whole: what each cause adds, in CPU seconds. The lines add up to the whole.

    Args:
        sizes: of the model.
        counts: of the plan.
        rate: FLOPs a second.
        taken: what was measured.
    """
    again = counts.planned_tokens / counts.unique_tokens - 1
    attention = sizes.attention_flops(counts.pairs) / rate
    head = sizes.head_flops(counts.positions) / rate
    unique = sizes.linear_flops(counts.unique_tokens) / rate
    padding = sizes.linear_flops(counts.padding) / rate
    limit = unique + attention / (1 + again) + head
    lines = [
        ("the limit: unique tokens at the best rate", limit),
        ("tokens computed again", again * unique + attention - attention / (1 + again)),
        ("padding, in the linear layers", padding),
        ("linear layers: smaller products", taken.linear - (1 + again) * unique - padding),
        ("attention: masked halves, softmax, padding", taken.attention - attention),
        ("head: smaller products", taken.head - head),
        *taken.elementwise.items(),
        ("normalising logits", taken.normaliser),
        ("copying KV to rows", taken.copies),
        ("encoding texts", taken.encoding),
        ("planning", taken.planning),
        ("Python while batches run", taken.python),
    ]
    return [*lines, ("not explained", taken.whole - sum(value for _, value in lines))]


def measure(work: Work, arguments: argparse.Namespace) -> tuple[Sizes, Counts, float, Taken]:
    """Score whole, then by parts, in this process."""
    from benchmarks.side_by_side.backends import Ours, stopwatch, warm_up
    from benchmarks.side_by_side.bare import forward_shapes
    from benchmarks.side_by_side.parts import Parts, num_pairs

    backend = Ours(arguments.model, arguments.batch_size)
    parts = Parts(backend.model, arguments.layers)
    warm_up(backend, work)
    main_thread = time.thread_time()
    with stopwatch() as whole:
        backend.score(work)
    main_thread = time.thread_time() - main_thread
    plan, requests = backend.scorer.plan_made, backend.scorer.requests
    planning, running = (backend.scorer.seconds[name].cpu for name in ("plan", "run"))
    shapes = list(forward_shapes(plan, requests))
    counts = Counts(
        unique_tokens=plan.unique_tokens,
        planned_tokens=plan.planned_tokens,
        padding=plan.padding,
        pairs=num_pairs(plan),
        positions=sum(shape.num_logits for shape in shapes),
    )
    encoding = whole().cpu - planning - running
    rate = parts.best_rate()
    head, normaliser = parts.head(shapes)
    taken = Taken(
        whole=whole().cpu,
        encoding=encoding,
        planning=planning,
        python=max(0.0, main_thread - encoding - planning),
        linear=parts.linear(shapes),
        attention=parts.attention(shapes),
        elementwise=parts.elementwise(shapes),
        head=head,
        normaliser=normaliser,
        copies=parts.copies(shapes),
    )
    return parts.sizes, counts, max(rate, parts.best_rate()), taken


def rows_of(lines: Sequence[tuple[str, float]], whole: float) -> list[list[Any]]:
    return [[name, f"{value:.2f}", f"{value / whole:.1%}"] for name, value in lines]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="a model directory")
    add("--work", choices=RECIPES, default="mmlu_anatomy")
    add("--requests", type=Path, metavar="FILE", help="score these requests instead, as for scoring.py")
    add("--batch_size", default="auto")
    add("--layers", type=int, default=3, help="layers whose parts are run (default: %(default)s)")
    add("--threads", type=int, default=1, help="of the BLAS (default: %(default)s)")
    add("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    os.environ["OPENBLAS_NUM_THREADS"] = str(arguments.threads)  # read when the BLAS is loaded
    if arguments.requests:
        work = Work.from_json(arguments.requests.read_text(encoding="utf-8"))
    else:
        work = build_works({arguments.work: RECIPES[arguments.work]}, reference_folder())[arguments.work]
    if "mlx.core" in sys.modules:
        raise SystemExit("mlx was imported before the number of threads was set")
    sizes, counts, rate, taken = measure(work, arguments)
    lines = ledger(sizes, counts, rate, taken)
    if arguments.json:
        print(
            json.dumps(
                {"work": work.name, "gflops": rate / 1e9, "share": lines[0][1] / taken.whole, "lines": lines}
            )
        )
    else:
        print(
            f"{work.name}: {counts.unique_tokens:,} unique tokens, {counts.planned_tokens:,} planned, "
            f"{counts.padding:,} padding, {counts.positions:,} positions predicted; "
            f"{rate / 1e9:.1f} GFLOP/s, {arguments.threads} thread(s)"
        )
        print(tabulate(rows_of([*lines, ("the whole", taken.whole)], taken.whole), ["", "CPU s", "share"]))
    if abs(lines[-1][1]) > MAY_BE_UNEXPLAINED * taken.whole:
        print("the parts do not add up to the whole: was the machine busy?", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
