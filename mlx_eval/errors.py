"""The exceptions that mlx_eval raises on purpose. Knows nothing of the rest of the package.

    MlxEvalError
    ├── ModelError              a model that cannot be loaded or converted
    ├── UnknownNameError        a task, preset, option or architecture that does not exist (also a ValueError)
    ├── InvalidOptionError      an option whose value makes no sense (also a ValueError)
    ├── TaskError               a task that exists but cannot be run (its data, its metric's packages)
    ├── OutOfMemoryError        a model and one row of its work do not fit together
    ├── DeviceError             the device computes something else than it should
    ├── InputError              a text or results file that cannot be read
    └── OutputError             a place that cannot be written
    MissingDependencyError      an optional package is not installed (an ImportError)

Each message says in one line what was given, what was expected and what to do. The command line prints
that line and exits with status 1; from Python the same exception is raised.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MlxEvalError(Exception):
    """Base of every error that mlx_eval raises on purpose."""


class ModelError(MlxEvalError):
    """A model cannot be loaded or converted."""


class UnknownNameError(MlxEvalError, ValueError):
    """A name is none of those known; the message gives the nearest."""


class InvalidOptionError(MlxEvalError, ValueError):
    """An option's value makes no sense."""


class TaskError(MlxEvalError):
    """A task exists but cannot be run here."""


class OutOfMemoryError(MlxEvalError):
    """The device's memory does not hold the model and one row of what it is to compute."""


class DeviceError(MlxEvalError):
    """The device does not compute what it should."""


class InputError(MlxEvalError):
    """A text or results file cannot be read or does not hold what it should."""


class OutputError(MlxEvalError):
    """A place to write to cannot be written."""


class MissingDependencyError(ImportError):
    """An optional package is needed and not installed."""

    def __init__(self, package: str, purpose: str, extra: str) -> None:
        super().__init__(
            f"{purpose} needs {package}, which is not installed: pip install 'mlx-eval[{extra}]'",
            name=package,
        )


def nearest_names(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The names in `known` that look most like `name`, best first."""
    return difflib.get_close_matches(name, list(known), n=count, cutoff=0.5)


def unknown_name(kind: str, name: str, known: Iterable[str], hint: str = "") -> UnknownNameError:
    """An error that says that there is no `kind` called `name`, and which known names are near it.

    `hint` says where the known names can be seen; it is added when given.
    """
    known = sorted(known)
    near = nearest_names(name, known)
    if near:
        help_text = f"did you mean {' or '.join(near)}?"
    elif len(known) <= 20:
        help_text = f"known: {', '.join(known)}"
    else:
        help_text = ""
    parts = [f"unknown {kind} {name!r}", help_text, hint]
    return UnknownNameError("; ".join(part for part in parts if part))
