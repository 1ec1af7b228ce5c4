"""How long `run` takes until the first batch is scored, with an empty cache of task files and with a full one.

    python benchmarks/startup.py
    python benchmarks/startup.py --model ./SmolLM2-135M-Instruct --tasks arc_easy --repeats 5

Runs the whole program, with an empty cache and with a full one in turn, and prints the medians of run.json's
stages. `program` is the wall time of the whole command and `CPU` its processor time, both taken from outside; the
last line is the time of lm-eval's own `TaskManager()`, which both stand in the place of.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mlx_eval.cache import CACHE_VARIABLE

LM_EVALS_OWN = """
import time
import lm_eval.tasks
started = time.perf_counter()
lm_eval.tasks.TaskManager()
print(time.perf_counter() - started)
"""


def measure(words: list[str], cache: Path) -> dict[str, float]:
    """Seconds of each stage of one run."""
    with tempfile.TemporaryDirectory(prefix="mlx_eval_startup_") as output:
        command = [sys.executable, "-m", "mlx_eval", "run", *words, "--output_path", output]
        started, cpu_started = time.perf_counter(), cpu_of_children()
        environment = {**os.environ, CACHE_VARIABLE: str(cache)}
        finished = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if finished.returncode:
            sys.exit(finished.stderr)
        outside = {"program": time.perf_counter() - started, "CPU": cpu_of_children() - cpu_started}
        record: dict[str, Any] = json.loads((Path(output) / "run.json").read_text(encoding="utf-8"))
    return {**record["seconds"], **outside}


def cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tasks", default="demo_choice")
    parser.add_argument("--include_path", action="append", default=[])
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    words = [arguments.model, "--tasks", arguments.tasks, "--limit", str(arguments.limit)]
    for folder in arguments.include_path:
        words += ["--include_path", folder]
    taken: dict[str, list[dict[str, float]]] = {"empty": [], "full": []}
    own: list[float] = []
    with tempfile.TemporaryDirectory(prefix="mlx_eval_cache_") as full:
        measure(words, Path(full))  # fills it, and brings the files into memory
        for _ in range(arguments.repeats):
            with tempfile.TemporaryDirectory(prefix="mlx_eval_cache_") as empty:
                taken["empty"].append(measure(words, Path(empty)))
            taken["full"].append(measure(words, Path(full)))
            own.append(float(subprocess.check_output([sys.executable, "-c", LM_EVALS_OWN], text=True)))
    print(f"{'stage':14}{'empty':>8}{'full':>8}   median seconds of {arguments.repeats}")
    for stage in taken["full"][0]:
        medians = [statistics.median(run.get(stage, 0.0) for run in runs) for runs in taken.values()]
        print(f"{stage:14}{medians[0]:8.2f}{medians[1]:8.2f}")
    print(f"lm-eval's own index {statistics.median(own):.2f} s")


if __name__ == "__main__":
    main()
