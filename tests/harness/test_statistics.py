"""Where the time went, on a clock that is set by hand."""

from __future__ import annotations

import logging

import pytest

from mlx_eval.harness import statistics as module
from mlx_eval.harness.statistics import ANSWERED, ASKED, FINGERPRINT, FIRST_BATCH, RunStatistics, Stopwatch


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module.time, "perf_counter", clock)
    return clock


def test_a_stage_gathers_its_time_over_several_blocks(clock: Clock) -> None:
    stopwatch = Stopwatch({"imports": 1.0})
    for taken in (2.0, 0.5):
        with stopwatch.timed("imports"):
            clock.now += taken
        clock.now += 10
    assert stopwatch.seconds == {"imports": 3.5}


def test_time_counts_up_to_an_error_too(clock: Clock) -> None:
    stopwatch = Stopwatch()

    def fail() -> None:
        with stopwatch.timed("score"):
            clock.now += 3
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert stopwatch.seconds == {"score": 3.0}
    assert stopwatch.moments[ANSWERED] == 103.0


def test_requests_are_asked_first_once_and_answered_last_last(clock: Clock) -> None:
    statistics = RunStatistics()
    for stage in ("encode", "score", "generate", FINGERPRINT):
        clock.now += 1
        with statistics.timed(stage):
            clock.now += 2
    assert statistics.moments == {ASKED: 101.0, ANSWERED: 109.0}
    assert set(statistics.seconds.values()) == {2.0}


def test_a_moment_is_marked_the_first_time_only(clock: Clock) -> None:
    statistics = RunStatistics()
    for _ in range(3):
        clock.now += 1
        statistics.mark(FIRST_BATCH)
    assert statistics.moments == {FIRST_BATCH: 101.0}


def test_moments_are_not_for_run_json() -> None:
    statistics = RunStatistics()
    statistics.mark(FIRST_BATCH)
    statistics.seconds["score"] = 1.23456
    assert "moments" not in statistics.as_dict()
    assert statistics.as_dict()["seconds"] == {"score": 1.235}


def test_notes_are_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    statistics = RunStatistics()
    with caplog.at_level(logging.WARNING):
        statistics.note("too long", 0)
        statistics.note("too long")
        statistics.note("too long", 2)
    assert statistics.as_dict()["warnings"] == [{"text": "too long", "requests": 3}]
    assert [record.getMessage() for record in caplog.records] == [
        "1 request: too long",
        "2 requests: too long",
    ]
