from __future__ import annotations

import json

import pytest

from benchmarks.memory import in_turn
from benchmarks.side_by_side.works import Work
from tests.benchmarks.works import CHOICES, ROLLING, WORK


@pytest.mark.parametrize("work", [WORK, ROLLING])
def test_what_is_written_is_read(work: Work) -> None:
    assert Work.from_json(work.to_json()) == work


def test_other_requests_have_another_digest() -> None:
    assert WORK.digest() == Work.from_json(WORK.to_json()).digest()
    assert WORK.digest() != WORK.first(3).digest()


def test_the_first_questions_have_all_their_requests() -> None:
    part = WORK.first(2)
    assert part.num_questions == 2
    assert part.texts == WORK.texts[: 2 * len(CHOICES)]
    assert WORK.first(100) == WORK


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "generate_until"}, "kind is"),
        ({"texts": [["a context only"]] * len(WORK.texts)}, "kind is"),
        ({"questions": [0]}, "one question's number"),
    ],
)
def test_requests_that_do_not_fit_together_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Work.from_json(json.dumps({**json.loads(WORK.to_json()), **change}))


def test_requests_without_questions_are_refused() -> None:
    fields = json.loads(WORK.to_json())
    del fields["questions"]
    with pytest.raises(ValueError, match="questions"):
        Work.from_json(json.dumps(fields))


def test_questions_are_taken_of_each_work_in_turn_while_it_has_any() -> None:
    short = WORK.first(1)
    mixed = in_turn([short, WORK], 4)
    assert mixed.num_questions == 4
    size = len(CHOICES)
    assert [mixed.texts[place * size] for place in range(4)] == [
        short.texts[0],
        WORK.texts[0],
        WORK.texts[size],
        WORK.texts[2 * size],
    ]
