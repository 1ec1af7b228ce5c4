"""Reads prompts when rows of a batch have room: the next ones through the forest, as many as memory allows.

Knows rows, plans and memory; knows neither steps nor text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from mlx import nn

from mlx_eval import config
from mlx_eval.engine.answers import AnswerRow
from mlx_eval.engine.batches import Batch, Limits
from mlx_eval.engine.plan import plan_prompts
from mlx_eval.engine.prefill import Prefill
from mlx_eval.engine.row_caches import ReadRows, RowCaches
from mlx_eval.engine.sharing import ModelSharing


@dataclass(slots=True)
class PromptCounts:
    """What reading prompts has cost."""

    unique_tokens: int = 0
    """Tokens of the prompts when each common beginning counts once, the last of each among them."""
    tokens: int = 0
    """Tokens that were computed, padding aside, the last of each prompt among them, which its first step computes."""
    padding: int = 0
    forwards: int = 0


class Arrivals:
    """Rows on their way into a batch."""

    def __init__(
        self,
        model: nn.Module,
        sharing: ModelSharing,
        rows: Sequence[AnswerRow],
        limits: Limits,
        max_rows: int,
    ) -> None:
        """Plan the prompts; nothing is computed before rows are taken.

        Args:
            model: an mlx-lm model.
            sharing: what it allows.
            rows: to be continued. Those whose answers may become longest come first.
            limits: what reading prompts and the rows together may take.
            max_rows: rows that are decoded together.
        """
        self.counts = PromptCounts()
        self._model = model
        self._sharing = sharing
        self._max_rows = max_rows
        prefill_bytes = limits.kv_bytes // 4
        self._prefill_limits = replace(
            limits, max_rows=min(limits.max_rows, max_rows), kv_bytes=prefill_bytes
        )
        self.rows_bytes = limits.kv_bytes - prefill_bytes
        """What the rows and their prefixes may take."""
        self._waiting = self._read(sorted(rows, key=lambda row: (-row.num_left.bit_length(), row.index)))
        self._ready: tuple[list[AnswerRow], ReadRows] | None = None

    def take(self, caches: RowCaches) -> tuple[list[AnswerRow], ReadRows] | None:
        """The next rows that have room beside those of a batch, read but for their last token.

        Args:
            caches: of the batch.

        Returns:
            Rows behind one prefix, and what the model remembers of them; None: there is no room, or no row.
        """
        if caches.num_rows >= self._max_rows:
            return None
        if self._ready is None:
            self._ready = next(self._waiting, None)
            if self._ready is None:
                return None
        rows, read = self._ready
        count = min(len(rows), self._room(caches, rows, read))
        if not count:
            return None
        self._ready = (rows[count:], read.take(slice(count, None))) if count < len(rows) else None
        return rows[:count], read.take(slice(count))

    def _room(self, caches: RowCaches, rows: Sequence[AnswerRow], read: ReadRows) -> int:
        """How many of the rows may join, their answers' memory set aside: at least one if there is none."""
        cache = self._sharing.cache
        before = 0 if read.prefix is None else read.prefix.length
        longest = max(row.num_left for row in rows)
        tokens = int(read.lengths.max()) - before + min(longest, config.EXPECTED_TOKENS)
        widest = max(tokens, caches.num_slots) * cache.token_bytes + cache.row_bytes
        free = self.rows_bytes - caches.prefix_bytes(read.prefix)
        fitting = max(free // widest, 1)
        return max(0, min(self._max_rows, fitting) - caches.num_rows)

    def _read(self, rows: Sequence[AnswerRow]) -> Iterator[tuple[list[AnswerRow], ReadRows]]:
        """Read all prompts, those with the longest limits first; limits of one power of two count as alike."""
        for _, group in groupby(rows, key=lambda row: row.num_left.bit_length()):
            alike = list(group)
            with_past = [row for row in alike if len(row.ids) > 1]
            plan = plan_prompts(
                [row.ids[:-1] for row in with_past],
                self._prefill_limits,
                self._sharing.sharing,
                self._sharing.cache,
            )
            self.counts.unique_tokens += plan.unique_tokens + len(alike)
            self.counts.tokens += len(alike)
            for numbers, read in Prefill(
                self._model, self._sharing.caches(self._model), plan, self._max_rows, self._count
            ):
                yield [with_past[number] for number in numbers], read
            others = [row for row in alike if len(row.ids) == 1]
            if others:
                yield others, ReadRows(np.zeros(len(others), np.int32), None, [])

    def _count(self, batch: Batch, num_forwards: int) -> None:
        self.counts.tokens += batch.num_tokens
        self.counts.padding += batch.padding
        self.counts.forwards += num_forwards
