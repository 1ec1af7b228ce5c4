"""Guesses from where a text's last tokens stood before, against a scan of the whole text."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from mlx_eval.engine.lookup import LONGEST, PLACES, Lookup


class Found(NamedTuple):
    length: int
    source: int


def scan(ids: list[int]) -> Found:
    """The longest agreement among the newest places of the last two tokens; of equal ones the newest."""
    best, num_places = Found(0, 0), 0
    for end in range(len(ids) - 1, 1, -1):
        if num_places < PLACES and ids[end - 2 : end] == ids[-2:]:
            num_places += 1
            length = 2
            while length < min(LONGEST, end) and ids[end - length - 1] == ids[-length - 1]:
                length += 1
            best = max(best, Found(length, end), key=lambda found: found.length)
    return best


def copied(ids: list[int], source: int, count: int) -> list[int]:
    """What copying token after token gives, the copies included."""
    text = list(ids)
    for index in range(count):
        text.append(text[source + index])
    return text[len(ids) :]


@pytest.mark.parametrize("vocab", [1, 2, 3, 8, 40])
def test_a_text_is_drafted_from_the_longest_of_the_newest_matches(vocab: int) -> None:
    rng = random.Random(vocab)
    for size in range(120):
        ids = [rng.randrange(vocab) for _ in range(size)]
        lookup, found = Lookup(ids), scan(ids)
        assert lookup.length == found.length
        assert lookup.draft(6) == (copied(ids, found.source, 6) if found.length else [])


@pytest.mark.parametrize("vocab", [2, 5, 40])
def test_a_guess_that_is_right_is_followed_and_one_that_is_wrong_is_looked_up_anew(vocab: int) -> None:
    rng = random.Random(vocab)
    ids = [rng.randrange(vocab) for _ in range(50)]
    lookup, found = Lookup(ids), scan(ids)
    num_right = 0
    for _ in range(400):
        token = rng.choice([rng.randrange(vocab), *lookup.draft(1)])
        is_right = found.length > 0 and ids[found.source] == token
        assert lookup.push(token) == is_right
        ids.append(token)
        found = Found(found.length + 1, found.source + 1) if is_right else scan(ids)
        assert lookup.length == min(found.length, LONGEST)
        assert lookup.draft(5) == (copied(ids, found.source, 5) if found.length else [])
        num_right += is_right
    assert 20 < num_right < 380


def test_a_loop_is_drafted_over_several_rounds() -> None:
    assert Lookup([9, 1, 2, 3, 1, 2, 3]).draft(8) == [1, 2, 3, 1, 2, 3, 1, 2]


@pytest.mark.parametrize("ids", [[], [1], [1, 1], [1, 2, 3, 4]])
def test_without_a_match_there_is_no_draft(ids: list[int]) -> None:
    lookup = Lookup(ids)
    assert (lookup.length, lookup.draft(4)) == (0, [])


def test_the_end_of_the_text_is_no_match_of_itself() -> None:
    assert Lookup([1, 2]).length == 0
    assert Lookup([1, 2, 3, 1, 2]).draft(1) == [3]
