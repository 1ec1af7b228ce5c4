"""Keys and values of rows that are decoded together: one buffer a layer, in which each row has a place.

Knows what mlx-lm's models ask of a cache object; knows no plan, no request and no token. A row's tokens fill its
slots from the first one on, whatever its neighbours do: rows join, end and take several steps at once without
anything being shifted. Rows behind a common prefix are neighbours, a *run*; the prefix is stored once.

    place  behind          own slots                     a row that has left is a hole: the next row that joins
      0    prefix A        a a a a a a .  .  .           behind the same prefix takes it, else the last row of
      1    prefix A        a a a .  .  .  .  .           the run is moved there
      2    prefix B        b b b b .  .  .  .
      3    nothing         c c c c c c c c .
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_eval.engine.kv import Prefix, leaves

BoolArray = npt.NDArray[np.bool_]
Int32Array = npt.NDArray[np.int32]
KeysAndValues = tuple[mx.array, mx.array]

GROWTH: Final = 64
"""Buffers grow by a multiple of so many slots."""


@dataclass(slots=True, eq=False)
class Run:
    """Neighbouring places whose rows stand behind one prefix."""

    prefix: Prefix | None
    """None: there is none."""
    begin: int
    end: int
    layers: list[Any] = field(default_factory=list)
    """Keys and values [1, H, P, D] of the prefix, for each leaf of the model's caches."""

    def __post_init__(self) -> None:
        """Take the layers from the prefix."""
        self.layers = [] if self.prefix is None else leaves(self.prefix.caches)

    @property
    def num_rows(self) -> int:
        """Rows of the run."""
        return self.end - self.begin

    @property
    def shared(self) -> int:
        """Tokens that are stored once for all of them."""
        return 0 if self.prefix is None else self.prefix.length


class Writes(NamedTuple):
    """Where the tokens of a step go, the same in all layers that keep as much."""

    filled: Int32Array
    """[B] slots in use before the step."""
    num_slots: int
    """The most in use after it."""
    slots: mx.array
    """[B, 1, T, 1]"""
    first: int | None
    """The first of them, where it is the same for all rows."""


class Table:
    """Where the rows stand, the same in every layer."""

    def __init__(self) -> None:
        """Start without rows."""
        self.runs: list[Run] = []
        self.lengths: Int32Array = np.zeros(0, np.int32)
        """[B] tokens of each row that were read, those of its prefix included."""
        self.joined: Int32Array = np.zeros(0, np.int32)
        """[B] what `lengths` was when the row joined."""
        self.num_new = 1
        """T, the tokens of each row that the step reads."""
        self.step = 0
        """Counts the steps: whatever was made for another one is out of date."""
        self.offset = mx.zeros(0, mx.int32)
        """[B] position of each row's first new token."""
        self._masks: list[tuple[mx.array, int | None]] = []
        self._own_masks: dict[tuple[int, int | None, int | None], mx.array | None] = {}
        self._writes: dict[int | None, Writes] = {}

    @property
    def num_rows(self) -> int:
        """B."""
        return self.lengths.size

    def shared(self) -> Int32Array:
        """[B] tokens of each row that its prefix holds."""
        pieces = [np.full(run.num_rows, run.shared, np.int32) for run in self.runs]
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int32)

    def base(self, window: int | None) -> Int32Array:
        """[B] position in each row's first slot, in a layer that sees `window` tokens; None: all."""
        if window is None:
            return self.shared()
        return np.maximum(self.joined - window, 0)

    def filled(self, window: int | None) -> Int32Array:
        """[B] slots in use before the step."""
        return self.lengths - self.base(window)

    def begin_step(self, num_new: int) -> None:
        """Make ready for a step of `num_new` tokens a row."""
        self.num_new = num_new
        self.step += 1
        self.offset = mx.array(self.lengths)
        self._masks = []
        self._own_masks = {}
        self._writes = {}

    def writes(self, window: int | None) -> Writes:
        """Where the step's tokens go, in a layer that keeps `window` tokens; None: all."""
        if window not in self._writes:
            filled = self.filled(window)
            steps = np.arange(self.num_new, dtype=np.int32)[:, None]
            self._writes[window] = Writes(
                filled,
                num_slots=int(filled.max()) + self.num_new,
                slots=mx.array(filled[:, None, None, None] + steps),
                first=int(filled[0]) if (filled == filled[0]).all() else None,
            )
        return self._writes[window]

    def advance(self, num_read: Int32Array | int) -> None:
        """Count what the rows have read: [B] or the same for all."""
        self.lengths = (self.lengths + num_read).astype(np.int32)

    def place(self, places: Sequence[int], lengths: Int32Array) -> None:
        """Note rows that join with so many tokens [k]; the runs hold their places already."""
        size = max(self.num_rows, max(places) + 1)
        for name in ("lengths", "joined"):
            known = getattr(self, name)
            grown = np.concatenate([known, np.zeros(size - known.size, np.int32)])
            grown[list(places)] = lengths
            setattr(self, name, grown)

    def empty_places(self, places: Sequence[int]) -> None:
        """Note that rows have left: no slot of theirs is in use."""
        at = list(places)
        self.lengths[at] = self.joined[at] = self.shared()[at]

    def keep(self, order: Int32Array) -> None:
        """Go on with the rows that were at the places [B]; the runs say already where they end."""
        self.lengths, self.joined = self.lengths[order], self.joined[order]

    def mask(self, kept: int | None, window: int | None) -> mx.array:
        """[B, 1, T, S] what each new token sees of the rows' slots; it is known again by `window_of`.

        Args:
            kept: how many tokens the layer keeps; None: all.
            window: how many it sees, the new one included; None: all.
        """
        mask = mx.array(self._seen(0, self.num_rows, kept, window))
        self._masks.append((mask, window))
        return mask

    def window_of(self, mask: mx.array) -> int | None:
        """The window that a mask of this step was made for.

        Raises:
            ValueError: it was made by the model itself.
        """
        for known, window in self._masks:
            if known is mask:
                return window
        raise ValueError("the model makes a mask of its own, which knows nothing of rows and their prefixes")

    def run_mask(self, run: Run, kept: int | None, window: int | None) -> mx.array | None:
        """[n, 1, T, S] the same for the rows of one run; None: they see every slot.

        Where a window hides a part of the run's prefix, there are columns for the prefix too: [n, 1, T, P + S].
        """
        key = (run.begin, kept, window)
        if key not in self._own_masks:
            seen = self._seen(run.begin, run.end, kept, window)
            if self.hides_prefix(run, kept, window):
                positions = np.arange(run.shared, dtype=np.int32)
                queries = self._queries(run.begin, run.end)
                assert window is not None
                seen = np.concatenate([(queries - positions < window)[:, None], seen], axis=-1)
            self._own_masks[key] = None if seen.all() else mx.array(seen)
        return self._own_masks[key]

    def hides_prefix(self, run: Run, kept: int | None, window: int | None) -> bool:
        """Whether a window hides a part of a run's prefix, which its rows read where it is."""
        if kept is not None or window is None or not run.shared:
            return False
        return int(self.lengths[run.begin : run.end].max()) + self.num_new > window

    def _queries(self, begin: int, end: int) -> Int32Array:
        """[n, T, 1] positions of the new tokens of some rows."""
        steps = np.arange(self.num_new, dtype=np.int32)[None, :, None]
        positions: Int32Array = self.lengths[begin:end, None, None] + steps
        return positions

    def _seen(self, begin: int, end: int, kept: int | None, window: int | None) -> BoolArray:
        base = self.base(kept)[begin:end]
        num_slots = int((self.lengths[begin:end] - base).max()) + self.num_new
        positions = base[:, None, None] + np.arange(num_slots, dtype=np.int32)  # [n, 1, S]
        queries = self._queries(begin, end)
        seen: BoolArray = positions <= queries
        if window is not None:
            seen &= queries - positions < window
        return seen[:, None]

    def sees_all(self, kept: int | None, window: int | None) -> bool:
        """Whether every new token sees every slot of every row: one token a row, and rows of one length."""
        if self.num_new > 1:
            return False
        filled = self.filled(kept)
        if (filled != filled[0]).any():
            return False
        return window is None or int(self.lengths.max()) < window


class SlotCache:
    """One layer's keys and values. Has what mlx-lm's models ask of `KVCache` and `RotatingKVCache`."""

    def __init__(self, table: Table, index: int, window: int | None) -> None:
        """Hold nothing yet.

        Args:
            table: where the rows stand.
            index: of the layer among the leaves of the model's caches.
            window: how many tokens the layer sees, the new one included; None: as the model says.
        """
        self.table = table
        self.window = window
        self._index = index
        self.keys: Any = None
        """[R, H, C, D] buffer for R rows and C slots each; None before the first token."""
        self.values: Any = None
        self._read_step = -1

    @property
    def offset(self) -> mx.array:
        """[B] position of each row's next token."""
        table = self.table
        return table.offset + table.num_new if self._read_step == table.step else table.offset

    @property
    def state(self) -> tuple[Any, Any]:
        """Keys and values [B, H, S, D] of the slots in use, as layers read them that have none of their own."""
        if self.keys is None:
            return None, None
        table = self.table
        filled = table.filled(self.window)
        num_slots = (int(filled.max()) if filled.size else 0) + table.num_new * (
            self._read_step == table.step
        )
        return self.keys[: table.num_rows, :, :num_slots], self.values[: table.num_rows, :, :num_slots]

    @property
    def nbytes(self) -> int:
        """Memory of the buffers."""
        return 0 if self.keys is None else int(self.keys.nbytes + self.values.nbytes)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> KeysAndValues:
        """Write keys and values [B, H, T, D] behind those of each row; returns all rows' slots in use."""
        num_rows, writes = self.table.num_rows, self.table.writes(self.window)
        self._grow(keys, values, num_rows, writes.num_slots)
        if writes.first is None:
            self.keys = _written(self.keys, keys, writes.slots)
            self.values = _written(self.values, values, writes.slots)
        else:
            self.keys[:num_rows, :, writes.first : writes.num_slots] = keys
            self.values[:num_rows, :, writes.first : writes.num_slots] = values
        self._read_step = self.table.step
        return self.keys[:num_rows, :, : writes.num_slots], self.values[:num_rows, :, : writes.num_slots]

    def keys_and_values(self) -> tuple[Any, Any]:
        """What the last update returned."""
        return self.state

    def of_run(self, run: Run) -> KeysAndValues:
        """Keys and values [n, H, S, D] of a run's rows, the step's included."""
        filled = self.table.writes(self.window).filled[run.begin : run.end]
        num_slots = int(filled.max()) + self.table.num_new
        return (
            self.keys[run.begin : run.end, :, :num_slots],
            self.values[run.begin : run.end, :, :num_slots],
        )

    def prefix_of(self, run: Run) -> KeysAndValues | None:
        """Keys and values [1, H, P, D] that a run's rows stand behind; a layer that keeps a window has its own."""
        if not run.layers or self.window is not None:
            return None
        found: KeysAndValues | None = run.layers[self._index]
        return found

    def make_mask(
        self, num_queries: int, window_size: int | None = None, return_array: bool = False, **_: Any
    ) -> mx.array | None:
        """What mlx-lm's models ask for before their first layer: None or a boolean array [B, 1, T, S]."""
        window = window_size or self.window
        if not return_array and self.table.sees_all(self.window, window):
            return None
        return self.table.mask(self.window, window)

    def write(self, places: Sequence[int], keys: mx.array, values: mx.array) -> None:
        """Fill the places of rows that join with [k, H, S, D], and clear the slots behind.

        What another row has left there is cleared because it may be no number: zero times NaN is NaN.
        """
        self._grow(keys, values, max(places) + 1, keys.shape[2])
        for name, own in (("keys", keys), ("values", values)):
            buffer = getattr(self, name)
            padded = mx.pad(own, [(0, 0), (0, 0), (0, buffer.shape[2] - own.shape[2]), (0, 0)])
            for first, place, count in _stretches(places):
                buffer[place : place + count] = padded[first : first + count]
            setattr(self, name, buffer)

    def clear(self, places: Sequence[int]) -> None:
        """The same for rows that bring nothing."""
        if self.keys is None:
            return
        for name in ("keys", "values"):
            buffer = getattr(self, name)
            for _, place, count in _stretches([place for place in places if place < buffer.shape[0]]):
                buffer[place : place + count] = mx.zeros(1, buffer.dtype)
            setattr(self, name, buffer)

    def rows(self, places: Sequence[int]) -> list[mx.array]:
        """Copies of the rows at `places`, keys and values of each, to be evaluated before `put`."""
        if self.keys is None:
            return []
        return [
            mx.contiguous(array[place : place + 1]) for place in places for array in (self.keys, self.values)
        ]

    def put(self, places: Sequence[int], copies: Sequence[mx.array]) -> None:
        """Lay what `rows` gave elsewhere."""
        if self.keys is None:
            return
        for index, place in enumerate(places):
            self.keys[place : place + 1] = copies[2 * index]
            self.values[place : place + 1] = copies[2 * index + 1]

    def shrink(self, num_rows: int) -> None:
        """Give back the memory of places beyond `num_rows`, once they are half of all."""
        if self.keys is not None and num_rows * 2 <= self.keys.shape[0]:
            self.keys, self.values = (
                mx.contiguous(self.keys[:num_rows]),
                mx.contiguous(self.values[:num_rows]),
            )

    def trim(self) -> None:
        """Give back the memory of slots that no row has in use, once they are half of all."""
        if self.keys is None:
            return
        filled = self.table.filled(self.window)
        slots = _rounded(int(filled.max(initial=0)) + 1)
        if slots * 2 <= self.keys.shape[2]:
            self.keys = mx.contiguous(self.keys[:, :, :slots])
            self.values = mx.contiguous(self.values[:, :, :slots])

    @property
    def num_slots(self) -> int:
        """C, the slots of a place."""
        return 0 if self.keys is None else int(self.keys.shape[2])

    def is_trimmable(self) -> bool:
        """Rows are never shortened from outside."""
        return False

    def empty(self) -> bool:
        """Whether there is nothing to attend to yet."""
        return self.keys is None

    def _grow(self, keys: mx.array, values: mx.array, num_rows: int, num_slots: int) -> None:
        """Make room for rows and slots; `keys` and `values` tell heads, widths and types."""
        if self.keys is None:
            shape = (num_rows, keys.shape[1], _rounded(num_slots))
            self.keys = mx.zeros((*shape, keys.shape[3]), keys.dtype)
            self.values = mx.zeros((*shape, values.shape[3]), values.dtype)
            return
        rows, slots = self.keys.shape[0], self.keys.shape[2]
        if num_slots > slots:
            slots = _rounded(max(num_slots, slots + slots // 4))
        rows = max(rows, num_rows)
        if (rows, slots) != (self.keys.shape[0], self.keys.shape[2]):
            padding = [(0, rows - self.keys.shape[0]), (0, 0), (0, slots - self.keys.shape[2]), (0, 0)]
            self.keys, self.values = mx.pad(self.keys, padding), mx.pad(self.values, padding)


def _written(buffer: mx.array, new: mx.array, slots: mx.array) -> mx.array:
    """`buffer` [R, H, C, D] with `new` [B, H, T, D] in the slots [B, 1, T, 1] of its first rows."""
    index = mx.broadcast_to(slots, new.shape)
    unused = buffer.shape[0] - new.shape[0]
    if unused:  # put_along_axis wants an index for each row; whoever joins there clears the place
        index = mx.concatenate([index, mx.zeros((unused, *index.shape[1:]), index.dtype)])
        new = mx.concatenate([new, mx.zeros((unused, *new.shape[1:]), new.dtype)])
    return mx.put_along_axis(buffer, index, new, axis=2)


def _stretches(places: Sequence[int]) -> list[tuple[int, int, int]]:
    """(index of the first, its place, how many) of neighbouring places that follow one another."""
    found: list[tuple[int, int, int]] = []
    for index, place in enumerate(places):
        if found and place == found[-1][1] + found[-1][2]:
            first, start, count = found[-1]
            found[-1] = (first, start, count + 1)
        else:
            found.append((index, place, 1))
    return found


def _rounded(num_slots: int) -> int:
    return -(-num_slots // GROWTH) * GROWTH
