from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mlx_eval import config
from mlx_eval.engine.answers import AnswerRow
from mlx_eval.engine.arrivals import Arrivals
from mlx_eval.engine.batches import Limits
from mlx_eval.engine.row_caches import RowCaches
from mlx_eval.engine.steps import Token
from mlx_eval.records import GenerationRequest
from tests.engine.decoders import (
    SCRIPTED,
    allowed,
    as_text,
    attention_of,
    distinct_tokens,
    random_model,
    set_run_tokens,
)
from tests.tiny import ScriptedModel


def answer_rows(prompts: Sequence[Sequence[int]], limits: int | Sequence[int] = 8) -> list[AnswerRow]:
    counts = [limits] * len(prompts) if isinstance(limits, int) else limits
    return [
        AnswerRow(index, GenerationRequest(tuple(prompt), count), as_text, frozenset(), None)
        for index, (prompt, count) in enumerate(zip(prompts, counts, strict=True))
    ]


class Waiting:
    """Rows that wait for a batch of a `ScriptedModel`."""

    def __init__(self, rows: Sequence[AnswerRow], max_rows: int = 4, **limits: Any) -> None:
        self.model = ScriptedModel("abc")
        self.caches = RowCaches(SCRIPTED.caches(self.model))
        self.arrivals = Arrivals(self.model, SCRIPTED, rows, Limits(**{"max_rows": 8, **limits}), max_rows)

    def take(self) -> list[int]:
        """Have the next rows join; their numbers."""
        taken = self.arrivals.take(self.caches)
        if taken is None:
            return []
        rows, read = taken
        self.caches.join(read)
        assert read.lengths.tolist() == [len(row.ids) - 1 for row in rows]
        return [row.index for row in rows]

    def take_all(self) -> list[int]:
        """All rows that have room now."""
        found: list[int] = []
        while numbers := self.take():
            found += numbers
        return found

    def go(self, places: Sequence[int]) -> None:
        """Have rows leave."""
        self.caches.leave(places)
        self.caches.compact()


def test_without_rows_there_is_nothing_to_take() -> None:
    waiting = Waiting([])
    assert waiting.arrivals.take(waiting.caches) is None
    assert waiting.model.calls == []


def test_nothing_is_read_before_rows_are_taken_and_no_more_than_have_room() -> None:
    waiting = Waiting(answer_rows([[row, 1, 2] for row in range(20)]), max_rows=4)
    assert waiting.model.calls == []
    assert len(waiting.take_all()) == 4
    assert waiting.model.calls == [(4, 2)]  # as many rows as the batch, though 8 were allowed
    assert waiting.take() == []
    waiting.go([0])
    assert len(waiting.take_all()) == 1
    assert waiting.model.calls == [(4, 2)] * 2
    waiting.go([0, 1])
    assert len(waiting.take_all()) == 2  # of those that were read before
    assert waiting.model.calls == [(4, 2)] * 2
    waiting.go([0, 1, 2, 3])
    assert len(waiting.take_all()) == 4
    assert waiting.model.calls == [(4, 2)] * 3


def test_long_limits_come_first_and_those_of_one_power_of_two_are_alike() -> None:
    limits = [1, 100, 3, 70, 16, 2, 31, 127]
    waiting = Waiting(answer_rows([[row, 5] for row in range(8)], limits), max_rows=8)
    order = waiting.take_all()
    groups = [sorted(order[begin:end]) for begin, end in ((0, 3), (3, 5), (5, 7), (7, 8))]
    assert groups == [[1, 3, 7], [4, 6], [2, 5], [0]]


def test_rows_that_are_begun_again_wait_by_what_is_left_of_their_limit() -> None:
    rows = answer_rows([[1, 5], [2, 5, 6]], limits=[100, 40])
    for _ in range(90):
        rows[0].take(Token(0, 9, -1.0))
    waiting = Waiting(rows, max_rows=1)
    assert waiting.take() == [1]
    waiting.go([0])
    taken = waiting.arrivals.take(waiting.caches)
    assert taken is not None
    assert taken[1].lengths.tolist() == [2 + 90 - 1]
    assert taken[0][0].start().last_id == 9


def test_rows_have_room_by_the_memory_of_their_prompts_and_answers() -> None:
    """8 bytes a token: a prompt of 10 tokens, the last of which is not read, and an answer of 11 take 160."""
    prompts = [[row] * 10 for row in range(6)]
    # a quarter of the memory is for reading
    waiting = Waiting(answer_rows(prompts, 11), max_rows=6, kv_bytes=640)
    assert waiting.arrivals.rows_bytes == 480
    assert len(waiting.take_all()) == 3
    waiting.go([1])
    assert len(waiting.take_all()) == 1


def test_a_row_joins_an_empty_batch_whatever_it_takes() -> None:
    waiting = Waiting(answer_rows([[1] * 30, [2] * 30], 50), kv_bytes=8)
    assert len(waiting.take()) == 1
    assert waiting.take() == []
    waiting.go([0])
    assert len(waiting.take()) == 1


def test_memory_of_long_answers_is_set_aside_up_to_what_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "EXPECTED_TOKENS", 11)
    waiting = Waiting(answer_rows([[row] * 10 for row in range(6)], 10**6), max_rows=6, kv_bytes=640)
    assert len(waiting.take_all()) == 3


def test_rows_are_as_wide_as_the_widest_in_the_batch() -> None:
    """All rows have places in one buffer."""
    rows = answer_rows([[1] * 41, *([row] * 3 for row in range(2, 8))], [15, *[7] * 6])
    waiting = Waiting(rows, max_rows=8, kv_bytes=1280)
    assert waiting.take() == [0]
    # 960 bytes, 8 * 40 of which each row takes beside the first: without it, each would take 72
    assert len(waiting.take_all()) == 2
    waiting.go([0])
    assert len(waiting.take_all()) == 4


def test_a_prompt_of_one_id_joins_with_nothing_read() -> None:
    waiting = Waiting(answer_rows([[5], [6, 7], [8]]))
    found = []
    while taken := waiting.arrivals.take(waiting.caches):
        rows, read = taken
        found.append(([row.index for row in rows], read.lengths.tolist(), read.layers == []))
        waiting.caches.join(read)
    assert found == [([1], [1], False), ([0, 2], [0, 0], True)]
    assert waiting.model.calls == [(1, 1)]


def test_counts_are_those_of_the_plans() -> None:
    rng = np.random.default_rng(0)
    stem = rng.integers(10, 200, 60).tolist()
    prompts = [[*stem, *rng.integers(10, 200, 8).tolist()] for _ in range(5)] + [[201], [202, 203, 204]]
    waiting = Waiting(answer_rows(prompts), max_rows=8)
    assert len(waiting.take_all()) == 7
    counts = waiting.arrivals.counts
    assert counts.unique_tokens == distinct_tokens(prompts) == 60 + 5 * 8 + 1 + 3
    assert counts.tokens == counts.unique_tokens
    assert counts.forwards == len(waiting.model.calls)
    computed = sum(rows * length for rows, length in waiting.model.calls)
    assert computed == counts.tokens - len(prompts) + counts.padding


def test_what_is_not_taken_is_not_counted_as_computed() -> None:
    waiting = Waiting(answer_rows([[row, 1, 2] for row in range(20)]), max_rows=4)
    waiting.take_all()
    assert waiting.arrivals.counts.forwards == 1
    assert waiting.arrivals.counts.padding == 0


def test_rows_behind_a_long_stem_take_memory_for_what_is_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    model, (sharing, _) = random_model(), allowed()
    prompts = [[9] * 60 + [10 + row] * 3 for row in range(8)]
    row_bytes = (63 - 1 + 8) * sharing.cache.token_bytes
    limits = Limits(8, kv_bytes=4 * row_bytes)

    def room(run_tokens: int) -> int:
        set_run_tokens(monkeypatch, run_tokens)
        caches = RowCaches(sharing.caches(model))
        arrivals = Arrivals(model, sharing, answer_rows(prompts), limits, 8)
        with attention_of(model, sharing):
            taken = arrivals.take(caches)
            while taken is not None:
                caches.join(taken[1])
                taken = arrivals.take(caches)
        return caches.num_rows

    assert room(run_tokens=10**6) == 3
    assert room(run_tokens=0) == 8
