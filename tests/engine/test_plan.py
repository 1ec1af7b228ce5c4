from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_eval.engine.plan import PAD_ID, first_position, input_ids, plan_scoring
from mlx_eval.records import ScoringRequest

IDS = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple)
REQUESTS = st.lists(st.builds(ScoringRequest, IDS, IDS), max_size=12)


def test_no_requests_make_no_batches() -> None:
    plan = plan_scoring([], 8)
    assert plan.batches == ()
    assert (plan.num_requests, plan.naive_tokens, plan.planned_tokens, plan.padding) == (0, 0, 0, 0)


def test_requests_that_feed_the_same_tokens_share_a_row() -> None:
    requests = [
        ScoringRequest((1, 2), (3, 4)),
        ScoringRequest((1, 2), (3, 9)),
        ScoringRequest((1,), (2, 3, 5)),
    ]
    plan = plan_scoring(requests, 8)
    assert [row.tokens for batch in plan.batches for row in batch.rows] == [(1, 2, 3)]
    assert plan.batches[0].rows[0].requests == (0, 1, 2)
    assert (plan.naive_tokens, plan.planned_tokens, plan.padding) == (9, 3, 0)
    assert [first_position(request) for request in requests] == [1, 1, 0]


def test_counts_of_batches_and_padding() -> None:
    lengths = [3, 1, 5, 2, 4]
    requests = [ScoringRequest(tuple(range(length)), (7,)) for length in lengths]
    plan = plan_scoring(requests, 2)
    assert [[len(row.tokens) for row in batch.rows] for batch in plan.batches] == [[5, 4], [3, 2], [1]]
    assert (plan.planned_tokens, plan.padding) == (15, 2)
    assert plan.batches[0].token_array().tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, PAD_ID]]
    assert plan.batches[0].token_array().dtype == np.int32


@given(REQUESTS, st.integers(1, 5))
def test_every_request_is_answered_by_one_row_with_its_tokens(
    requests: list[ScoringRequest], size: int
) -> None:
    plan = plan_scoring(requests, size)
    rows = [row for batch in plan.batches for row in batch.rows]
    answered = sorted(index for row in rows for index in row.requests)
    assert answered == list(range(len(requests)))
    assert all(input_ids(requests[index]) == row.tokens for row in rows for index in row.requests)
    assert len({row.tokens for row in rows}) == len(rows)
    assert all(len(batch.rows) <= size for batch in plan.batches)
    assert plan.padding == sum(batch.length - len(row.tokens) for batch in plan.batches for row in batch.rows)


@given(REQUESTS, st.integers(1, 5), st.randoms(use_true_random=False))
def test_the_order_of_requests_does_not_change_the_rows(
    requests: list[ScoringRequest], size: int, random: object
) -> None:
    shuffled = list(requests)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    first = [[row.tokens for row in batch.rows] for batch in plan_scoring(requests, size).batches]
    second = [[row.tokens for row in batch.rows] for batch in plan_scoring(shuffled, size).batches]
    assert first == second


@pytest.mark.parametrize("size", [1, 3, 100])
def test_longest_rows_come_first(size: int) -> None:
    requests = [ScoringRequest((1,) * length, (2,)) for length in (2, 9, 4, 7)]
    lengths = [batch.length for batch in plan_scoring(requests, size).batches]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 9
