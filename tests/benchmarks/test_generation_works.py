from __future__ import annotations

import argparse
import json

import pytest

from benchmarks.generation import ways_to_speculate
from benchmarks.side_by_side.generation_works import GenerationWork
from tests.benchmarks.generations import GENERATION


def test_what_is_written_is_read() -> None:
    assert GenerationWork.from_json(GENERATION.to_json()) == GENERATION


def test_the_first_questions_keep_their_options_and_are_another_work() -> None:
    part = GENERATION.first(2)
    assert (part.prompts, part.options) == (GENERATION.prompts[:2], GENERATION.options[:2])
    assert part.digest() != GENERATION.digest() == GENERATION.first(None).digest()


def test_stops_are_those_of_the_question_in_whichever_form_they_come() -> None:
    assert [GENERATION.stops(index) for index in range(3)] == [("\n", "é"), ("zz",), ()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "generate_until"}, "fields"),
        ({"options": [{"max_gen_toks": 3}]}, "one set of options"),
        ({"prompts": [], "options": []}, "there must be prompts"),
        ({"options": [{"until": ["x"]}] * 3}, "max_gen_toks"),
    ],
)
def test_prompts_that_do_not_fit_together_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GenerationWork.from_json(json.dumps({**json.loads(GENERATION.to_json()), **change}))


def test_ways_to_speculate_are_a_list_of_words_and_numbers() -> None:
    assert ways_to_speculate("off,auto,4") == ["off", "auto", "4"]
    with pytest.raises(argparse.ArgumentTypeError, match="off, auto"):
        ways_to_speculate("off,sometimes")
