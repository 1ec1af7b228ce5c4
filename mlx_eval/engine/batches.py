"""The records of a plan: what a model allows, what a batch may take, and the batches. Python and numpy, no mlx."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from mlx_eval import config
from mlx_eval.engine.forest import Answer
from mlx_eval.records import IntArray

PAD_ID: Final = 0
"""Fills rows on the right; causal attention never looks there."""


class Level(enum.IntEnum):
    """How far a model's rows may share a batch and a prefix, each level including those before it."""

    ALONE = 0
    """One row at a time, from its first token."""
    ROWS = 1
    """Rows of unequal length side by side, each from its first token."""
    EQUAL = 2
    """Rows go on from prefixes of one length; rows that are gone on from have one length too."""
    RAGGED = 3
    """Rows go on from prefixes of any length."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """What the planner may do with a model."""

    level: Level = Level.RAGGED
    prefix_once: bool = True
    """Whether a prefix is stored once for all rows of a batch. False: each row holds a copy."""
    keys_only: bool = True
    """Whether all that a row remembers are keys and values. False: there is recurrent state, or something
    unknown, and rows that start afresh cannot join a batch of rows that go on."""


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Memory that the model keeps of what it read."""

    token_bytes: int = 1
    """For each token of each row."""
    row_bytes: int = 0
    """For each row, however long."""


FULL_SHARING: Final = Sharing()
ONE_BYTE: Final = CacheSize()
"""Counts tokens where nobody asks for bytes."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a batch may take."""

    max_rows: int
    batch_tokens: int = config.BATCH_TOKENS
    """Rows times padded length. A longer row has a batch of its own."""
    kv_bytes: int = config.KV_BYTES
    """All KV held at once; a single row may take more."""
    step: int = config.PREFILL_STEP
    """Tokens of a row in one forward pass; longer rows take several."""

    def halved(self) -> Limits:
        """For another try when memory ran out; of a single row, at once the least that there is."""
        step = min(self.step, max(config.SMALLEST_STEP, self.step // 2))
        if self.max_rows == 1:
            return Limits(1, 1, 1, min(self.step, config.SMALLEST_STEP))
        return Limits(self.max_rows // 2, max(1, self.batch_tokens // 2), max(1, self.kv_bytes // 2), step)


class RowKey(NamedTuple):
    """Names a row of a batch."""

    batch: int
    row: int


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens that run through the model once."""

    sequence: int
    """Index into the plan's sequences."""
    start: int
    """Position of its first token: so many tokens were computed before, in its ancestors."""
    end: int
    parent: RowKey | None
    """The row it goes on from; None: from the batch's prefix, or from nothing."""
    answers: tuple[Answer, ...]
    """What its tokens predict."""

    @property
    def length(self) -> int:
        """Tokens computed for it."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that are computed together."""

    rows: tuple[Row, ...]
    prefix: RowKey | None
    """The row behind which all of these stand, stored once; None: there is none."""
    prefix_len: int
    """Tokens of the prefix with all that is before it; 0 where there is none."""
    new_prefixes: tuple[int, ...]
    """Indices of rows of this batch that become prefixes."""
    is_parent: bool
    """Whether rows of later batches go on from rows of this one."""
    frees: tuple[int | RowKey, ...]
    """Parent batches, by index, and prefixes that nothing needs after this one."""

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return max(row.length for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return sum(row.length for row in self.rows)

    @property
    def padding(self) -> int:
        """Positions computed for nothing."""
        return len(self.rows) * self.length - self.num_tokens


@dataclass(frozen=True, slots=True)
class ScoringPlan:
    """All batches of a call, and what they cost."""

    batches: tuple[Batch, ...]
    sequences: tuple[IntArray, ...]
    num_requests: int
    naive_tokens: int
    """Tokens that a pass of its own for each request would compute."""
    unique_tokens: int
    """Tokens when each common prefix is computed once."""
    planned_tokens: int
    """Tokens that this plan computes, padding aside."""
    padding: int
    """Positions computed for nothing."""
    num_forwards: int
    """Forward passes of the model, several for a batch longer than a step."""
    peak_kv_bytes: int
    """The most KV held while a batch is computed, its own included; that of the batch before it, whose results
    are read then, is not."""
    limits: Limits
    """As given, but one row where the model allows no more."""

    def token_array(self, batch: Batch) -> IntArray:
        """[B, T] ids of a batch, right-padded with `PAD_ID`."""
        array = np.full((len(batch.rows), batch.length), PAD_ID, dtype=np.int32)
        for index, row in enumerate(batch.rows):
            array[index, : row.length] = self.sequences[row.sequence][row.start : row.end]
        return array
