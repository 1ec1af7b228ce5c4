"""The sub-command `lm-eval`: lm-eval's own command line with `--model mlx`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mlx_eval.harness
from mlx_eval.errors import UnknownNameError
from mlx_eval.harness import register

pytest.importorskip("lm_eval")

DEMO_TASKS = Path(mlx_eval.harness.__file__).parent / "demo_tasks"


def test_its_words_go_on_unparsed(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(register, "run_command_line", lambda words: seen.append(list(words)))
    words = ["run", "--some-option", "a_b", "--", "--x"]
    assert command("lm-eval", *words).status == 0
    assert command("lm_eval", *words).status == 0
    assert seen == [words, words]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("Tasks not found: x"), "mlx_eval: lm-eval: Tasks not found: x\n"),
        (ConnectionError("no\nnetwork"), "mlx_eval: lm-eval: no network\n"),
        (UnknownNameError("unknown model argument"), "mlx_eval: unknown model argument\n"),
    ],
)
def test_what_lm_eval_refuses_is_one_line(
    command: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", fail)
    finished = command("lm-eval", "run")
    assert (finished.status, finished.out, finished.err) == (1, "", message)


def test_an_evaluation(tmp_path: Path) -> None:
    """In a process of its own: lm-eval's command line sets up logging for good."""
    line = [sys.executable, "-m", "mlx_eval", "lm-eval", "run", "--model", "mlx"]
    line += ["--model_args", "pretrained=demo,dtype=float32,max_length=400", "--tasks", "demo_sums"]
    line += ["--include_path", str(DEMO_TASKS), "--limit", "2"]
    finished = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "|demo_sums|" in finished.stdout
    assert "max_length=400" in finished.stdout or "'max_length': 400" in finished.stdout
