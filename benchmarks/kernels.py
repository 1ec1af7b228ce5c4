"""Is each kernel faster than what MLX has built in for the same, and how near is it to the memory's bandwidth?

    python benchmarks/kernels.py [--quick] [--kernel logprob] [--dtype float16] [--json FILE]

Prints a table for each kernel, in Markdown, to be pasted as it is. Shapes are rows x vocabulary, rows x new tokens
with the own keys of each row, and rows x width. A time is the median of several runs, after warm-ups. The bytes are
those that must move: each input read and each output written once, a prefix once for all rows. The bandwidth is that
of a large copy, measured in the same run. Small shapes show the cost of a launch, or stay in a cache and exceed it;
where products are the work (many rows) the share is small and says little. The peak is the most that MLX held, what
is read included. The outputs of every way must agree with ours before anything is timed; the status is 1 where they
do not. A shape that needs too much memory, or takes too long on a CPU, is named and left out. Without Metal, this
measures the reference, and nothing about Metal.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, get_args

from mlx_eval.models import runtime  # before mlx: it loads the BLAS

import mlx.core as mx  # isort: skip
import numpy as np
from mlx_eval_kernels import Backend, KernelError
from mlx_eval_kernels.launch import chosen_backend

from benchmarks.kernel_cases import KERNELS, Arrays, Case, Way, cases

DTYPES: Final = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
WARM_UPS: Final = 2
RUNS: Final = (3, 15)
"""The fewest and the most that are timed."""
SECONDS: Final = 2.0
"""After which no more than the fewest are timed."""
COPY_BYTES: Final = 2**28
MEMORY_SHARE: Final = 0.4
CPU_PRODUCTS: Final = 2**36
"""Some seconds of float32 products on two cores, more of other types."""
COLUMNS: Final = ("shape", "way", "ms", "of ours", "MB to move", "GB/s", "of bandwidth", "peak MB")


@dataclass(frozen=True, slots=True)
class Line:
    """What was measured of one way."""

    kernel: str
    shape: str
    way: str
    seconds: float
    of_ours: float
    """Its time, divided by that of our own function."""
    num_bytes: int
    gb_per_second: float
    of_bandwidth: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Left:
    """What was not measured."""

    what: str
    why: str
    is_wrong: bool
    """Whether the outputs are: otherwise it was too much for the machine."""


def bandwidth() -> float:
    """Bytes read and written a second by the fastest of some large copies, on the device that MLX computes on."""
    if mx.default_device() == mx.Device(mx.gpu):
        source = mx.zeros(COPY_BYTES // 4)
        mx.eval(source)

        def copy() -> None:
            mx.eval(-source)
    else:  # MLX takes new memory from the system for each result, which takes longer than to fill it
        given = np.ones(COPY_BYTES // 4, np.float32)
        taken = np.ones_like(given)

        def copy() -> None:
            np.copyto(taken, given)

    copy()
    return 2 * COPY_BYTES / min(_timed(copy) for _ in range(RUNS[1]))


def measure(case: Case, memory_bytes: int, bandwidth: float) -> Iterator[Line | Left]:
    """Check the ways of a case against ours, then time them. `bandwidth` is in bytes a second."""
    name = f"{case.kernel} {case.shape}"
    if case.products > CPU_PRODUCTS and mx.default_device() == mx.Device(mx.cpu):
        yield Left(name, f"{case.products:.1e} products on a CPU", False)
        return
    fitting = []
    for way in case.ways:
        reason = way.unable
        if reason is None and way.held_bytes > MEMORY_SHARE * memory_bytes:
            reason = f"about {way.held_bytes / 1e9:.1f} GB, more than {MEMORY_SHARE:.0%} of the memory"
        if reason is None:
            fitting.append(way)
        else:
            yield Left(f"{name}: {way.name}", reason, False)
    if case.ways[0] not in fitting or len(fitting) < 2:
        if fitting:
            yield Left(f"{name}: the rest", "nothing to compare with", False)
        return
    faults = list(_faults(fitting))
    for way, fault in faults:
        yield Left(f"{name}: {way.name}", fault, True)
    if not faults:
        yield from _lines(case, fitting, bandwidth)


def _faults(ways: Sequence[Way]) -> Iterator[tuple[Way, str]]:
    """The ways that disagree with the first."""
    expected = _outputs(ways[0])
    for way in ways[1:]:
        fault = disagreement(_outputs(way), expected, way.allowed)
        if fault is not None:
            yield way, fault


def _lines(case: Case, ways: Sequence[Way], bandwidth: float) -> Iterator[Line]:
    """The times of ways, the first of them ours."""
    of_ours = 0.0
    for way in ways:
        seconds, peak = _time_and_peak(way)
        of_ours = of_ours or seconds
        rate = case.num_bytes / seconds
        yield Line(
            kernel=case.kernel,
            shape=case.shape,
            way=way.name,
            seconds=seconds,
            of_ours=seconds / of_ours,
            num_bytes=case.num_bytes,
            gb_per_second=rate / 1e9,
            of_bandwidth=rate / bandwidth,
            peak_bytes=peak,
        )


def disagreement(
    found: Sequence[np.ndarray], ours: Sequence[np.ndarray], allowed: Sequence[float]
) -> str | None:
    """What is wrong between two ways, of as many outputs as there are limits; None: nothing."""
    for number, limit in enumerate(allowed):
        if found[number].shape != ours[number].shape:
            return f"output {number} has shape {found[number].shape}, ours {ours[number].shape}"
        error = float(np.abs(found[number] - ours[number]).max())
        if not error <= limit:  # NaN too
            return f"output {number} differs from ours by {error:.2g}, allowed are {limit:.2g}"
    return None


def _outputs(way: Way) -> list[np.ndarray]:
    arrays = way.make()
    mx.eval(arrays)
    outputs = [np.array(array.astype(mx.float32)).astype(np.float64) for array in way.compute(*arrays)]
    del arrays
    mx.clear_cache()
    return outputs


def _time_and_peak(way: Way) -> tuple[float, int]:
    """The median of its seconds, and the most bytes that MLX held."""
    arrays: Arrays = way.make()
    mx.eval(arrays)
    mx.clear_cache()
    mx.reset_peak_memory()

    def run() -> None:
        mx.eval(way.compute(*arrays))

    # a run that takes long needs no more warming up
    for _ in range(WARM_UPS):
        if _timed(run) > SECONDS:
            break
    spent: list[float] = []
    while len(spent) < RUNS[0] or (sum(spent) < SECONDS and len(spent) < RUNS[1]):
        spent.append(_timed(run))
    return statistics.median(spent), mx.get_peak_memory()


def _timed(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def columns() -> str:
    """The head of a table in Markdown, numbers to the right."""
    rule = ["---", "---", *["---:"] * (len(COLUMNS) - 2)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (COLUMNS, rule))


def row(line: Line) -> str:
    """One line of it."""
    cells = (
        line.shape,
        line.way,
        _short(line.seconds * 1e3),
        f"{line.of_ours:.2f}",
        f"{line.num_bytes / 1e6:,.1f}",
        _short(line.gb_per_second),
        f"{line.of_bandwidth:.1%}",
        f"{line.peak_bytes / 1e6:,.1f}",
    )
    return f"| {' | '.join(cells)} |"


def _short(number: float) -> str:
    """Three digits, or all before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def heading(backend: Backend, dtype: str, rate: float) -> str:
    """What the tables were measured on, and what they do not say."""
    machine = runtime.device()
    lines = [
        f"{machine.name}, {machine.memory_bytes / 1e9:.0f} GB, {machine.os}; MLX {mx.__version__} on "
        f"{machine.kind}, {machine.blas}, Python {platform.python_version()}; {datetime.date.today()}; {dtype}; "
        f"a copy of {COPY_BYTES / 1e6:.0f} MB moves {rate / 1e9:.3g} GB/s."
    ]
    if not machine.is_metal:
        lines.append("**The reference on a CPU, in plain MLX. This says nothing about Metal.**")
    elif backend == "reference":
        lines.append("**The reference, in plain MLX on the GPU, not our Metal kernels.**")
    return "\n\n".join(lines)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--kernel", choices=KERNELS, nargs="+", default=KERNELS, help="(default: all)")
    add(
        "--backend",
        choices=get_args(Backend),
        help="(default: metal where MLX computes on it, else reference)",
    )
    add("--dtype", choices=DTYPES, help="(default: bfloat16, on a CPU float32)")
    add("--quick", action="store_true", help="a few small shapes")
    add("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args(arguments)
    try:
        options.backend = chosen_backend(options.backend)
    except KernelError as error:
        parser.error(str(error))
    options.dtype = options.dtype or ("bfloat16" if runtime.device().is_metal else "float32")
    return options


def memory_limit() -> int:
    """Bytes that a GPU works well with, of a CPU all that there are."""
    machine = runtime.device()
    recommended = mx.device_info().get("max_recommended_working_set_size") if machine.is_metal else None
    return min(machine.memory_bytes, int(recommended or machine.memory_bytes))


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    rate = bandwidth()
    print(heading(options.backend, options.dtype, rate))
    lines: list[Line] = []
    left: list[Left] = []
    for kernel in options.kernel:
        print(f"\n### {kernel}\n\n{columns()}", flush=True)
        for case in cases(kernel, DTYPES[options.dtype], options.backend, options.quick):
            for found in measure(case, memory_limit(), rate):
                if isinstance(found, Line):
                    print(row(found), flush=True)  # one by one: large shapes take a while
                    lines.append(found)
                else:
                    left.append(found)
    skipped = [one for one in left if not one.is_wrong]
    if skipped:
        print("\nNot measured:\n" + "\n".join(f"- {one.what}: {one.why}" for one in skipped))
    wrong = [one for one in left if one.is_wrong]
    for one in wrong:
        print(f"WRONG, not timed: {one.what}: {one.why}", file=sys.stderr)
    if options.json:
        figures = {
            "machine": asdict(runtime.device()),
            "mlx": mx.__version__,
            "date": str(datetime.date.today()),
            "backend": options.backend,
            "dtype": options.dtype,
            "bandwidth": rate,
            "lines": [asdict(line) for line in lines],
            "left": [asdict(one) for one in left],
        }
        options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
