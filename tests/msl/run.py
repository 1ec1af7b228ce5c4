"""Runs a compiled kernel on buffers, and says what it did. Mirrors the records of cpp/interface.h."""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from tests.msl.buffers import Buffer

Order = Literal["forward", "reverse", "shuffled"]
"""In which the threads of a group take turns, and the groups of a grid follow each other."""
Size = tuple[int, int, int]

MOST_THREADS: Final = 1024
"""In a threadgroup, on every Apple GPU."""
GROUP_MEMORY: Final = 32_768
"""Bytes of threadgroup memory, on every Apple GPU."""
_MAX_FINDINGS: Final = 16
_ONE_AT_A_TIME: Final = threading.Lock()
"""The runtime has one state."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a launch is carried out."""

    order: Order = "forward"
    seed: int = 0
    """Of the shuffled order."""
    poison: int = 0xCB
    """The byte that fills threadgroup memory before each group, and outputs before the launch."""
    groups: tuple[Size, ...] | None = None
    """Positions of the threadgroups to run; None: all."""
    flush_subnormals: bool = True
    """Take float32 subnormals for zeros, as the GPU may."""
    timeout_seconds: float = 60.0
    """Of CPU time."""

    def __post_init__(self) -> None:
        if self.order not in get_args(Order):
            raise ValueError(f"the order is {', '.join(get_args(Order))}, not {self.order!r}")
        if not 0 <= self.poison <= 0xFF:
            raise ValueError(f"the poison is a byte, not {self.poison}")


@dataclass(frozen=True, slots=True)
class Code:
    """A compiled kernel."""

    kernel: str
    """Its name, for the report."""
    library: Path
    """From `build.kernel_library`."""
    text: str
    """In Metal; its lines are quoted with the findings."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a launch did."""

    kernel: str
    errors: tuple[str, ...]
    """Findings, each with the place in the text that MLX generates; empty for a right kernel."""
    read: Mapping[str, int]
    """Bytes by the name of the buffer, at each load that the compiler leaves in."""
    written: Mapping[str, int]
    """Bytes by the name of the buffer, at each store that the compiler leaves in."""
    unwritten: Mapping[str, int]
    """Elements of each output that nobody wrote."""
    barriers: int
    """`threadgroup_barrier`s that a whole group passed."""
    collectives: int
    """Operations of a whole simdgroup."""
    accesses: int
    """Loads and stores that were checked."""
    threadgroup_bytes: int
    seconds: float


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("item_size", ctypes.c_uint32),
        ("writable", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
        ("read_bytes", ctypes.c_uint64),
        ("written_bytes", ctypes.c_uint64),
        ("unwritten", ctypes.c_uint64),
    )


class _Finding(ctypes.Structure):
    _fields_ = (("address", ctypes.c_uint64), ("repeats", ctypes.c_uint64), ("text", ctypes.c_char * 368))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("group", ctypes.c_uint32 * 3),
        ("order", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("poison", ctypes.c_uint32),
        ("flush", ctypes.c_uint32),
        ("group_memory_limit", ctypes.c_uint32),
        ("timeout_ms", ctypes.c_uint32),
        ("num_buffers", ctypes.c_uint32),
        ("num_chosen", ctypes.c_uint32),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("chosen", ctypes.POINTER(ctypes.c_uint64)),
        ("barriers", ctypes.c_uint64),
        ("collectives", ctypes.c_uint64),
        ("accesses", ctypes.c_uint64),
        ("group_memory", ctypes.c_uint64),
        ("num_findings", ctypes.c_uint32),
        ("stopped", ctypes.c_uint32),
        ("findings", _Finding * _MAX_FINDINGS),
    )


def launch(
    code: Code, buffers: Sequence[Buffer], grid: Size, threadgroup: Size, settings: Settings
) -> Report:
    """Run every chosen threadgroup of a kernel.

    Args:
        code: the kernel.
        buffers: one for each buffer parameter, in order.
        grid: threads, not groups.
        threadgroup: threads of a group; cut to the grid, as MLX does.
        settings: order, poison and so on.

    Raises:
        ValueError: the grid or the threadgroup is not one that Metal takes.
    """
    group = _group(grid, threadgroup)
    chosen = _linear(settings.groups, grid, group)
    record = _Launch()
    record.grid[:], record.group[:] = grid, group
    record.order, record.seed, record.poison = (
        get_args(Order).index(settings.order),
        settings.seed,
        settings.poison,
    )
    record.flush, record.group_memory_limit = settings.flush_subnormals, GROUP_MEMORY
    record.timeout_ms = max(1, round(settings.timeout_seconds * 1000))
    arguments = (_Buffer * len(buffers))(*map(_mirror, buffers))
    record.num_buffers, record.buffers = len(buffers), arguments
    if chosen is not None:
        record.num_chosen, record.chosen = len(chosen), (ctypes.c_uint64 * len(chosen))(*chosen)
    library = _loaded(code.library)
    start = time.perf_counter()
    with _ONE_AT_A_TIME:
        library.msl_run(ctypes.byref(record), ctypes.cast(library.msl_entry, ctypes.c_void_p))
    seconds = time.perf_counter() - start
    outputs = [item for item, buffer in zip(arguments, buffers, strict=True) if buffer.is_output]
    errors = _described(record, code)
    if settings.groups is None and not record.stopped:
        errors += [
            f"OUTPUT {o.name.decode()}: {o.unwritten} elements never written" for o in outputs if o.unwritten
        ]
    return Report(
        kernel=code.kernel,
        errors=tuple(errors),
        read={item.name.decode(): item.read_bytes for item in arguments},
        written={item.name.decode(): item.written_bytes for item in arguments},
        unwritten={item.name.decode(): item.unwritten for item in outputs},
        barriers=record.barriers,
        collectives=record.collectives,
        accesses=record.accesses,
        threadgroup_bytes=record.group_memory,
        seconds=seconds,
    )


def _group(grid: Size, threadgroup: Size) -> Size:
    if min(grid) < 1 or min(threadgroup) < 1:
        raise ValueError(f"a grid of {grid} threads in groups of {threadgroup}: every size is 1 or more")
    num_threads = threadgroup[0] * threadgroup[1] * threadgroup[2]
    if num_threads > MOST_THREADS:
        raise ValueError(
            f"a threadgroup of {threadgroup} has {num_threads} threads; Metal allows {MOST_THREADS}"
        )
    x, y, z = (min(pair) for pair in zip(grid, threadgroup, strict=True))
    return x, y, z


def _linear(groups: Sequence[Size] | None, grid: Size, group: Size) -> list[int] | None:
    """Positions of groups as numbers; x runs fastest."""
    if groups is None:
        return None
    across, down, deep = (-(-threads // size) for threads, size in zip(grid, group, strict=True))
    for x, y, z in groups:
        if not (0 <= x < across and 0 <= y < down and 0 <= z < deep):
            raise ValueError(f"no threadgroup {(x, y, z)} in a grid of {(across, down, deep)} groups")
    return [x + across * (y + down * z) for x, y, z in groups]


def _mirror(buffer: Buffer) -> _Buffer:
    return _Buffer(
        buffer.address,
        buffer.num_bytes,
        buffer.item_size,
        int(buffer.is_output),
        buffer.name.encode(),
        0,
        0,
        0,
    )


@functools.cache
def _loaded(library: Path) -> ctypes.CDLL:
    code = ctypes.CDLL(str(library))
    code.msl_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return code


def _described(record: _Launch, code: Code) -> list[str]:
    """The findings, each followed by the line of the Metal text that it is about."""
    findings = [record.findings[index] for index in range(record.num_findings)]
    lines = _source_lines(code.library, [finding.address for finding in findings])
    quoted = code.text.split("\n")
    described = []
    for finding, known in zip(findings, lines, strict=True):
        message = finding.text.decode(errors="replace")
        said = re.search(r"line (\d+)", message)
        line = known or (int(said[1]) if said else 0)
        where = f"  at line {line}: {quoted[line - 1].strip()}" if 0 < line <= len(quoted) else ""
        described.append(
            message + where + (f"  (and {finding.repeats} times more)" if finding.repeats else "")
        )
    return described


def _source_lines(library: Path, addresses: Sequence[int]) -> list[int]:
    """Lines of the Metal text for code addresses, 0 where there is none."""
    lines = [0] * len(addresses)
    for index, address in enumerate(addresses):
        if address:
            command = ["addr2line", "-i", "-e", str(library), hex(address)]
            shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            places = re.findall(r"kernel\.metal:(\d+)", shown)  # innermost first: the line, not its caller's
            lines[index] = int(places[0]) if places else 0
    return lines
