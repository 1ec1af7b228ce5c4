"""Where the real model and the reference answers are found."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

REFERENCE = "MLX_EVAL_REFERENCE"
MODEL = "MLX_EVAL_REAL_MODEL"
CACHE = Path(__file__).parents[2] / ".cache" / "real-model"


@pytest.fixture(scope="session")
def real_model_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct."""
    if os.environ.get(MODEL):
        return Path(os.environ[MODEL])
    found = sorted(CACHE.rglob("SmolLM2*.gguf"))
    if not found:
        pytest.skip(f"no real model: run `make real-model` or set {MODEL}")
    return found[0]


@pytest.fixture(scope="session")
def reference() -> Path:
    """The folder of reference rows and answers."""
    folder = os.environ.get(REFERENCE)
    if not folder:
        pytest.skip(f"no reference answers: set {REFERENCE} to their folder")
    return Path(folder)


@pytest.fixture(scope="session")
def golden(reference: Path) -> Any:
    """Reads the reference answers of a task."""
    return lambda name: json.loads((reference / "golden" / f"{name}.json").read_text(encoding="utf-8"))
