"""The progress bar: on a terminal alone, in tokens, with the time left."""

from __future__ import annotations

import io
import itertools
import re
from contextlib import redirect_stderr

import pytest

from mlx_eval.harness.progress import TokenProgress


class Terminal(io.StringIO):
    """Where stderr would be shown."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes each time that the bar looks at the clock, so that it shows every step."""
    monkeypatch.setattr("tqdm.std.time", itertools.count(1000.0).__next__)


def last_line(terminal: Terminal) -> str:
    return terminal.getvalue().rstrip().rpartition("\r")[2]


def test_a_bar_counts_tokens_and_tells_the_time_left() -> None:
    terminal = Terminal()
    with redirect_stderr(terminal), TokenProgress("loglikelihood", total=4000) as progress:
        progress.add(1000)
        shown = last_line(terminal)
    assert shown.startswith("loglikelihood:  25%|")
    assert "1.00k/4.00k" in shown
    elapsed, left = map(int, re.findall(r"00:(\d\d)<00:(\d\d)", shown)[0])
    assert 0 < left <= 3 * elapsed, "three quarters are left; the bar's rate favours what came last"
    assert shown.endswith("tok/s]")


def test_tokens_that_are_not_needed_leave_the_total() -> None:
    terminal = Terminal()
    with redirect_stderr(terminal), TokenProgress("generate_until", total=300) as progress:
        progress.add(100)
        progress.drop(200)
    assert last_line(terminal).startswith("generate_until: 100%|")
    assert "100/100" in last_line(terminal)


def test_the_bar_is_finished_when_the_work_fails() -> None:
    terminal = Terminal()

    def fail() -> None:
        with TokenProgress("loglikelihood", total=10) as progress:
            progress.add(5)
            raise RuntimeError

    with redirect_stderr(terminal), pytest.raises(RuntimeError):
        fail()
    assert terminal.getvalue().endswith("\n"), "the error begins on a line of its own"


@pytest.mark.parametrize(
    ("stream", "disable"), [(Terminal(), True), (io.StringIO(), False)], ids=["not wanted", "no terminal"]
)
def test_nothing_is_shown(stream: io.StringIO, disable: bool) -> None:
    with redirect_stderr(stream), TokenProgress("loglikelihood", total=10, disable=disable) as progress:
        progress.add(5)
        progress.drop(5)
    assert stream.getvalue() == ""


def test_nothing_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    with redirect_stderr(terminal), TokenProgress("loglikelihood", total=10) as progress:
        progress.add(10)
    assert "10.0/10.0" in terminal.getvalue()
    assert capsys.readouterr().out == ""
