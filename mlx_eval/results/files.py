"""Results files of lm-eval: where they are and whether they are any. Knows nothing of scores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_eval.errors import InputError


def read_results(path: str | Path) -> Mapping[str, Any]:
    """The results in a file that lm-eval wrote, or in the newest one in a folder or below it.

    Raises:
        InputError: there is none, it is empty, not JSON or no results of lm-eval.
    """
    file = find_results(path)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"the results file {file} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"the results file {file} is not UTF-8 text") from error
    if not text.strip():
        raise InputError(f"the results file {file} is empty: expected a results_*.json of lm-eval")
    try:
        results = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"the results file {file} is not JSON: {error}") from error
    return check_results(results, str(file))


def find_results(path: str | Path) -> Path:
    """The results file that `path` means: itself, or the newest `results_*.json` in or below the folder.

    lm-eval writes the time into the name; that decides, and the file's own time where names are equal.

    Raises:
        InputError: there is none.
    """
    path = Path(path)
    if not path.is_dir():
        if not path.exists():
            raise InputError(f"there is no file or folder {path}: expected results of lm-eval")
        return path
    found = [file for file in path.rglob("results_*.json") if file.is_file()]
    if not found:
        raise InputError(f"the folder {path} holds no results_*.json, and neither do the folders below it")
    return max(found, key=lambda file: (file.name, file.stat().st_mtime))


def check_results(results: object, what: str) -> Mapping[str, Any]:
    """`results` as it is, if it looks like what lm-eval gives; `what` names it in the error.

    Raises:
        InputError: it does not.
    """
    if not isinstance(results, Mapping) or not isinstance(results.get("results"), Mapping):
        raise InputError(f"{what} holds no results of lm-eval: expected an object with an entry 'results'")
    return results
