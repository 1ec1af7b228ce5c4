from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mlx_eval.records import ScoringRequest


def test_any_sequence_of_ids_becomes_an_int32_array() -> None:
    for ids in ((1, 2), [1, 2], range(1, 3), np.array([1, 2], dtype=np.int64)):
        request = ScoringRequest(ids, ids)
        for array in (request.context_ids, request.continuation_ids):
            assert array.dtype == np.int32
            assert array.tolist() == [1, 2]


def test_an_int32_array_is_shared_not_copied() -> None:
    context = np.array([1, 2], dtype=np.int32)
    requests = [ScoringRequest(context, np.array([token], dtype=np.int32)) for token in (3, 4)]
    assert all(request.context_ids is context for request in requests)


def test_requests_are_equal_by_value_and_by_where_they_are_split() -> None:
    one, same, other = (
        ScoringRequest((1, 2), (3, 4)),
        ScoringRequest([1, 2], [3, 4]),
        ScoringRequest((1,), (2, 3, 4)),
    )
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != ((1, 2), (3, 4))
    assert {one, same, other} == {one, other}


def test_a_request_is_frozen() -> None:
    request = ScoringRequest((1,), (2,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.context_ids = request.continuation_ids  # type: ignore[misc]
