"""The ways in which the kernels can run: plain MLX, the Metal source on the CPU, the Metal source on a GPU.

Also tells how many bugs were seeded into the kernels and how many of them the tests have caught.
"""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.kernels.ways import Way
from tests.msl.build import why_not
from tests.msl.emulate import Emulator

SEEDED = "seeded bug"
"""Property of a test's report that names the bug which the test seeds."""


@pytest.fixture(params=["reference", "emulated", "metal"])
def way(request: pytest.FixtureRequest) -> Way:
    """Each way that this machine has; the others are skipped with the reason."""
    if request.param == "reference":
        return Way("reference", None)
    if request.param == "emulated":
        if reason := why_not():
            pytest.skip(reason)
        return Way("emulated", Emulator())
    if not mx.metal.is_available():
        pytest.skip("no Metal here")
    from mlx_eval_kernels.launch import on_metal

    return Way("metal", on_metal)


@pytest.fixture
def emulated() -> None:
    """Skips where Metal source cannot be run on the CPU."""
    if reason := why_not():
        pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Properties of reports reach the process that sums up from those that ran the tests, too."""
    outcomes = {
        str(value): outcome
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        for name, value in report.user_properties
        if name == SEEDED
    }
    if not outcomes:
        return
    missed = sorted(bug for bug, outcome in outcomes.items() if outcome != "passed")
    terminalreporter.write_line(f"seeded bugs: {len(outcomes)} seeded, {len(outcomes) - len(missed)} caught")
    for bug in missed:
        terminalreporter.write_line(f"  missed: {bug}")
