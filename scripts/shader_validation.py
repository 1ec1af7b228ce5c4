"""Run a command under Metal's shader validation, and fail where it reports one of our kernels.

    python scripts/shader_validation.py -- .venv/bin/python -m pytest --capture=no tests/kernels
    python scripts/shader_validation.py --canary

The validation says what it finds on stderr alone: the command goes on, and its own status stays 0. So stderr is read
here, and passed on. pytest must not capture it. Reports that name a kernel of somebody else are counted and change
nothing; those that name none are taken for ours. Without the line that says that the validation is on, silence means
nothing, and the status is 1 too. `--canary` runs a kernel that reads far behind its input, and succeeds where that is
reported.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

OURS: Final = "custom_kernel_mlx_eval_"
"""Begins the names that MLX gives to our kernels."""
SETTINGS: Final = {"MTL_SHADER_VALIDATION": "1", "MTL_SHADER_VALIDATION_REPORT_TO_STDERR": "1"}
"""Without the second, reports go to the system's log only (`man MetalValidation`)."""
STARTED: Final = "Metal GPU Validation Enabled"
REPORT: Final = re.compile(r"Invalid .{0,120}?(?:at offset \d+|executing \w+ function)")
"""Anywhere in a line: it may stand behind something that a test printed."""
FUNCTION: Final = re.compile(r'executing \w+ function: "([^"]*)"')
UNNAMED: Final = "(no name)"
CANARY: Final = """
import mlx.core as mx

kernel = mx.fast.metal_kernel(
    name="canary",
    input_names=["values", "far"],
    output_names=["out"],
    source="out[thread_position_in_grid.x] = values[thread_position_in_grid.x + uint(far[0])];",
)
inputs = [mx.zeros(4096), mx.array([1 << 22], dtype=mx.int32)]
shapes = {"output_shapes": [(32,)], "output_dtypes": [mx.float32]}
mx.eval(kernel(inputs=inputs, grid=(32, 1, 1), threadgroup=(32, 1, 1), **shapes, stream=mx.gpu))
"""
CANARY_NAME: Final = "custom_kernel_canary"


@dataclass(slots=True)
class Findings:
    """What a command's stderr says."""

    has_started: bool = False
    reports: Counter[str] = field(default_factory=Counter)
    """How many name each kernel."""

    def read(self, line: str) -> None:
        """Take one more line into account."""
        self.has_started |= STARTED in line
        if REPORT.search(line):
            function = FUNCTION.search(line)
            self.reports[function.group(1) if function else UNNAMED] += 1

    def of(self, prefix: str) -> int:
        """How many reports name a kernel that begins so, or none."""
        return sum(
            count for name, count in self.reports.items() if name.startswith(prefix) or name == UNNAMED
        )


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Without other settings of Metal, of which some switch reports off."""
    return {name: value for name, value in given.items() if not name.startswith("MTL_")} | SETTINGS


def run(command: Sequence[str]) -> tuple[int, Findings]:
    """The command's status, and what its stderr said."""
    findings = Findings()
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment(os.environ)) as process:
        assert process.stderr is not None
        pass_on(process.stderr, findings)
    return process.returncode, findings


def pass_on(lines: Iterable[bytes], findings: Findings) -> None:
    for line in lines:
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
        findings.read(line.decode(errors="replace"))


def canary() -> int:
    _, findings = run([sys.executable, "-c", CANARY])
    if findings.of(CANARY_NAME):
        print("a read behind the input was reported: the validation works")
        return 0
    state = "is on" if findings.has_started else "did not start"
    print(f"a read behind the input was not reported, and the validation {state}: its silence means nothing")
    return 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--canary", action="store_true", help="try the validation itself")
    parser.add_argument("command", nargs="*", metavar="COMMAND")
    options = parser.parse_args(arguments)
    if options.canary == bool(options.command):
        parser.error("give a command or --canary")
    if options.canary:
        return canary()
    status, findings = run(options.command)
    for name, count in findings.reports.most_common():
        print(f"{count} reports: {name}")
    if status:
        return status
    if not findings.has_started:
        print(f"the validation did not start: no {STARTED!r} on stderr")
        return 1
    print(f"shader validation: {findings.of(OURS)} reports of our kernels")
    return 1 if findings.of(OURS) else 0


if __name__ == "__main__":
    sys.exit(main())
