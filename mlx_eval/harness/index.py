"""lm-eval's index of its task files, without parsing 14,000 of them at every start.

Knows lm-eval's loader of YAML files and how it merges what they include; runs no task's code and resolves no
name. What a file says by itself, before includes, holds for as long as this one file is unchanged: that is
what is kept between runs. The index is made of it anew each time, by lm-eval's own rules.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml  # type: ignore[import-untyped]  # no type marker

from mlx_eval.cache import read_cached, write_cached

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._index import Entry

FORMAT: Final = 1
"""Of what is kept; another number makes the old unreadable."""

FEWEST_FILES: Final = 200
"""A folder with fewer is parsed sooner (0.1 ms a file) than it is worth a file in the cache."""

SETTLED_NS: Final = 2 * 10**9
"""A file changed less than this before it was read may change again without another time to show for it,
where file systems count in seconds."""

FILE_FAULTS: Final = (
    OSError,
    yaml.YAMLError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RecursionError,
)
"""What lm-eval's loader and index raise for files that are not what they should be."""


@dataclass(frozen=True, slots=True)
class TaskFiles:
    """What the folders of task files hold."""

    entries: dict[str, Entry]
    """lm-eval's record of each name; where two folders have a name, that of the later one."""
    broken: dict[Path, Exception]
    """Files that lm-eval cannot read or that include such, and why."""
    overridden: dict[str, tuple[Path, Path]]
    """Tasks and groups that are in two folders: the file that counts and the one that does not."""


def index_folders(folders: Sequence[Path]) -> TaskFiles:
    """Index folders as lm-eval's `TaskIndex.build` does; files without a task or group are passed over."""
    from lm_eval.tasks._index import Kind, TaskIndex

    found = TaskFiles({}, {}, {})
    for folder in folders:
        entries: dict[str, Entry] = {}
        for path, config in _configurations(folder, found.broken):
            try:
                TaskIndex.process_cfg(config, path, entries)
            except FILE_FAULTS:  # no task: a file that others include, or settings of something else
                continue
        for name in [name for name in entries if not isinstance(name, str)]:
            path = Path(str(entries.pop(name).yaml_path))
            found.broken[path] = ValueError(f"the name of a task is a text, not {name!r}")
        for name, entry in entries.items():
            other = found.entries.get(name)
            if other is None or Kind.TAG in (entry.kind, other.kind) or entry.yaml_path == other.yaml_path:
                continue
            found.overridden[name] = (entry.yaml_path, other.yaml_path)
        found.entries.update(entries)
    return found


def own_folder() -> Path:
    """Where lm-eval keeps its own task files."""
    import lm_eval.tasks

    return Path(str(lm_eval.tasks.__file__)).parent


def fill(manager: TaskManager, entries: dict[str, Entry]) -> None:
    """Give a manager that was made without folders its index, as its constructor would have done."""
    kinds: defaultdict[str, list[str]] = defaultdict(list)
    for name, entry in entries.items():
        kinds[entry.kind.name].append(name)
    manager._index = entries
    manager._all_tasks = sorted(entries)
    manager._all_subtasks = sorted(kinds["TASK"] + kinds["PY_TASK"])
    manager._all_groups = sorted(kinds["GROUP"])
    manager._all_tags = sorted(kinds["TAG"])


def _configurations(folder: Path, broken: dict[Path, Exception]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Each YAML file below a folder, in lm-eval's order, with what it says and includes."""
    from lm_eval.tasks._index import TaskIndex

    paths = list(TaskIndex._iter_yaml_files(folder))
    name = f"task_files_{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]}.json"
    kept = read_cached(name, _key()) if len(paths) >= FEWEST_FILES else None
    reader = _Reader({} if kept is None else kept)
    for path in paths:
        try:
            yield path, reader.read(str(path), set())
        except FILE_FAULTS as error:
            broken[path] = error
    if len(paths) >= FEWEST_FILES and reader.records != kept:
        write_cached(name, _key(), reader.records)


def _key() -> str:
    """What the loader's answers depend on beside the files."""
    from importlib.metadata import version

    return f"{FORMAT}, lm-eval {version('lm-eval')}, PyYAML {yaml.__version__} {yaml.__with_libyaml__}"


@dataclass(slots=True)
class _Reader:
    """Reads YAML files, each once, and those that have not changed not at all."""

    kept: dict[str, list[Any]]
    """By path: time of the last change in ns, size, inode, what the file says; from an earlier run."""
    records: dict[str, list[Any]] = field(default_factory=dict)
    """The same of the files read now, to be kept."""
    _own: dict[str, dict[str, Any]] = field(default_factory=dict)
    _real_folders: dict[str, str] = field(default_factory=dict)
    _started: int = field(default_factory=time.time_ns)

    def read(self, path: str, seen: set[str]) -> dict[str, Any]:
        """What a file says over what it includes, like `load_yaml` with its functions left as names.

        Args:
            path: of the file.
            seen: files on the way here.

        Raises:
            ValueError: a file includes itself, or one twice; and whatever else of `FILE_FAULTS`.
        """
        path, state = self._locate(path)
        if path in seen:
            raise ValueError(f"{path} is included twice")
        seen.add(path)
        config = dict(self._own_words(path, state))
        if "include" not in config:
            return config
        includes = config.pop("include")
        merged: dict[str, Any] = {}
        for included in includes if isinstance(includes, list) else [includes]:
            inner = self.read(os.path.join(os.path.dirname(path), included), seen)
            inner.pop("task_list", None)  # lm-eval: it speaks of the file that it stands in
            merged.update(inner)
        merged.update(config)
        return merged

    def _locate(self, path: str) -> tuple[str, os.stat_result]:
        """The path without symbolic links, and the file's state before it is read."""
        state = os.lstat(path)
        if stat.S_ISLNK(state.st_mode):
            path = os.path.realpath(path)
            return path, os.stat(path)
        folder, name = os.path.split(path)
        real = self._real_folders.get(folder)
        if real is None:
            real = self._real_folders[folder] = os.path.realpath(folder)
        return os.path.join(real, name), state

    def _own_words(self, path: str, state: os.stat_result) -> dict[str, Any]:
        """What a file says by itself."""
        if path in self._own:
            return self._own[path]
        stamp = [state.st_mtime_ns, state.st_size, state.st_ino]
        kept = self.kept.get(path)
        if kept is not None and kept[:3] == stamp:
            config: dict[str, Any] = kept[3]
            self.records[path] = kept
        else:
            from lm_eval.tasks._yaml_loader import load_yaml

            config = load_yaml(path, resolve_func=False, recursive=False)
            if state.st_mtime_ns < self._started - SETTLED_NS and _survives_json(config):
                self.records[path] = [*stamp, config]
        self._own[path] = config
        return config


def _survives_json(config: dict[str, Any]) -> bool:
    """Whether JSON gives the same back: it has no dates, no sets and no keys but texts."""
    try:
        return bool(json.loads(json.dumps(config)) == config)
    except (TypeError, ValueError, RecursionError):
        return False
