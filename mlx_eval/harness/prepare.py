"""Tasks with their data at hand, before any model is loaded: what cannot be had is found first.

Knows lm-eval's task manager and the ways in which a task's data, code or packages can be missing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_eval.errors import MlxEvalError, TaskError
from mlx_eval.harness.gen_kwargs import parse_gen_kwargs
from mlx_eval.harness.quiet import quiet_harness
from mlx_eval.harness.statistics import Stopwatch
from mlx_eval.harness.tasks import import_task_manager, local_data, resolve_tasks, task_manager

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager


class PreparedTasks:
    """lm-eval's task objects for one evaluation, in the place of a task manager.

    lm-eval keeps an evaluation's requests in them, so they serve once.
    """

    def __init__(self, manager: TaskManager, names: Sequence[str], loaded: dict[str, Any]) -> None:
        self._manager = manager
        self._loaded = loaded
        self.names = list(names)
        """As they are given to lm-eval."""

    def load(self, _names: Any) -> dict[str, Any]:
        """What lm-eval's evaluator asks of a task manager."""
        return self._loaded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def listed(self) -> str:
        """The names, for a message."""
        return _listed(self.names)

    def check_generation(self, gen_kwargs: str | Mapping[str, Any] | None) -> None:
        """Refuse generation arguments that are not supported, before anything is computed.

        Args:
            gen_kwargs: laid over those of every task, as lm-eval does.

        Raises:
            UnknownNameError, InvalidOptionError: an argument that is not known or makes no sense.
        """
        from lm_eval.utils import simple_parse_args_string

        over = simple_parse_args_string(gen_kwargs) if isinstance(gen_kwargs, str) else dict(gen_kwargs or {})
        parse_gen_kwargs(over, default_max_tokens=1, seed=0)
        for task in self._loaded["tasks"].values():
            if task.get_config("output_type") == "generate_until":
                own = task.get_config("generation_kwargs") or {}
                parse_gen_kwargs({**own, **over}, default_max_tokens=1, seed=0)


def prepare_tasks(
    names: str | Sequence[str],
    *,
    include_path: str | Path | Sequence[str | Path] | None = None,
    manager: TaskManager | None = None,
    confirm_run_unsafe_code: bool = False,
    metadata: dict[str, Any] | None = None,
    stopwatch: Stopwatch | None = None,
) -> PreparedTasks:
    """Find tasks and load their data.

    Args:
        names: tasks, groups, tags, patterns or YAML files; one text may name several, with commas.
        include_path: folders of further task files.
        manager: lm-eval's task manager, when there is one already.
        confirm_run_unsafe_code: whether code that a model wrote may be run.
        metadata: passed to every task, as in lm-eval.
        stopwatch: gets the stages `imports`, `index` and `data`.

    Raises:
        UnknownNameError: there is no such task.
        TaskError: its data cannot be had, it needs a package that is not installed, or it runs code that
            a model wrote and this was not confirmed.
    """
    stopwatch = stopwatch or Stopwatch()
    with stopwatch.timed("imports"):
        import_task_manager()
        import lm_eval.evaluator  # noqa: F401  (most of it is there by now)
    with stopwatch.timed("index"):
        if manager is None:
            manager = task_manager(include_path, metadata=metadata)
        resolved = resolve_tasks(names, manager)
    if confirm_run_unsafe_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # the metric asks for this second confirmation
    with stopwatch.timed("data"):
        loaded = _load(resolved, manager)
    unsafe = [name for name, task in loaded["tasks"].items() if getattr(task, "UNSAFE_CODE", False)]
    if unsafe and not confirm_run_unsafe_code:
        raise TaskError(
            f"{_listed(unsafe)} runs code that the model wrote; if you accept that, add --confirm_run_unsafe_code"
        )
    return PreparedTasks(manager, resolved, loaded)


def _load(names: list[str], manager: TaskManager) -> dict[str, Any]:
    """lm-eval's task objects with their data.

    Raises:
        TaskError: something of it cannot be had.
    """
    from datasets.exceptions import DatasetsError

    try:
        with quiet_harness(), _own_cache(local_data(names, manager)):
            loaded: dict[str, Any] = manager.load(names)
    except ImportError as error:
        raise TaskError(
            f"{_listed(names)} needs a package that is not installed ({error}): pip install 'mlx-eval[tasks]'"
        ) from error
    except OSError as error:
        raise TaskError(
            f"the data of {_listed(names)} cannot be had: {first_line(error)}; "
            "without network, point a task file at local data (docs/guides/evaluation.md); "
            "HF_HUB_OFFLINE=1 spares the retries"
        ) from error
    except DatasetsError as error:
        # its own text says no more than that it happened while reading
        raise TaskError(
            f"the data of {_listed(names)} cannot be read: {first_line(error.__cause__ or error)}"
        ) from error
    except Exception as error:  # a task's file names Python code, which may raise anything
        if isinstance(error, MlxEvalError):
            raise
        raise TaskError(f"{_listed(names)} cannot be loaded: {first_line(error)}") from error
    return loaded


@contextmanager
def _own_cache(folders: Sequence[Path]) -> Iterator[None]:
    """Keep what `datasets` makes of local folders apart by their contents.

    Its cache tells two folders apart by their name and configuration only, and would give the data of
    another one, or of yesterday.
    """
    if not folders:
        yield
        return
    import datasets

    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                state = path.stat()
                digest.update(f"{path} {state.st_size} {state.st_mtime_ns}\n".encode())
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = Path(before) / "local" / digest.hexdigest()[:16]
    try:
        yield
    finally:
        datasets.config.HF_DATASETS_CACHE = before


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"task{'s' if len(names) > 1 else ''} {shown}{rest}"


def first_line(error: BaseException) -> str:
    """What an error says, on one line; its type where it says nothing."""
    if isinstance(error, KeyError):
        return f"there is no {error}"
    text = " ".join(str(error).replace("\\n", " ").split())
    return text if text and text != "None" else type(error).__name__
