"""All that a model remembers of the rows that are decoded together: who joins, who leaves, where the rest moves.

Knows the model's cache objects; knows no token and no request. Keys and values have places in buffers
(`slots.py`); whatever else a model keeps (recurrent state) is small and put together anew as rows come and go.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_eval.engine.branch import BranchCache
from mlx_eval.engine.kv import CacheFactory, Prefix, leaves, rebuilt
from mlx_eval.engine.rows import arrays_in, join_rows, take_rows
from mlx_eval.engine.slots import Run, SlotCache, Table

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class ReadRows:
    """Rows whose prompts were read together, as they join a batch."""

    lengths: Int32Array
    """[k] tokens that were read of each, the prefix included."""
    prefix: Prefix | None
    """What they share and what stays stored once."""
    layers: list[Any]
    """For each leaf of the model's caches: keys and values [k, H, S, D] of what is the row's own, from the first slot
    on; or a cache object of k rows; None where the layer keeps nothing. No entries: nothing was read."""

    def arrays(self) -> list[mx.array]:
        """Every array of the rows' own."""
        return arrays_in(self.layers)

    def take(self, rows: slice) -> ReadRows:
        """Some of the rows."""
        index = np.arange(self.lengths.size, dtype=np.int32)[rows]
        if index.size == self.lengths.size:
            return self
        return ReadRows(
            self.lengths[rows],
            self.prefix,
            [_some(layer, rows, index) for layer in self.layers],
        )


def _some(layer: Any, rows: slice, index: Int32Array) -> Any:
    if layer is None:
        return None
    if isinstance(layer, tuple):
        return layer[0][rows], layer[1][rows]
    return take_rows(layer, index)


class RowCaches:
    """The caches of a batch of rows."""

    def __init__(self, factory: CacheFactory) -> None:
        """Start without rows; `factory` makes the model's caches."""
        self.table: Final = Table()
        self._structure = factory.fresh()
        self._leaves: list[Any] = [
            SlotCache(self.table, index, leaf.window) if isinstance(leaf, BranchCache) else leaf
            for index, leaf in enumerate(leaves(self._structure))
        ]
        self._slots = [leaf for leaf in self._leaves if isinstance(leaf, SlotCache)]
        self._holes: set[int] = set()
        self.objects: list[Any] = rebuilt(self._structure, iter(self._leaves))
        """What the model is called with."""

    @property
    def num_rows(self) -> int:
        """Rows of the batch, holes left out."""
        return self.table.num_rows - len(self._holes)

    @property
    def longest(self) -> int:
        """Tokens that the longest row has read."""
        return int(self.table.lengths.max(initial=0))

    @property
    def num_slots(self) -> int:
        """The most slots that a row has in use; buffers have at most twice as many, and `slots.GROWTH`."""
        return int(self.table.filled(None).max(initial=0))

    @property
    def nbytes(self) -> int:
        """Memory of the rows' keys and values and of the prefixes that they stand behind."""
        return self.prefix_bytes() + sum(leaf.nbytes for leaf in self._slots)

    def prefix_bytes(self, more: Prefix | None = None) -> int:
        """Memory of the prefixes that rows stand behind, and of one more."""
        prefixes = {id(run.prefix): run.prefix for run in self.table.runs} | {id(more): more}
        return sum(array.nbytes for prefix in prefixes.values() if prefix for array in prefix.arrays())

    def begin_step(self, num_new: int) -> None:
        """Make ready for a call of the model with `num_new` tokens a row."""
        self.table.begin_step(num_new)

    def advance(self, num_read: Int32Array | int) -> None:
        """Count the tokens [B] that the rows have read."""
        self.table.advance(num_read)

    def join(self, rows: ReadRows) -> list[int]:
        """Take rows in, at holes of a run behind the same prefix, else after the last row.

        Returns:
            The place of each.

        Raises:
            ForkError: they cannot be joined with those that are there.
        """
        before = self.table.num_rows
        places = self._find_places(rows)
        made = [
            self._joined(leaf, new, places, before)
            for leaf, new in zip(self._leaves, rows.layers or [None] * len(self._leaves), strict=True)
        ]
        self._replace(made)
        self._holes -= set(places)
        self.table.place(places, rows.lengths)
        return places

    def leave(self, places: Iterable[int]) -> None:
        """Let rows go; their places are holes until others take them."""
        left = set(places)
        if left:
            self._holes |= left
            self.table.empty_places(sorted(left))
            for leaf in self._slots:
                leaf.trim()

    def compact(self) -> Int32Array | None:
        """Close the holes, moving as few rows as can be.

        Returns:
            [B] the place that each row had before; None: nothing has moved.
        """
        if not self._holes:
            return None
        order = self._order()
        moves = [(place, old) for place, old in enumerate(order) if place != old]
        copies = [leaf.rows([old for _, old in moves]) for leaf in self._slots]
        # as long as something reads a buffer, writing to it would copy the whole
        mx.eval(copies)
        for leaf, own in zip(self._slots, copies, strict=True):
            leaf.put([place for place, _ in moves], own)
            leaf.shrink(len(order))
        index = np.array(order, np.int32)
        self._replace(
            [leaf if isinstance(leaf, SlotCache) else take_rows(leaf, index) for leaf in self._leaves]
        )
        self.table.keep(index)
        self._holes = set()
        return index

    def _joined(self, leaf: Any, new: Any, places: list[int], before: int) -> Any:
        """One leaf with the new rows; `before` is the number of places that there were."""
        if isinstance(leaf, SlotCache):
            if new is None:
                leaf.clear(places)
            else:
                leaf.write(places, *new)
            return leaf
        index = np.arange(max(before, max(places) + 1), dtype=np.int32)
        index[places] = before + np.arange(len(places), dtype=np.int32)
        return take_rows(join_rows([leaf, new]) if before else new, index)

    def _replace(self, made: list[Any]) -> None:
        if len(self._slots) < len(made):
            self._leaves = made
            self.objects = rebuilt(self._structure, iter(made))

    def _find_places(self, rows: ReadRows) -> list[int]:
        """Where new rows go; runs are made or made longer for them."""
        table = self.table
        wanted = rows.lengths.size
        found: list[int] = []
        for run in table.runs:
            if run.prefix is rows.prefix:
                found += [place for place in range(run.begin, run.end) if place in self._holes]
        found = found[:wanted]
        begin = table.num_rows
        end = begin + wanted - len(found)
        if end > begin:
            if table.runs and table.runs[-1].prefix is rows.prefix:
                table.runs[-1].end = end
            else:
                table.runs.append(Run(rows.prefix, begin, end))
        return [*found, *range(begin, end)]

    def _order(self) -> list[int]:
        """Which row goes to each place, run by run; a row that can stay does."""
        order: list[int] = []
        runs: list[Run] = []
        for run in self.table.runs:
            begin = len(order)
            alive = [place for place in range(run.begin, run.end) if place not in self._holes]
            end = begin + len(alive)
            staying = {place for place in alive if place < end}
            moving = iter([place for place in alive if place >= end])
            order += [place if place in staying else next(moving) for place in range(begin, end)]
            if runs and runs[-1].prefix is run.prefix:
                runs[-1].end = end
            elif alive:
                runs.append(Run(run.prefix, begin, end))
        self.table.runs = runs
        return order


class PlainCaches:
    """The same for one row in mlx-lm's own caches, for models whose rows cannot be computed side by side."""

    def __init__(self) -> None:
        """Start without a row."""
        self.objects: list[Any] = []
        self.num_rows = 0
        self.longest = 0
        """Not counted: there are no drafts."""
        self.nbytes = 0
        """Not counted: there is no other row to make room for."""

    def begin_step(self, num_new: int) -> None:
        """mlx-lm's caches ask for nothing."""

    def advance(self, num_read: Int32Array | int) -> None:
        """mlx-lm's caches count themselves."""

    def join(self, rows: ReadRows) -> list[int]:
        """Take the row in."""
        if self.num_rows or rows.lengths.size != 1:
            raise ValueError("rows whose caches cannot be put together are computed one at a time")
        self.objects = rows.layers
        self.num_rows = 1
        return [0]

    def leave(self, places: Iterable[int]) -> None:
        """Let the row go."""
        if list(places):
            self.objects = []
            self.num_rows = 0

    def compact(self) -> Int32Array | None:
        """[0] places that rows had before, once the row has gone; None: nothing has moved."""
        return None if self.num_rows else np.zeros(0, np.int32)
