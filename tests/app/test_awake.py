"""Holding a Mac awake, with a `caffeinate` of our own in the PATH."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mlx_eval import load_model
from mlx_eval.app import awake
from mlx_eval.app.awake import SAID, kept_awake
from mlx_eval.app.bench import Bench, BenchJob
from mlx_eval.app.evaluate import Job, evaluate
from mlx_eval.app.perplexity import text_perplexity
from mlx_eval.engine.score import Scorer
from mlx_eval.errors import ModelError
from mlx_eval.harness.lm import MLXEvalLM
from mlx_eval.harness.tasks import task_manager

WAIT_SECONDS = 10.0
"""For a process of a line of shell on a busy machine."""


@pytest.fixture
def caffeinate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A Mac whose `caffeinate` runs a shell script; gives the file that it writes its words and its process id to."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def install(rest: str) -> Path:
        notes = tmp_path / "notes"
        program = tmp_path / "caffeinate"
        program.write_text(f'#!/bin/sh\necho "$@" $$ > {notes}.part\nmv {notes}.part {notes}\n{rest}\n')
        program.chmod(0o755)
        return notes

    return install


def started(notes: Path) -> tuple[list[str], int]:
    """The words that it was given and its process id, once it runs."""
    end = time.monotonic() + WAIT_SECONDS
    while not notes.exists():
        assert time.monotonic() < end, "it was not started"
        time.sleep(0.01)
    *words, number = notes.read_text().split()
    return words, int(number)


def runs(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_runs_for_this_process_as_long_as_the_block(caffeinate: Any) -> None:
    notes = caffeinate("exec sleep 60")
    said: list[str] = []
    with kept_awake(said.append):
        words, process_id = started(notes)
        assert words == ["-i", "-w", str(os.getpid())]
        assert runs(process_id)
    assert not runs(process_id)
    assert said == [SAID]
    assert "\n" not in SAID


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_it_ends_when_the_block_fails(caffeinate: Any, error: type[BaseException]) -> None:
    notes = caffeinate("exec sleep 60")

    def fail() -> None:
        started(notes)
        raise error

    with pytest.raises(error), kept_awake():
        fail()
    assert not runs(started(notes)[1])


def test_it_ends_when_nothing_can_be_said(caffeinate: Any) -> None:
    notes = caffeinate("exec sleep 60")

    def closed(text: str) -> None:
        started(notes)
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError), kept_awake(closed):
        pytest.fail("the block was reached")
    assert not runs(started(notes)[1])


def test_one_that_does_not_heed_the_request_is_killed(
    caffeinate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(awake, "END_SECONDS", 0.1)
    notes = caffeinate("while :; do sleep 0.05; done")
    program = notes.with_name("caffeinate")
    program.write_text(program.read_text().replace("#!/bin/sh\n", "#!/bin/sh\ntrap '' TERM\n"))
    with kept_awake():
        _, process_id = started(notes)
    assert not runs(process_id)


def test_one_that_has_ended_by_itself_is_no_error(caffeinate: Any) -> None:
    notes = caffeinate("exit 1")
    with kept_awake():
        started(notes)


@pytest.mark.parametrize("text", [None, "no program"], ids=["missing", "not a program"])
def test_a_mac_without_it_computes_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("PATH", str(tmp_path))
    if text is not None:
        (tmp_path / "caffeinate").write_text(text)
        (tmp_path / "caffeinate").chmod(0o755)
    said: list[str] = []
    with kept_awake(said.append):
        done = True
    assert done
    assert said == []


def test_other_systems_are_left_alone(caffeinate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = caffeinate("exec sleep 60")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    said: list[str] = []
    with kept_awake(said.append):
        assert not notes.exists()
    assert said == []


def test_this_process_is_left_as_it_was(caffeinate: Any) -> None:
    """No signal handler and no open file stays behind."""
    notes = caffeinate("exec sleep 60")
    before = os.listdir("/dev/fd"), signal.getsignal(signal.SIGCHLD), signal.getsignal(signal.SIGINT)
    with kept_awake():
        started(notes)
    assert (
        os.listdir("/dev/fd"),
        signal.getsignal(signal.SIGCHLD),
        signal.getsignal(signal.SIGINT),
    ) == before


# ---------------------------------------------------------------- who is held awake


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which modules held the machine awake, and what was computed meanwhile."""
    events: list[str] = []
    for name in ("bench", "evaluate", "perplexity"):

        @contextmanager
        def recorded(on_stage: Callable[[str], None], name: str = name) -> Iterator[None]:
            on_stage(f"held by {name}")
            events.append(f"{name} begins")
            yield
            events.append(f"{name} ends")

        monkeypatch.setattr(f"mlx_eval.app.{name}.kept_awake", recorded)
    run = Scorer.run

    def watched(self: Scorer, *args: Any, **options: Any) -> None:
        events.append("scores")
        run(self, *args, **options)

    monkeypatch.setattr(Scorer, "run", watched)
    return events


def test_a_run_holds_it_while_tasks_are_evaluated(held: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setattr(
        "mlx_eval.harness.prepare.task_manager",
        lambda path=None, **rest: task_manager(path, include_defaults=False, **rest),
    )
    said: list[str] = []
    with pytest.raises(ModelError):
        evaluate(Job("./no_such_folder", ("demo_choice",)), said.append)
    assert held == said == []
    evaluate(Job("demo", ("demo_choice",), evaluation={"limit": 1}), said.append)
    assert held == ["evaluate begins", "scores", "evaluate ends"]
    assert said[0] == "held by evaluate"


def test_perplexity_holds_it_while_a_text_is_scored(held: list[str]) -> None:
    pytest.importorskip("lm_eval")
    said: list[str] = []
    text_perplexity(MLXEvalLM(load_model("demo")), "Ben hid the key.", said.append)
    assert held == ["perplexity begins", "scores", "perplexity ends"]
    assert said == ["held by perplexity"]


def test_bench_holds_it_while_it_measures(held: list[str]) -> None:
    bench = Bench(BenchJob("demo", batch_sizes=(1,), prompt_lengths=(4,), gen_tokens=2, repeat=1))
    assert held == []
    list(bench.measurements())
    assert held == ["bench begins", "scores", "scores", "bench ends"]
