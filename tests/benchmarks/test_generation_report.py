from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from benchmarks.side_by_side.generation_backends import Answer, GenerationCounts
from benchmarks.side_by_side.generation_report import (
    Difference,
    Line,
    differences_text,
    make_line,
    speculation_table,
    table,
)
from benchmarks.side_by_side.generation_worker import GenerationMeasurement
from benchmarks.side_by_side.near_ties import Gap, Parting

COUNTS = GenerationCounts(
    prompt_tokens=1000,
    prefill_tokens=300,
    prefill_padding=10,
    prefill_forwards=4,
    steps=50,
    generated_tokens=200,
    discarded_tokens=3,
    unique_tokens=290,
    peak_rows=5,
)
OURS = GenerationMeasurement(
    wall=2.0,
    cpu=4.0,
    counts=COUNTS,
    peak_mlx_bytes=10**9,
    peak_rss_bytes=2 * 10**9,
    answers=(Answer("a", (1, 2)), Answer("b", (3,))),
    self_test_wall=0.5,
)
PEER = replace(
    OURS,
    wall=5.0,
    cpu=10.0,
    counts=replace(COUNTS, prefill_padding=None, unique_tokens=None, peak_rows=None, steps=100),
    peak_mlx_bytes=None,
    self_test_wall=None,
)
TIE = Difference(Parting(0, 7, 3), Gap(2e-5, 1))
WRONG = Difference(Parting(1, 9, 4), Gap(0.5, 1))
ELSEWHERE = Difference(Parting(1, 9, None), None)


def line(
    found: GenerationMeasurement, *differences: Difference, ours: GenerationMeasurement | None = OURS
) -> Line:
    backend = "ours" if found is OURS else "hf"
    return make_line("work", found, ours, differences, backend=backend, speculate=None, batch_size="8")


def test_measurements_written_as_json_are_read_back() -> None:
    for found in (OURS, PEER):
        assert GenerationMeasurement.from_dict(json.loads(json.dumps(asdict(found)))) == found


def test_a_peer_is_compared_with_ours() -> None:
    found = line(PEER, TIE)
    assert (found.cpu_ratio, found.wall_ratio, found.same_prompts) == (2.5, 2.5, True)
    assert found.differences == (TIE,)
    assert found.num_unexplained == 0
    assert "1 of 2" in table([found])
    assert "2.50" in table([found])


def test_ours_is_not_compared_with_itself() -> None:
    assert line(OURS).differences is None
    assert line(OURS).cpu_ratio == 1.0


def test_without_ours_there_is_no_ratio() -> None:
    found = line(PEER, ours=None)
    assert (found.cpu_ratio, found.same_prompts, found.differences) == (None, None, None)


@pytest.mark.parametrize(("difference", "says"), [(WRONG, "NO near-tie"), (ELSEWHERE, "cut elsewhere")])
def test_what_rounding_does_not_explain_is_counted_and_named(difference: Difference, says: str) -> None:
    found = line(PEER, TIE, difference)
    assert found.num_unexplained == 1
    text = differences_text([found])
    assert "question 0, token 7: gap 2.0e-05" in text
    assert says in text


def test_other_prompts_are_named_in_the_table() -> None:
    found = line(replace(PEER, counts=replace(PEER.counts, prompt_tokens=999)))
    assert found.same_prompts is False
    assert "999 (others!)" in table([found])


def test_drafting_is_compared_with_the_first_line_of_the_same_work() -> None:
    drafting = replace(
        OURS, cpu=3.0, counts=replace(COUNTS, steps=40, drafted_tokens=20, accepted_tokens=10), wall=1.0
    )
    lines = [
        make_line("work", found, OURS, (), backend="ours", speculate=way, batch_size="auto")
        for way, found in (("off", OURS), ("auto", drafting))
    ]
    text = speculation_table([*lines, line(PEER)])
    assert "0.800" in text  # steps
    assert "0.750" in text  # CPU seconds
    assert "0.500" in text  # wall time
    assert len(text.splitlines()) == 2 + 2
