"""What is drafted and when, on machines whose seconds follow a known law.

`decode` drives a `Speculation` as decoding does, one step behind while steps are plain; its tokens come from texts
that are known beforehand, its seconds from a formula.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest

from mlx_eval.engine.speculation import LONGEST_WAIT, MOST, Speculation

Law = Callable[[int, int], float]
"""Seconds of a step of so many rows with so many tokens each."""

LAWS: dict[str, Law] = {
    "memory-bound": lambda rows, length: 1 + 0.002 * rows * length,
    "compute-bound": lambda rows, length: 0.05 * rows * length + 0.02,
    "either": lambda rows, length: max(1, rows * length / 16) + 0.1,
    "dear second token": lambda rows, length: 1 + 0.01 * rows * length + 0.5 * (length > 1),
}
WAIT = 0.03
"""Share of a plain step that is lost where none is on its way."""


class Text(NamedTuple):
    prompt: list[int]
    answer: list[int]


class Run(NamedTuple):
    seconds: float
    lengths: list[int]
    """Tokens a row of every step."""


def texts(count: int, copied: float, seed: int = 0) -> list[Text]:
    """Texts whose answers consist of copied and new stretches, so many of them copied."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        prompt, answer = new_ids(rng, 300), list[int]()
        size = rng.randrange(100, 300)
        while len(answer) < size:
            stretch = rng.randrange(8, 40)
            if rng.random() < copied:
                start = rng.randrange(len(prompt) - stretch)
                answer += prompt[start : start + stretch]
            else:
                answer += new_ids(rng, stretch)
        made.append(Text(prompt, answer[:size]))
    return made


def new_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(5000) for _ in range(count)]


def decode(
    given: Sequence[Text],
    law: Law,
    speculation: Speculation | None,
    *,
    rows: int = 8,
    noise: float = 0.0,
    first: float = 1.0,
) -> Run:
    """Decode texts in batches that refill; none: plain steps only.

    Args:
        given: the texts.
        law: seconds of a step.
        speculation: what drafts.
        rows: of a full batch.
        noise: standard deviation of the logarithm of what the speculation hears of seconds; one step in fifty then
            takes five times as long. What the run took is counted without.
        first: how many times as long the first step with so many tokens takes.
    """
    rng = random.Random(1)
    waiting, going = list(range(len(given)))[::-1], dict[int, int]()
    seconds, lengths, known_sizes = 0.0, list[int](), set[int]()
    sent: tuple[list[int], float] | None = None

    def cost(length: int) -> float:
        """Have a step computed and give the seconds that it seems to take."""
        nonlocal seconds
        lengths.append(length)
        seconds += law(len(going), length)
        size = len(going) * length
        spike = 5 if noise and rng.random() < 0.02 else 1
        slow = 1.0 if size in known_sizes else first
        known_sizes.add(size)
        return law(len(going), length) * math.exp(rng.gauss(0, noise)) * spike * slow

    def deliver(row: int) -> None:
        if row not in going:
            return
        token = given[row].answer[going[row]]
        going[row] += 1
        if going[row] == len(given[row].answer):
            del going[row]
            if speculation:
                speculation.end(row)
        elif speculation:
            speculation.push(row, [token])

    while waiting or going:
        while waiting and len(going) < rows:
            row = waiting.pop()
            going[row] = 0
            if speculation:
                speculation.start(row, given[row].prompt)
        num_rows = len(going)
        wants = speculation is not None and speculation.wants(num_rows)
        before, sent = sent, None if wants else (list(going), cost(1))
        if before is not None:
            for row in before[0]:
                deliver(row)
        if not before:
            seconds += WAIT * law(num_rows, 1)
        if speculation and not wants:
            speculation.stepped(num_rows, before[1] if before else 0.0)
        if not (speculation and wants and going):
            continue
        num_rows = len(going)
        drafts = speculation.drafts(num_rows)
        if drafts:
            took = cost(1 + max(map(len, drafts.values())))
            right = {row: num_right(given[row].answer[going[row] :], draft) for row, draft in drafts.items()}
            speculation.verified(num_rows, right, {row: len(draft) for row, draft in drafts.items()}, took)
            for row in list(going):
                for _ in range(1 + right.get(row, 0)):
                    deliver(row)
    return Run(seconds, lengths)


def num_right(ids: Sequence[int], draft: Sequence[int]) -> int:
    """How many drafted tokens are accepted; the last token of a text is the model's."""
    count = 0
    while count < min(len(draft), len(ids) - 1) and ids[count] == draft[count]:
        count += 1
    return count


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("copied", [0.0, 0.3, 0.8])
def test_auto_is_not_slower_than_plain_steps(law: str, rows: int, copied: float) -> None:
    """2 %: tries, and the wait where a draft was hoped for and is not there."""
    given = texts(max(4, rows), copied)
    for noise in (0.0, 0.15):
        plain = decode(given, LAWS[law], None, rows=rows, noise=noise)
        auto = decode(given, LAWS[law], Speculation(None), rows=rows, noise=noise)
        assert auto.seconds < 1.02 * plain.seconds


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("law", ["memory-bound", "either", "dear second token"])
def test_auto_gains_most_of_what_the_best_fixed_length_does_where_text_is_copied(law: str, rows: int) -> None:
    """Two thirds: it has to measure costs and acceptance first, and short runs are what is tested."""
    given = texts(12, 0.8)
    for noise in (0.0, 0.15):
        plain, auto, *fixed = (
            decode(given, LAWS[law], speculation, rows=rows, noise=noise).seconds
            for speculation in (None, Speculation(None), *map(Speculation, (1, 2, 4, 8, 16)))
        )
        assert plain > 1.2 * min(fixed)
        assert plain / auto - 1 > 2 / 3 * (plain / min(fixed) - 1)


def test_where_each_token_costs_as_much_as_the_first_drafts_end_after_a_few_tries() -> None:
    run = decode(texts(32, 0.3), lambda rows, length: 0.05 * rows * length, Speculation(None), rows=16)
    assert sum(length > 1 for length in run.lengths) <= 12
    assert len(run.lengths) > 300


def test_drafts_are_as_long_as_pays() -> None:
    """Rows that copy throughout: the longest where tokens cost nothing, four where only sixteen do."""
    rng = random.Random(0)
    prompt = new_ids(rng, 600)
    given = [Text(prompt, prompt[:500])] * 4
    free = decode(given, lambda rows, length: 1.0, Speculation(None), rows=4)
    assert free.lengths.count(1 + MOST) > len(free.lengths) / 2
    dear = decode(given, lambda rows, length: max(1, rows * length / 16) ** 2, Speculation(None), rows=4)
    assert dear.lengths.count(4) > len(dear.lengths) / 2


def test_a_first_step_that_takes_ten_times_as_long_does_not_end_drafts() -> None:
    given = texts(8, 0.8)
    run = decode(given, LAWS["memory-bound"], Speculation(None), first=10)
    assert sum(length > 1 for length in run.lengths) > 0.5 * len(run.lengths)


def test_drafts_go_on_when_rows_leave() -> None:
    """What plain steps of so many rows take need not be measured anew for each number of rows."""
    rng = random.Random(0)
    prompt = new_ids(rng, 600)
    given = [Text(prompt, prompt[: 100 + 60 * row]) for row in range(8)]
    run = decode(given, LAWS["memory-bound"], Speculation(None))
    assert run.lengths.count(1) <= 8


def test_drafts_come_back_when_text_is_copied_again() -> None:
    rng = random.Random(0)
    prompt = new_ids(rng, 400)
    run = decode([Text(prompt, new_ids(rng, 300) + prompt[:200])], LAWS["memory-bound"], Speculation(None))
    assert set(run.lengths[:300]) == {1}
    assert len(run.lengths) < 300 + 50


def test_drafts_come_back_when_a_busy_machine_becomes_free() -> None:
    rng = random.Random(0)
    prompt = new_ids(rng, 2000)
    steps = 0

    def law(rows: int, length: int) -> float:
        nonlocal steps
        steps += 1
        return float(length) if steps < 200 else 1.0

    run = decode([Text(prompt, prompt[:1900])], law, Speculation(None))
    assert sum(length > 1 for length in run.lengths[:60]) <= 6
    assert run.lengths[-50:].count(1 + MOST) > 25


def test_tries_become_rarer_but_do_not_end() -> None:
    """Texts of two tokens at random: drafts would gain if they were free, and they are not."""
    rng = random.Random(0)
    ids = [rng.randrange(2) for _ in range(6000)]
    run = decode([Text(ids[:50], ids[50:])], lambda rows, length: float(length), Speculation(None))
    tries = [index for index, length in enumerate(run.lengths) if length > 1]
    assert 4 <= len(tries) <= 15
    assert all(later - earlier < 2 * LONGEST_WAIT for earlier, later in itertools.pairwise(tries))


def test_a_fixed_length_is_drafted_wherever_there_is_a_match_and_no_clock_is_asked() -> None:
    given = texts(6, 0.5)
    cheap, dear = (
        decode(given, law, Speculation(5), rows=3) for law in (LAWS["memory-bound"], LAWS["compute-bound"])
    )
    assert cheap.lengths == dear.lengths
    assert set(cheap.lengths) == {1, 6}


def test_the_same_calls_give_the_same_drafts() -> None:
    given = texts(8, 0.5)
    runs = [decode(given, LAWS["either"], Speculation(None), noise=0.2) for _ in range(2)]
    assert runs[0] == runs[1]


def test_only_rows_with_a_match_have_drafts() -> None:
    speculation = Speculation(3)
    speculation.start(4, [1, 2, 3, 4, 5, 1, 2])
    speculation.start(7, [1, 2, 3])
    assert speculation.drafts(3) == {4: [3, 4, 5]}
    speculation.push(7, [1, 2])
    assert speculation.drafts(3) == {4: [3, 4, 5], 7: [3, 1, 2]}
    speculation.end(4)
    assert speculation.drafts(2) == {7: [3, 1, 2]}


@pytest.mark.parametrize("most", [3, None])
def test_without_rows_or_matches_nothing_is_wanted(most: int | None) -> None:
    speculation = Speculation(most)
    assert not speculation.wants(2)
    speculation.start(0, [1, 2, 3])
    assert not speculation.wants(2)
    assert speculation.drafts(2) == {}


def test_drafts_follow_what_is_wanted_when_no_step_is_on_its_way() -> None:
    """So a caller cannot go round for ever: each time either drafts are verified or a plain step is sent."""
    rng = random.Random(0)
    speculation = Speculation(None)
    ids = [rng.randrange(3) for _ in range(200)]
    speculation.start(0, ids[:100])
    for token in ids[100:]:
        speculation.drafts(1)  # all tokens are known from here on
        wants, drafts = speculation.wants(1), speculation.drafts(1)
        assert wants == bool(drafts)
        if drafts:
            speculation.verified(1, {0: 0}, {0: len(drafts[0])}, 1.0)
        else:
            speculation.stepped(1, 1.0)
        speculation.push(0, [token])


@pytest.mark.parametrize("most", [3, None])
def test_a_clock_that_stands_still_is_no_error(most: int | None) -> None:
    assert decode(texts(4, 0.8), lambda rows, length: 0.0, Speculation(most)).seconds == 0


def test_counts_say_what_was_drafted_accepted_and_saved() -> None:
    speculation = Speculation(4)
    speculation.verified(4, {0: 3, 1: 1}, {0: 4, 1: 4}, 1.0)
    speculation.verified(2, {0: 0}, {0: 4}, 1.0)
    assert (speculation.drafted, speculation.accepted, speculation.forwards) == (12, 4, 2)
    assert speculation.saved == 1.0
