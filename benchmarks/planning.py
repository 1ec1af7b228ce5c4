"""What planning costs at the size of all of MMLU: 56,000 requests of 700 tokens behind 57 headers.

    python benchmarks/planning.py

Requests are random ids: each subject has a header, each question a text of its own behind it, of some 700 tokens
together, and four continuations. Those of MMLU have one token, so that a question's requests feed the model the
same; `--continuation 4` makes every request a row of its own. Time and memory are of two runs, as tracing memory
takes time of its own. Memory is the most that Python and numpy held above the requests themselves while the plan
was made. No model, no mlx.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc

import numpy as np

from mlx_eval.engine.batches import Limits
from mlx_eval.engine.plan import plan_scoring
from mlx_eval.records import ScoringRequest

VOCABULARY = 50_000


def make_requests(arguments: argparse.Namespace) -> list[ScoringRequest]:
    """Questions of all subjects in turn; a header takes three quarters of a request, give or take.

    The requests of one question hold one context array, as texts that are encoded once do.
    """
    random = np.random.default_rng(0)

    def ids(low: float, high: float) -> np.ndarray:
        size = random.integers(int(low * arguments.tokens), int(high * arguments.tokens) + 1)
        return random.integers(0, VOCABULARY, size, dtype=np.int32)

    headers = [ids(0.6, 0.9) for _ in range(arguments.subjects)]
    made = []
    for question in range(arguments.questions):
        context = np.concatenate([headers[question % arguments.subjects], ids(0.05, 0.45)])
        for _ in range(arguments.choices):
            own = context.copy() if arguments.own_arrays else context
            continuation = random.integers(0, VOCABULARY, arguments.continuation, dtype=np.int32)
            made.append(ScoringRequest(own, continuation))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--subjects", type=int, default=57)
    parser.add_argument("--questions", type=int, default=14_000)
    parser.add_argument("--choices", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=700)
    parser.add_argument("--continuation", type=int, default=1, help="tokens of each")
    parser.add_argument("--rows", type=int, default=64, help="ceiling on the rows of a batch")
    parser.add_argument(
        "--own_arrays", action="store_true", help="a context array of its own for each request"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    requests = make_requests(arguments)
    limits = Limits(max_rows=arguments.rows)
    wall, cpu = time.perf_counter(), time.process_time()
    plan = plan_scoring(requests, limits)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    figures = {
        "requests": len(requests),
        "naive tokens": plan.naive_tokens,
        "unique tokens": plan.unique_tokens,
        "planned tokens": plan.planned_tokens,
        "padding": plan.padding,
        "batches": len(plan.batches),
        "wall s": round(wall, 2),
        "CPU s": round(cpu, 2),
    }
    del plan
    tracemalloc.start()
    again = plan_scoring(requests, limits)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(again.batches) == figures["batches"]
    arrays = {id(request.context_ids): request.context_ids.nbytes for request in requests}
    figures["requests' contexts MB"] = round(sum(arrays.values()) / 1e6, 1)
    figures["peak above the requests MB"] = round(peak / 1e6, 1)
    figures["the plan itself MB"] = round(kept / 1e6, 1)
    if arguments.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:28}{value:>16,}")


if __name__ == "__main__":
    main()
