"""What the batches of a plan go on from while the plan is run: parents and prefixes, each until its last use.

Knows a plan and the model's caches; knows neither requests nor what is computed of the logits.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_eval.engine import kv
from mlx_eval.engine.batches import Batch, RowKey


class Held:
    """The caches that one run through a plan holds."""

    def __init__(self, factory: kv.CacheFactory) -> None:
        """Hold nothing yet; `factory` makes the model's caches, as the plan's `Sharing` says."""
        self._factory = factory
        self._states: dict[int, kv.State] = {}
        self._prefixes: dict[RowKey, kv.Prefix] = {}

    def prefix_of(self, batch: Batch) -> kv.Prefix | None:
        """What the rows of a batch stand behind, stored once."""
        return None if batch.prefix is None else self._prefixes[batch.prefix]

    def prefix(self, key: RowKey) -> kv.Prefix:
        """A prefix that is held."""
        return self._prefixes[key]

    def __len__(self) -> int:
        """How many parents and prefixes are held."""
        return len(self._states) + len(self._prefixes)

    def start(self, batch: Batch) -> kv.State:
        """Where the rows of a batch stand, with the cache objects that they go on from, ready to read it."""
        rows = batch.rows
        parents: dict[int, list[int]] = {}
        for row in rows:
            if row.parent is not None:
                parents.setdefault(row.parent.batch, []).append(row.parent.row)
        sources = [(self._states[key], np.array(taken, np.int32)) for key, taken in parents.items()]
        layout = kv.next_layout(
            np.array([row.start for row in rows], np.int32),
            np.array([row.length for row in rows], np.int32),
            batch.prefix_len,
            sources,
        )
        caches = self._factory.start(layout, self.prefix_of(batch), sources)
        kv.prepare(caches, layout.lengths, batch.length)
        return kv.State(layout, batch.length, caches)

    def keep(self, index: int, batch: Batch, state: kv.State) -> None:
        """Hold what later batches go on from, drop what none needs any more.

        Args:
            index: of the batch in the plan.
            batch: that was read.
            state: as `start` gave it, its caches advanced.
        """
        before = self.prefix_of(batch)
        if batch.is_parent:
            self._states[index] = state
            mx.async_eval(kv.arrays_of(state.caches))
        for row in batch.new_prefixes:
            prefix = self._factory.prefix(state, row, before)
            self._prefixes[RowKey(index, row)] = prefix
            mx.async_eval(prefix.arrays())
        for key in batch.frees:
            if isinstance(key, RowKey):
                del self._prefixes[key]
            else:
                del self._states[key]
