"""The shapes that lm-eval's results come in, old and new, behind one set of questions.

Knows lm-eval's dictionaries (its result_schema.py, and what earlier versions and other tools wrote); knows
neither files nor how scores are shown. Whatever is missing or odd is None, never an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

NOT_METRICS: Final = frozenset({"alias", "name", "sample_len", "sample_count", "samples"})
"""Keys that stand beside the metrics of a task."""


class Score(NamedTuple):
    """One metric of one task or group behind one filter."""

    metric: str
    filter: str
    value: float | None
    stderr: float | None


class EvalResults:
    """Questions to one result of lm-eval, by the name of a task or group."""

    def __init__(self, results: Mapping[str, Any]) -> None:
        self._results = results
        self._entries = _entries(results)
        self._children = _children(results)

    def ordered(self) -> list[tuple[str, int]]:
        """Every name once, groups before their members, with the number of groups above that have scores."""
        inner = {member for members in self._children.values() for member in members}
        names = [*self._children, *self._entries]
        depths: dict[str, int] = {}
        seen: set[str] = set()
        # Groups that hold each other have no outermost: the second round of names finds them.
        stack = [(name, 0) for name in reversed([*(n for n in names if n not in inner), *names])]
        while stack:
            name, depth = stack.pop()
            if name in seen:
                continue
            seen.add(name)
            if name in self._entries:
                depths[name] = depth
            shown = bool(self.scores(name))
            stack.extend((member, depth + shown) for member in reversed(self._children.get(name, [])))
        return list(depths.items())

    def scores(self, name: str) -> list[Score]:
        """Its scores in the order given; a standard error goes with its metric."""
        metrics = self._entries.get(name, {})
        scores = []
        for key, value in metrics.items():
            metric, _, filter_name = key.partition(",")
            if key in NOT_METRICS or not metric.strip():  # a blank stands for a group without scores
                continue
            base = metric.removesuffix("_stderr")
            if base != metric and _key(base, filter_name) in metrics:
                continue
            stderr = as_number(metrics.get(_key(f"{metric}_stderr", filter_name)))
            known = stderr is not None and not math.isnan(stderr)
            scores.append(Score(metric, filter_name or "none", as_number(value), stderr if known else None))
        return scores

    def is_group(self, name: str) -> bool:
        """Whether its scores are those of several tasks."""
        return name in self._children or self._part("groups", name) is not None

    def alias(self, name: str) -> str:
        """The name to show; earlier versions had the indentation in it."""
        alias = self._entries[name].get("alias")
        return str(alias or name).strip().removeprefix("- ")

    def version(self, name: str) -> str | None:
        """Its version as text: lm-eval has numbers for tasks and texts for groups."""
        version = self._part("versions", name)
        return None if version in (None, "N/A", "") else str(version)

    def shots(self, name: str) -> int | None:
        """Its number of shots; a group's when lm-eval or all of its tasks say one."""
        own = self._own_shots(name)
        if own is not None:
            return own
        values = {self._own_shots(leaf) for leaf in self._leaves(name)}
        return values.pop() if len(values) == 1 else None

    def higher_is_better(self, name: str, metric: str) -> bool | None:
        """Whether more is better; for a group when all of its tasks agree."""
        own = self._part("higher_is_better", name)
        if isinstance(own, Mapping) and metric in own:
            return own[metric] if isinstance(own[metric], bool) else None
        values = {self._configured_direction(leaf, metric) for leaf in self._leaves(name)}
        return values.pop() if len(values) == 1 else None

    def count(self, name: str, score: Score) -> int | None:
        """Documents behind a score: a group's own count for the metric, else that of its tasks added up."""
        by_metric = self._entries.get(name, {}).get("sample_count")
        if isinstance(by_metric, Mapping):
            own = _as_count(by_metric.get(_key(score.metric, score.filter)))
            if own is not None:
                return own
        if name not in self._children:
            return self._own_count(name)
        counts = [self._own_count(leaf) for leaf in self._leaves(name)]
        known = [count for count in counts if count is not None]
        return sum(known) if known and len(known) == len(counts) else self._own_count(name)

    def _part(self, key: str, name: str) -> Any:
        """`results[key][name]`, None where either is missing."""
        part = self._results.get(key)
        return part.get(name) if isinstance(part, Mapping) else None

    def _leaves(self, name: str) -> list[str]:
        """The tasks in a group; a task itself."""
        leaves: dict[str, None] = {}
        seen: set[str] = set()
        stack = [name]
        while stack:
            current = stack.pop()
            if current in seen:
                continue
            seen.add(current)
            if current in self._children:
                stack.extend(reversed(self._children[current]))
            else:
                leaves[current] = None
        return list(leaves)

    def _own_shots(self, name: str) -> int | None:
        config = self._part("configs", name)
        configured = config.get("num_fewshot") if isinstance(config, Mapping) else None
        own = _as_count(self._part("n-shot", name))
        return _as_count(configured) if own is None else own

    def _own_count(self, name: str) -> int | None:
        """What was scored of a task: `n-samples`, else the entry's own number, else the samples logged."""
        number = self._part("n-samples", name)
        if isinstance(number, Mapping):
            number = number.get("effective", number.get("original"))
        for candidate in (number, self._entries.get(name, {}).get("sample_len")):
            count = _as_count(candidate)
            if count is not None:
                return count
        samples = self._part("samples", name)
        if not isinstance(samples, list) or not samples:
            return None
        return len({sample.get("doc_id") for sample in samples if isinstance(sample, Mapping)})

    def _configured_direction(self, name: str, metric: str) -> bool | None:
        own = self._part("higher_is_better", name)
        if isinstance(own, Mapping) and isinstance(own.get(metric), bool):
            return bool(own[metric])
        config = self._part("configs", name)
        listed = config.get("metric_list") if isinstance(config, Mapping) else None
        for item in listed if isinstance(listed, Sequence) else ():
            if isinstance(item, Mapping) and item.get("metric") == metric:
                direction = item.get("higher_is_better")
                return direction if isinstance(direction, bool) else None
        return None


def as_number(value: object) -> float | None:
    """A float of any kind of number (numpy's too, and numbers that were saved as text); else None."""
    if value is None or isinstance(value, list | tuple | dict):
        return None
    try:
        return float(value)  # type: ignore[arg-type]  # whatever it is, float() decides
    except (TypeError, ValueError, OverflowError):
        return None


def _as_count(value: object) -> int | None:
    number = as_number(value)
    return None if number is None or not math.isfinite(number) else int(number)


def _key(metric: str, filter_name: str) -> str:
    """The key of a metric; the oldest results have no filters."""
    return f"{metric},{filter_name}" if filter_name else metric


def _entries(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The metrics of every task and group. A group's may stand under `groups` alone."""
    entries: dict[str, dict[str, Any]] = {}
    for part in (results.get("results"), results.get("groups")):
        for name, metrics in part.items() if isinstance(part, Mapping) else ():
            if isinstance(metrics, Mapping):
                entries[name] = {**metrics, **entries.get(name, {})}
    return entries


def _children(results: Mapping[str, Any]) -> dict[str, list[str]]:
    """What each group directly holds; tasks, which earlier versions list as empty groups, are left out."""
    groups = results.get("group_subtasks")
    if not isinstance(groups, Mapping):
        return {}
    return {
        name: [str(member) for member in members]
        for name, members in groups.items()
        if isinstance(members, Sequence) and not isinstance(members, str) and members
    }
