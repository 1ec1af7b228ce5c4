"""lm-eval's own result files in a folder of our choosing. Knows lm-eval's writer, which hides its errors."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mlx_eval.errors import OutputError

STAGING: Final = ".writing-"
"""lm-eval writes into a folder named after the model; its files move up from there when they are whole."""


def new_tracker(directory: Path) -> Any:
    """lm-eval's tracker, to be given to its evaluator and then to `write_results`.

    Each writes to a place of its own, so that runs into one folder and remains of a killed one do no harm.
    """
    from lm_eval.loggers import EvaluationTracker

    return EvaluationTracker(output_path=str(directory / f"{STAGING}{os.getpid()}-{secrets.token_hex(4)}"))


def write_results(
    tracker: Any, results: Mapping[str, Any], directory: Path, *, log_samples: bool
) -> list[Path]:
    """Write `results_<time>.json` and, for each task, `samples_<task>_<time>.jsonl` into `directory`.

    Returns:
        The files, the results first.

    Raises:
        OutputError: a file could not be written whole. It is not left half-written, and those that are
            whole stay.
    """
    results = dict(results)
    samples: dict[str, Any] = results.pop("samples", None) or {}
    staging = Path(tracker.output_path)
    expected: dict[str, int | None] = {}
    moved: list[Path] = []
    try:
        tracker.save_results_aggregated(results=results, samples=samples or None)
        expected[f"results_{tracker.date_id}.json"] = None
        for task, rows in samples.items() if log_samples else ():
            tracker.save_results_samples(task_name=task, samples=rows)
            expected[f"samples_{task}_{tracker.date_id}.jsonl"] = len(rows)
        written = {path.name: path for path in staging.rglob("*.json*")}
        broken = [
            name
            for name, rows in expected.items()
            if name not in written or not _is_whole(written[name], rows)
        ]
        for name in expected:
            if name not in broken:
                moved.append(Path(shutil.move(written[name], directory / name)))
        if broken:
            raise OutputError(f"{', '.join(broken)} could not be written to {directory}: is the disk full?")
    except OSError as error:
        raise OutputError(
            f"the results could not be written to {directory}: {error.strerror or error}"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return moved


def _is_whole(path: Path, num_rows: int | None) -> bool:
    """Whether a file holds what it should: lm-eval's writer only logs its errors.

    Args:
        path: a file of JSON lines, or of one JSON value where `num_rows` is None.
        num_rows: lines that it must have.
    """
    try:
        if num_rows is None:
            json.loads(path.read_text(encoding="utf-8"))
            return True
        with path.open(encoding="utf-8") as file:
            return sum(line.endswith("\n") for line in file) == num_rows
    except ValueError:
        return False
