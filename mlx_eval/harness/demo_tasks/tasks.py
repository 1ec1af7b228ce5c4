"""The demo tasks' data: JSON lines beside this file, as lm-eval wants them. Knows no model.

lm-eval loads this file by its path, from the task files' `!function`; nobody imports it. A loader is
called with the task's metadata (its version, and whatever the caller of lm-eval adds), which it ignores.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def load_choice(**_metadata: object) -> dict[str, Any]:
    """Stories with a question and four choices; splits `train` (for few-shot) and `test`."""
    return {split: _read(f"choice_{split}") for split in ("train", "test")}


def load_texts(**_metadata: object) -> dict[str, Any]:
    """Stories to predict; split `test`."""
    return {"test": _read("texts_test")}


def load_sums(**_metadata: object) -> dict[str, Any]:
    """Sums with their results; splits `train` (for few-shot) and `test`."""
    return {split: _read(f"sums_{split}") for split in ("train", "test")}


def _read(name: str) -> Any:
    """A `datasets.Dataset` of the rows in one file."""
    from datasets import Dataset

    lines = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return Dataset.from_list([json.loads(line) for line in lines])
