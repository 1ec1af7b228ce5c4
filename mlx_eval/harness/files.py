"""lm-eval's own result files in a folder of our choosing. Knows lm-eval's writer, which hides its errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mlx_eval.errors import OutputError

STAGING: Final = ".writing"
"""lm-eval writes into a folder named after the model; its files move up from there when they are whole."""


def new_tracker(directory: Path) -> Any:
    """lm-eval's tracker, to be given to its evaluator and then to `write_results`."""
    from lm_eval.loggers import EvaluationTracker

    return EvaluationTracker(output_path=str(directory / STAGING))


def write_results(
    tracker: Any, results: Mapping[str, Any], directory: Path, *, log_samples: bool
) -> list[Path]:
    """Write `results_<time>.json` and, for each task, `samples_<task>_<time>.jsonl` into `directory`.

    Returns:
        The files, the results first.

    Raises:
        OutputError: a file could not be written whole; none is left half-written.
    """
    results = dict(results)
    samples: dict[str, Any] = results.pop("samples", None) or {}
    staging = directory / STAGING
    try:
        tracker.save_results_aggregated(results=results, samples=samples or None)
        if log_samples:
            for task, rows in samples.items():
                tracker.save_results_samples(task_name=task, samples=rows)
        written = sorted(staging.rglob("*.json*"), key=lambda path: not path.name.startswith("results_"))
        _check(written, {task: len(rows) for task, rows in samples.items()} if log_samples else {}, tracker)
        return [Path(shutil.move(path, directory / path.name)) for path in written]
    except (OSError, ValueError) as error:
        raise OutputError(f"the results could not be written to {directory}: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _check(written: list[Path], num_samples: Mapping[str, int], tracker: Any) -> None:
    """See that lm-eval's writer, which only logs its errors, has written everything.

    Raises:
        ValueError: a file is missing or cut short.
    """
    if len(written) != 1 + len(num_samples):
        raise ValueError(f"{len(written)} of {1 + len(num_samples)} files were written")
    json.loads(written[0].read_text(encoding="utf-8"))
    expected = {f"samples_{task}_{tracker.date_id}.jsonl": count for task, count in num_samples.items()}
    for path in written[1:]:
        with path.open(encoding="utf-8") as file:
            lines = sum(1 for _ in file)
        if lines != expected.get(path.name):
            raise ValueError(f"{path.name} holds {lines} of {expected.get(path.name)} rows")
