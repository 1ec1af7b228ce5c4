"""Decides what is computed together, from token ids alone: Python and numpy, no model and no mlx.

Requests that feed the model the same tokens share one row, wherever their context ends:

    context 1 2, continuation 3 4        row 1 2 3     position 1 predicts 3, position 2 predicts 4
    context 1 2, continuation 3 9        the same row  position 1 predicts 3, position 2 predicts 9
    context 1,   continuation 2 3 5      the same row  position 0 predicts 2, 1 predicts 3, 2 predicts 5

Rows are sorted by length, so that a batch pads little, and then by their tokens, so that the order of
the requests does not change what is computed with what.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from mlx_eval.records import ScoringRequest

PAD_ID: Final = 0
"""Fills rows on the right; causal attention never looks there."""


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens that run through the model once."""

    tokens: tuple[int, ...]
    """Context and continuation without its last token."""
    requests: tuple[int, ...]
    """Indices of the requests that this row answers."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one forward pass."""

    rows: tuple[Row, ...]

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return max(len(row.tokens) for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return sum(len(row.tokens) for row in self.rows)

    def token_array(self) -> npt.NDArray[np.int32]:
        """[B, T], right-padded with `PAD_ID`."""
        array = np.full((len(self.rows), self.length), PAD_ID, dtype=np.int32)
        for index, row in enumerate(self.rows):
            array[index, : len(row.tokens)] = row.tokens
        return array


@dataclass(frozen=True, slots=True)
class ScoringPlan:
    """All batches of a call, and what they cost."""

    batches: tuple[Batch, ...]
    num_requests: int
    naive_tokens: int
    """Tokens that a pass of its own for each request would compute."""

    @property
    def planned_tokens(self) -> int:
        """Tokens that this plan computes, padding aside."""
        return sum(batch.num_tokens for batch in self.batches)

    @property
    def padding(self) -> int:
        """Positions computed for nothing."""
        return sum(len(batch.rows) * batch.length for batch in self.batches) - self.planned_tokens


def plan_scoring(requests: Sequence[ScoringRequest], batch_size: int) -> ScoringPlan:
    """Pack requests into batches of at most `batch_size` rows, longest first."""
    sharing: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        sharing.setdefault(input_ids(request), []).append(index)
    rows = [Row(tokens, tuple(indices)) for tokens, indices in sharing.items()]
    rows.sort(key=lambda row: (-len(row.tokens), row.tokens))
    return ScoringPlan(
        batches=tuple(Batch(chunk) for chunk in _chunks(rows, batch_size)),
        num_requests=len(requests),
        naive_tokens=sum(len(input_ids(request)) for request in requests),
    )


def input_ids(request: ScoringRequest) -> tuple[int, ...]:
    """What the model is fed: everything but the last token, which is only predicted."""
    return request.context_ids + request.continuation_ids[:-1]


def first_position(request: ScoringRequest) -> int:
    """Position in `input_ids` that predicts the continuation's first token."""
    return len(request.context_ids) - 1


def _chunks(rows: Sequence[Row], size: int) -> Iterator[tuple[Row, ...]]:
    return (tuple(rows[start : start + size]) for start in range(0, len(rows), size))
