"""The sub-command `doctor`."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Any

import pytest

from mlx_eval.app import doctor
from mlx_eval.models import runtime


def facts(out: str) -> dict[str, str]:
    pairs = (line.split("  ", 1) for line in out.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, value in pairs}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set what the machine is taken for."""

    def set_machine(**changes: Any) -> None:
        known = runtime.Device("Chip", "cpu", 8 * 2**30, "Linux 6.1", runtime.OPENBLAS)
        device = dataclasses.replace(known, **changes)
        monkeypatch.setattr(runtime, "device", lambda: device)

    return set_machine


def test_the_machine(command: Any, machine: Any) -> None:
    machine()
    status, out, err = command("doctor")
    assert (status, err) == (0, "")
    found = facts(out)
    assert (found["chip"], found["memory"], found["device"]) == ("Chip", "8.0 GiB", "CPU")
    assert found["mlx"] == importlib.metadata.version("mlx")
    assert out.endswith("\nnothing is wrong\n")


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"blas": runtime.BUILT_IN_BLAS}, "MLX is using its slow built-in BLAS"),
        ({"os": "macOS 14.5", "blas": "Accelerate"}, "a native arm64 Python is needed"),
    ],
)
def test_what_is_wrong_is_said_and_is_the_exit_status(
    command: Any, machine: Any, changes: dict[str, str], advice: str
) -> None:
    machine(**changes)
    status, out, _ = command("doctor")
    problems = [line for line in out.splitlines() if line.startswith("problem: ")]
    assert status == 1
    assert len(problems) == 1
    assert advice in problems[0]


def test_without_lm_eval(command: Any, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine()

    def version(package: str) -> str:
        if package == "lm-eval":
            raise importlib.metadata.PackageNotFoundError(package)
        return importlib.metadata.version(package)

    monkeypatch.setattr(doctor, "version", version)
    status, out, _ = command("doctor")
    assert status == 1
    assert "problem: lm-eval is not installed: pip install 'mlx-eval[harness]'" in out


def test_a_model(command: Any) -> None:
    status, out, _ = command("doctor", "demo", "--dtype", "float32")
    found = facts(out)
    assert status == (1 if "problem: " in out else 0)
    assert found["architecture"] == "llama"
    assert found["head"] == "on scored positions only"
    assert found["weights"].endswith("MiB, float32, not quantised")
    assert len(found["fingerprint"]) == 16


def test_what_is_no_model(command: Any) -> None:
    status, out, err = command("doctor", "./nothing")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "./nothing does not exist" in err
