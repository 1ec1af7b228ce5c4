"""Task names: lm-eval's index with the demo tasks and the user's own, and what it says of each task.

Knows lm-eval's task manager and its YAML files; downloads no data, runs nothing and knows no preset.
"""

from __future__ import annotations

import fnmatch
import glob
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mlx_eval.errors import InputError, InvalidOptionError, MissingDependencyError, TaskError, unknown_name

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

logger = logging.getLogger(__name__)

DEMO_TASKS: Final = Path(__file__).parent / "demo_tasks"
"""The folder of the tasks that come with the package."""

LIST_HINT: Final = "`python -m mlx_eval tasks WORD` searches them"


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """What lm-eval's files say of one name."""

    name: str
    kind: str
    """`task`, `group` (scores of its own, averaged over its tasks) or `tag` (a name for several tasks)."""
    output_type: str | None
    """`multiple_choice`, `loglikelihood`, `loglikelihood_rolling` or `generate_until`; None for groups
    and tags, and for tasks that are Python code."""
    num_fewshot: int | None
    """The shots that the file asks for; None leaves them to the caller. A task's 0 cannot be changed."""
    metrics: tuple[str, ...]
    """Their names; for a group those that it averages."""
    members: tuple[str, ...] = ()
    """What a group or tag directly holds."""


def task_manager(
    include_path: str | Path | Sequence[str | Path] | None = None,
    *,
    include_defaults: bool = True,
    metadata: dict[str, Any] | None = None,
) -> TaskManager:
    """lm-eval's task manager with the demo tasks and those below the folders in `include_path`.

    Reading lm-eval's own 14,000 task files takes seconds the first time, less than half a second once
    they are in the cache; without `include_defaults` they are left out. `metadata` goes to every task,
    as in lm-eval.

    Raises:
        MissingDependencyError: lm-eval is not installed.
        InvalidOptionError: an include path is not a folder.
    """
    folders = [Path(folder).expanduser() for folder in _as_list(include_path)]
    for folder in folders:
        if not folder.is_dir():
            raise InvalidOptionError(f"include_path must be a folder of task files; {folder} is none")
    manager_class = import_task_manager()
    from mlx_eval.harness.index import fill, index_folders, own_folder

    own = [own_folder()] if include_defaults else []
    files = index_folders([*own, DEMO_TASKS, *folders])
    for path, error in files.broken.items():
        if any(path.is_relative_to(folder) for folder in folders):
            logger.warning("left out: %s", _unreadable(path, error))
    for name, (path, other) in files.overridden.items():
        logger.warning("%s is read from %s, which goes before %s", name, path, other)
    manager = manager_class(include_defaults=False, metadata=metadata)
    fill(manager, files.entries)
    manager.include_path = [DEMO_TASKS, *folders]
    return manager


def resolve_tasks(names: str | Iterable[str], manager: TaskManager) -> list[str]:
    """The names to give to lm-eval for what the user wrote, each once and in that order.

    Takes comma lists, patterns (`blimp_*`), names of tasks, groups and tags (kept as they are), YAML
    files or patterns of them, and a folder on its own, which stands for the tasks in it. Files come out
    as absolute paths, which lm-eval reads as tasks. Where a pattern matches both a group and what is in
    it, the group stands for both, as lm-eval refuses to run a task twice.

    Raises:
        UnknownNameError: a name that is none of these; the message gives the nearest.
        InvalidOptionError: no name at all, or a task named twice by way of a group.
        InputError, TaskError: a file that cannot be read or holds no task.
    """
    wanted = [part.strip() for name in _as_list(names) for part in str(name).split(",") if part.strip()]
    if not wanted:
        raise InvalidOptionError(f"no task was named: expected at least one; {LIST_HINT}")
    if len(wanted) == 1 and wanted[0] not in manager.task_index and Path(wanted[0]).expanduser().is_dir():
        return _tasks_in_folder(Path(wanted[0]).expanduser())
    found: dict[str, None] = {}
    for name in wanted:
        found.update(dict.fromkeys(_resolve_one(name, manager)))
    names_found = _without_members(list(found), manager.task_index, keep=frozenset(wanted))
    _check_overlap(names_found, manager.task_index)
    return names_found


def describe_tasks(manager: TaskManager, names: str | Iterable[str] | None = None) -> list[TaskInfo]:
    """What the index says of the tasks that `names` mean, in order; of all without names.

    A name of a group or tag brings what is in it along. A word that is no name stands for every name that
    contains it. No data are downloaded and no task's Python code is run.

    Raises:
        UnknownNameError: nothing matches; the message gives the nearest names.
    """
    index = manager.task_index
    wanted = [part.strip() for name in _as_list(names) for part in str(name).split(",") if part.strip()]
    if not wanted:
        return [_describe(name, index) for name in manager.all_tasks]
    found: dict[str, None] = {}
    for word in wanted:
        found.update(dict.fromkeys(_matches(word, manager)))
    return [_describe(name, index) for name in found]


def local_data(names: Iterable[str], manager: TaskManager) -> list[Path]:
    """Folders that hold the data of tasks, where a task's data set path is a folder here.

    Args:
        names: as `resolve_tasks` gives them.
        manager: lm-eval's task manager.
    """
    index = manager.task_index
    folders: dict[Path, None] = {}
    for name in names:
        for leaf in _leaves(name, index) if name in index else [name]:
            config = index[leaf].cfg if leaf in index else {}
            if leaf.endswith((".yaml", ".yml")):
                config = _load_yaml(Path(leaf))
            path = Path(str((config or {}).get("dataset_path") or ""))
            if path != Path() and path.is_dir():
                folders[path.resolve()] = None
    return list(folders)


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return [value] if isinstance(value, str | Path) else list(value)


def import_task_manager() -> type[TaskManager]:
    """lm-eval's class, and with it most of what a run imports of lm-eval.

    Raises:
        MissingDependencyError: lm-eval is not installed.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "lm_eval":
            raise
        raise MissingDependencyError("lm-eval", "finding tasks", "harness") from error
    manager: type[TaskManager] = TaskManager
    return manager


def _load_yaml(path: Path) -> dict[str, Any]:
    """One task file with what it includes; functions stay names."""
    from lm_eval.tasks._yaml_loader import load_yaml

    from mlx_eval.harness.index import FILE_FAULTS

    try:
        config: dict[str, Any] = load_yaml(path, resolve_func=False)
    except FILE_FAULTS as error:
        raise _unreadable(path, error) from error
    return config


def _unreadable(path: Path, error: Exception) -> InputError:
    """What is wrong with a task file that lm-eval's loader has refused."""
    if isinstance(error, OSError):
        return InputError(f"the task file {path} cannot be read: {error.strerror or error}")
    reason = " ".join(str(error).split())
    return InputError(f"the task file {path} is not a YAML task file: {reason}")


def _is_task(config: Mapping[str, Any]) -> bool:
    return "task" in config or "group" in config


def _tasks_in_folder(folder: Path) -> list[str]:
    files = [path.resolve() for path in sorted(folder.glob("*.yaml")) if _is_task(_load_yaml(path))]
    if not files:
        raise InputError(f"the folder {folder} holds no task: expected *.yaml files that name one")
    return [str(path) for path in files]


def _resolve_one(name: str, manager: TaskManager) -> list[str]:
    if name in manager.task_index:
        return [name]
    if name.endswith((".yaml", ".yml")):
        return _task_files(name)
    matched = manager.match_tasks([name])
    if not matched:
        raise unknown_name("task", name, manager.all_tasks, LIST_HINT)
    return list(matched)


def _task_files(name: str) -> list[str]:
    pattern = str(Path(name).expanduser())
    paths = (
        [Path(pattern)] if Path(pattern).is_file() else [Path(path) for path in sorted(glob.glob(pattern))]
    )
    if not paths:
        raise InputError(f"there is no task file {name}; expected a YAML file or a task's name")
    for path in paths:
        if not _is_task(_load_yaml(path)):
            raise TaskError(f"the file {path} holds no task: expected a line `task: NAME` or `group: NAME`")
    return [str(path.resolve()) for path in paths]


def _children(name: str, index: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any] | None]]:
    """What the group or tag `name` holds, each with its configuration when it is written out in the group."""
    entry = index[name]
    if entry.kind.name == "TAG":
        return [(member, None) for member in sorted(entry.tags)]
    return _group_children(name, entry.cfg or {}, index) if entry.kind.name == "GROUP" else []


def _group_children(
    name: str, config: Mapping[str, Any], index: Mapping[str, Any]
) -> list[tuple[str, Mapping[str, Any] | None]]:
    children: list[tuple[str, Mapping[str, Any] | None]] = []
    for item in _as_list(config.get("task")):
        member = item if isinstance(item, str) else item.get("group") or item.get("task")
        if member in index:
            children.append((member, None))
        elif isinstance(item, Mapping):
            # lm-eval calls what is written out in a group by both names
            children.append((f"{name}::{member}", item))
    return children


def _leaves(name: str, index: Mapping[str, Any]) -> Iterator[str]:
    """The tasks that running `name` runs; a tag's are run in its place."""
    children = _children(name, index)
    if not children:
        yield name
    stack = list(reversed(children))
    while stack:
        member, config = stack.pop()
        inner = _children(member, index) if config is None else _group_children(member, config, index)
        if not inner:
            yield member
        stack.extend(reversed(inner))


def _is_group(name: str, index: Mapping[str, Any]) -> bool:
    return name in index and index[name].kind.name == "GROUP"


def _without_members(names: list[str], index: Mapping[str, Any], keep: frozenset[str]) -> list[str]:
    """`names` without those whose tasks are all in a larger group among them, but for those in `keep`."""
    tasks = {name: frozenset(_leaves(name, index) if name in index else [name]) for name in names}
    groups = [name for name in names if _is_group(name, index)]
    kept: list[str] = []
    for name in names:
        inside = any(
            tasks[name] < tasks[group] or (tasks[name] == tasks[group] and (group, 0) < (name, 0))
            for group in groups
            if group != name
        )
        if name in keep or not inside:
            kept.append(name)
    return kept


def _check_overlap(names: list[str], index: Mapping[str, Any]) -> None:
    """lm-eval stops at a task that comes from a group and from elsewhere: say it before the run."""
    owner: dict[str, str] = {}
    for name in names:
        for task in _leaves(name, index) if name in index else [name]:
            first = owner.setdefault(task, name)
            if first != name and (_is_group(first, index) or _is_group(name, index)):
                raise InvalidOptionError(
                    f"the task {task!r} is named twice, by {first!r} and by {name!r}: leave one of them out"
                )


def _matches(word: str, manager: TaskManager) -> list[str]:
    index = manager.task_index
    if word in index:
        return [word, *(member for member in _below(word, index) if member in index)]
    pattern = word if any(letter in word for letter in "*?[") else f"*{word}*"
    found = fnmatch.filter(manager.all_tasks, pattern)
    if not found:
        raise unknown_name("task", word, manager.all_tasks, LIST_HINT)
    return found


def _below(name: str, index: Mapping[str, Any]) -> Iterator[str]:
    """Everything in a group or tag, groups before what is in them."""
    for member, config in _children(name, index):
        yield member
        if config is None:
            yield from _below(member, index)


def _describe(name: str, index: Mapping[str, Any]) -> TaskInfo:
    entry = index[name]
    config: Mapping[str, Any] = entry.cfg or {}
    kind = {"GROUP": "group", "TAG": "tag"}.get(entry.kind.name, "task")
    members = tuple(member for member, _ in _children(name, index))
    if kind != "task":
        shots = {_shots(index[leaf].cfg) if leaf in index else None for leaf in _leaves(name, index)}
        metrics = _metric_names(config.get("aggregate_metric_list"))
        return TaskInfo(name, kind, None, shots.pop() if len(shots) == 1 else None, metrics, members)
    if entry.kind.name == "PY_TASK":
        return TaskInfo(name, kind, None, _shots(config), ())
    output_type = str(config.get("output_type", "generate_until"))  # lm-eval's default
    metrics = _metric_names(config.get("metric_list")) or _default_metrics(output_type)
    return TaskInfo(name, kind, output_type, _shots(config), metrics)


def _shots(config: Mapping[str, Any] | None) -> int | None:
    shots = (config or {}).get("num_fewshot")
    return shots if isinstance(shots, int) else None


def _metric_names(metric_list: Any) -> tuple[str, ...]:
    """Names in a `metric_list`; one that is a function was read as `folder/module.function`."""
    names = [str(item.get("metric")) for item in _as_list(metric_list) if isinstance(item, Mapping)]
    return tuple(name.rsplit(".", 1)[-1] if "/" in name else name for name in names)


def _default_metrics(output_type: str) -> tuple[str, ...]:
    from lm_eval.api.registry import DEFAULT_METRIC_REGISTRY

    return tuple(DEFAULT_METRIC_REGISTRY.get(output_type, ()))
