"""Seeded bugs: a kernel with one thing wrong, what is to notice it, and what did. Knows no kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_eval_kernels.launch import Dispatch, Run, read

from tests.msl.build import Fill
from tests.msl.emulate import EmulationError, Emulator


class Detector(Enum):
    """What can notice a bug. The value of those of the emulation is how their findings begin."""

    DEVICE_BOUNDS = "OUT OF BOUNDS device"
    THREADGROUP_BOUNDS = "OUT OF BOUNDS threadgroup"
    READ_AFTER_WRITE = "RACE read after write"
    WRITE_AFTER_READ = "RACE write after read"
    WRITE_AFTER_WRITE = "RACE write after write"
    WILD = "WILD"
    UNINITIALISED = "UNINITIALISED read"
    UNWRITTEN = "OUTPUT"
    BARRIER_DIVERGENCE = "BARRIER DIVERGENCE"
    SIMD_DIVERGENCE = "SIMD DIVERGENCE"
    DEADLOCK = "DIVERGENCE in group"
    MEMORY = "THREADGROUP MEMORY"
    UNDEFINED = "UNDEFINED BEHAVIOUR"
    TIMEOUT = "TIMEOUT"
    VALUE = "a wrong value"
    BYTES = "more bytes read"
    STATIC = "the static passes"


class Edit(NamedTuple):
    """A change of a text."""

    old: str
    new: str
    times: int = 1
    """How often the old text is there, all of which are changed."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A small call of a function, of which a bug is put into one dispatch."""

    call: Callable[[Run], None]
    """Calls the function by its kernels and asserts the values."""
    kernel: str
    """Name of the source that bugs are put into."""
    template: Mapping[str, int | bool] = field(default_factory=dict)
    """Of that dispatch, where the kernel is used for more than one."""
    most_read: Mapping[str, int] = field(default_factory=dict)
    """Bytes of its inputs that it may read."""
    sparse: Mapping[str, Mapping[int, mx.array]] = field(default_factory=dict)
    groups: Sequence[tuple[int, int, int]] | None = None
    fill: Fill = "pattern"
    """What variables of the dispatch under test hold before they are set."""
    timeout_seconds: float = 20.0
    """Of the processor, for the dispatch under test."""

    def is_under_test(self, dispatch: Dispatch) -> bool:
        template = dict(dispatch.template)
        return dispatch.source.name == self.kernel and self.template.items() <= template.items()


def as_it_is(dispatch: Dispatch) -> Dispatch:
    return dispatch


@dataclass(frozen=True, slots=True)
class Bug:
    """One thing wrong."""

    name: str
    """Completes "a kernel in which ..."."""
    kind: str
    file: str
    """In `metal/`; of a bug of the host, the file of the kernel it launches."""
    edits: tuple[Edit, ...]
    trial: Trial
    caught_by: Detector
    host: Callable[[Dispatch], Dispatch] = as_it_is
    """What is wrong with the dispatch but for its text."""

    def __str__(self) -> str:
        return f"{self.file.removesuffix('.metal')}: {self.name}"

    def put_into(self, dispatch: Dispatch) -> Dispatch:
        """The dispatch with this bug.

        Raises:
            LookupError: the text that it changes is not there as often as it says.
        """
        right = wrong = read(self.file)
        for edit in self.edits:
            if (found := wrong.count(edit.old)) != edit.times:
                raise LookupError(f"{self}: {edit.old!r} is in {self.file} {found} times, not {edit.times}")
            wrong = wrong.replace(edit.old, edit.new)
        source = dispatch.source
        changed = replace(
            source, body=source.body.replace(right, wrong), header=source.header.replace(right, wrong)
        )
        if self.edits and changed == source:
            raise LookupError(f"{self}: {self.file} is not part of {source.name}")
        return self.host(replace(dispatch, source=changed))


def what_notices(trial: Trial, change: Callable[[Dispatch], Dispatch] = as_it_is) -> dict[Detector, str]:
    """What notices that a dispatch of the trial is changed, with its words; empty: nothing does.

    The first that does ends the trial: findings of the emulation, then values, then bytes.
    """
    emulator = Emulator(
        sparse=trial.sparse,
        groups=trial.groups,
        fill=trial.fill,
        timeout_seconds=trial.timeout_seconds,
    )
    reads: list[Mapping[str, int]] = []

    def run(dispatch: Dispatch) -> list[mx.array]:
        if not trial.is_under_test(dispatch):
            return Emulator()(dispatch)
        outputs: list[mx.array] = emulator(change(dispatch))
        reads.append(emulator.reports[-1].read)
        return outputs

    try:
        trial.call(run)
    except EmulationError as error:
        return _by_detector(error.errors)
    except AssertionError as error:
        return {Detector.VALUE: str(error)}
    assert reads, f"no dispatch of the trial is one of {trial.kernel} with {trial.template}"
    most = {name: limit for name, limit in trial.most_read.items() if sum(one[name] for one in reads) > limit}
    return {Detector.BYTES: f"of {', '.join(most)}"} if most else {}


def _by_detector(lines: Sequence[str]) -> dict[Detector, str]:
    """The first line of each detector.

    Raises:
        RuntimeError: a line is of none of them: the bug does not even compile, say.
    """
    found: dict[Detector, str] = {}
    for line in lines:
        kind = next((one for one in Detector if line.startswith(one.value)), None)
        if kind is None:
            raise RuntimeError(f"not a finding that a bug can have: {line}")
        found.setdefault(kind, line)
    return found


def sent(trial: Trial, change: Callable[[Dispatch], Dispatch] = as_it_is) -> Dispatch:
    """The changed dispatch of a trial, not carried out."""
    kept: list[Dispatch] = []

    class Enough(Exception):  # noqa: N818
        """Ends the trial."""

    def run(dispatch: Dispatch) -> Any:
        if trial.is_under_test(dispatch):
            kept.append(change(dispatch))
            raise Enough
        return [
            mx.zeros(shape, dtype)
            for shape, dtype in zip(dispatch.output_shapes, dispatch.output_dtypes, strict=True)
        ]

    try:
        trial.call(run)
    except Enough:
        return kept[0]
    raise LookupError(f"no dispatch of the trial is one of {trial.kernel}")
