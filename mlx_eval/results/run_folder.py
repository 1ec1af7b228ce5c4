"""The folder of a run and its `run.json`. Knows files and numbers, no model."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mlx_eval.errors import OutputError

RUN_FILE: Final = "run.json"


def open_folder(path: str | Path, option: str = "--output_path") -> Path:
    """Make the folder if need be and see that it can be written to, before anything is computed.

    Args:
        path: the folder.
        option: where it was given, for the error.

    Raises:
        OutputError: it cannot.
    """
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"mlx_eval")
    except OSError as error:
        raise OutputError(
            f"cannot write to {path}: {error.strerror or error}; give another {option}"
        ) from error
    return folder


def write_run_file(folder: Path, record: Mapping[str, Any]) -> Path:
    """Write `run.json`, whole or not at all.

    Raises:
        OutputError: it cannot be written.
    """
    target = folder / RUN_FILE
    partial = folder / f".{RUN_FILE}.{os.getpid()}"
    try:
        partial.write_text(
            json.dumps(record, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8"
        )
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OutputError(f"cannot write {target}: {error.strerror or error}") from error
    return target
