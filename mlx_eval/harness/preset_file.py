"""Presets from a TOML file of the user's. Knows the file's layout; what a value may be, presets.py knows.

[presets.my_mmlu]
task = ["mmlu_anatomy", "mmlu_astronomy"]
num_fewshot = 5
limit = 100

[presets.my_mmlu.extra]
bootstrap_iters = 0
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Final

from mlx_eval.errors import InputError, InvalidOptionError, UnknownNameError, unknown_name
from mlx_eval.harness.presets import EXTRA_ARGUMENTS, FIELD_NAMES, EvalPreset

_UNSAFE: Final = "confirm_run_unsafe_code"


def read_preset_file(path: str | Path) -> dict[str, EvalPreset]:
    """The presets in the TOML file at `path`, by name.

    Each table `[presets.NAME]` has the fields of `EvalPreset` as its keys, and at least `task`.

    Raises:
        InputError: the file cannot be read, is not TOML or holds no presets.
        UnknownNameError: a key that a preset does not have; the message gives the nearest.
        InvalidOptionError: a value of a wrong type or out of range; the message names file, preset
            and key.
    """
    path = Path(path)
    document = _read_toml(path)
    for key in document:
        if key != "presets":
            error = unknown_name("table", key, ["presets"])
            raise UnknownNameError(f"{path}: {error}; presets are written as [presets.NAME]")
    tables = document.get("presets")
    if not isinstance(tables, dict) or not tables:
        raise InputError(f"{path} holds no presets: expected at least one table [presets.NAME] with a task")
    return {name: _preset(path, name, table) for name, table in tables.items()}


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise InputError(f"the preset file {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"the preset file {path} is not UTF-8 text") from error
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"the preset file {path} is not valid TOML: {error}") from error


def _preset(path: Path, name: str, table: object) -> EvalPreset:
    if not isinstance(table, dict):
        raise InvalidOptionError(
            f"{path}: preset {name!r} must be a table [presets.{name}] with a task, not {table!r}"
        )
    for key in table:
        if key not in FIELD_NAMES:
            in_extra = f"it goes into [presets.{name}.extra]" if key in EXTRA_ARGUMENTS else ""
            error = unknown_name("key", key, [] if in_extra else FIELD_NAMES, in_extra)
            raise UnknownNameError(f"{path}: preset {name!r}: {error}")
    if table.get("name", name) != name:
        raise InvalidOptionError(
            f"{path}: preset {name!r}: name must be left out or equal, not {table['name']!r}"
        )
    if "task" not in table:
        raise InvalidOptionError(f"{path}: preset {name!r}: task is missing; it names what lm-eval is to run")
    if isinstance(table.get("extra"), dict) and _UNSAFE in table["extra"]:
        # A file may come from somebody else: leave to run generated code is given by hand, each time.
        raise InvalidOptionError(
            f"{path}: preset {name!r}: {_UNSAFE} cannot be given in a file; add --{_UNSAFE} to the command"
        )
    try:
        return EvalPreset(**{**table, "name": name})
    except (InvalidOptionError, UnknownNameError) as error:
        raise type(error)(f"{path}: {error}") from error
