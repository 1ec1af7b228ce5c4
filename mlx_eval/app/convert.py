"""From any model source to a directory. Knows the reader and the writer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_eval.models.load import load_model
from mlx_eval.models.save import check_destination, save_directory


def convert(source: str, destination: str, loading: Mapping[str, Any]) -> Path:
    """Load `source` and write it to `destination`.

    Raises:
        ModelError: `source` cannot be loaded, or not be written for the programs that read directories.
        OutputError: `destination` exists and is not empty, or cannot be written.
    """
    target = check_destination(Path(destination))
    loaded = load_model(source, **loading)
    save_directory(loaded, target)
    return target
