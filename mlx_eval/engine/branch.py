"""Keys and values of rows that go on from a common prefix and from slots of their own.

Knows what mlx-lm's models ask of a cache object; knows no plan and no request. Padding stays where it is: a mask
says which slots a row sees.

    prefix (once for all rows)   own slots of each row        new tokens, padded on the right
    h h h h h h h h              a a a a . .                  x x x
                                 b b b b b b                  y . .
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the rows of a batch stand, the same in every layer."""

    prefix_len: int
    """Tokens stored once, before all rows."""
    positions: Int32Array
    """[B, S] position of the token in each of a row's own slots; -1: the slot holds padding."""
    starts: Int32Array
    """[B] position of each row's first new token."""
    lengths: Int32Array
    """[B] new tokens of each row, padding aside."""
    masks: list[mx.array] = field(default_factory=list, compare=False)
    """Those that were made from it, for all layers: attention knows them again."""

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.starts)

    @property
    def num_slots(self) -> int:
        """S."""
        return int(self.positions.shape[1])

    @property
    def has_gaps(self) -> bool:
        """Whether own slots hold padding."""
        return bool((self.positions < 0).any())

    def offset(self, num_new: int) -> int | mx.array:
        """Position of the token after `num_new` new ones: one number where rows agree, else [B]."""
        first = int(self.starts[0])
        if (self.starts == first).all():
            return first + num_new
        return mx.array(self.starts + num_new)

    def after(self, num_new: int) -> Int32Array:
        """[B, S + num_new] `positions` once the new tokens are read."""
        steps = np.arange(num_new, dtype=np.int32)[None]  # [1, T]
        new = np.where(steps < self.lengths[:, None], self.starts[:, None] + steps, -1)
        return np.concatenate([self.positions, new.astype(np.int32)], axis=1)

    def mask(self, num_queries: int, num_before: int, window: int | None, with_prefix: bool) -> BoolArray:
        """[B, 1, T, P + S + num_before + T] what each new token sees; without P if not `with_prefix`.

        Args:
            num_queries: T.
            num_before: new tokens read before these.
            window: how many positions a token sees, itself included; None: all.
            with_prefix: whether the prefix has columns too.
        """
        new = np.arange(num_before + num_queries, dtype=np.int32)
        keys = np.concatenate([self.positions, self.starts[:, None] + new], axis=1)  # [B, S + t]
        if with_prefix:
            prefix = np.broadcast_to(
                np.arange(self.prefix_len, dtype=np.int32), (self.num_rows, self.prefix_len)
            )
            keys = np.concatenate([prefix, keys], axis=1)
        queries = self.starts[:, None] + new[num_before:]  # [B, T]
        distance = queries[:, :, None] - keys[:, None, :]
        seen: BoolArray = (distance >= 0) & (keys[:, None, :] >= 0)
        if window is not None:
            seen &= distance < window
        return seen[:, None]


class BranchCache:
    """Keys and values of one layer, for rows that go on from a common prefix and from slots of their own.

    Has what mlx-lm's models ask of `KVCache` and `RotatingKVCache`: `offset`, `make_mask`,
    `update_and_fetch`, `keys`, `values`, `state`.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        prefix: tuple[mx.array, mx.array] | None = None,
        own: tuple[mx.array, mx.array] | None = None,
        window: int | None = None,
        splits_attention: bool = False,
    ) -> None:
        """Make the cache of a batch that is about to run.

        Args:
            layout: where the rows stand.
            prefix: keys and values [1, H, P, D].
            own: keys and values [B, H, S, D].
            window: how many positions the layer sees, itself included; None: as the model says.
            splits_attention: whether the model's attention reads `prefix` from here and is given the rest only.
        """
        self.layout = layout
        self.prefix = prefix
        self.window = window
        self.splits_attention = splits_attention and prefix is not None
        self.keys: Any = None if own is None else own[0]
        """[B, H, S, D] own keys; None before the first update."""
        self.values: Any = None if own is None else own[1]
        self._num_new = 0

    @property
    def offset(self) -> int | mx.array:
        """Position of the next token."""
        return self.layout.offset(self._num_new)

    @property
    def state(self) -> tuple[Any, Any]:
        """Own keys and values [B, H, S, D]."""
        return self.keys, self.values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the last update returned."""
        keys, values = self.keys, self.values
        return (keys, values) if self.splits_attention else self.with_prefix(keys, values)

    def with_prefix(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values [B, H, S, D] behind the prefix; its copies last as long as one layer."""
        if self.prefix is None:
            return keys, values
        return behind(self.prefix[0], keys), behind(self.prefix[1], values)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add keys and values [B, H, T, D]; returns those to attend to."""
        self._num_new += keys.shape[-2]
        if self.keys is None:
            self.keys, self.values = keys, values
        else:
            self.keys = mx.concatenate([self.keys, keys], axis=-2)
            self.values = mx.concatenate([self.values, values], axis=-2)
        return self.keys_and_values()

    def make_mask(
        self, num_queries: int, window_size: int | None = None, return_array: bool = False, **_: Any
    ) -> mx.array | str | None:
        """What mlx-lm's models ask for before their first layer: None, "causal" or a boolean array.

        The array has no columns for the prefix where `splits_attention`, unless a window hides a part of it.
        """
        layout = self.layout
        window = window_size or self.window
        if window is not None and int(layout.starts.max()) + self._num_new + num_queries <= window:
            window = None
        if window is None and not layout.has_gaps:
            if num_queries == 1:
                return None
            if not return_array:
                return "causal"
        with_prefix = window is not None or not self.splits_attention
        seen = layout.mask(num_queries, self._num_new, window, with_prefix)
        mask = mx.array(seen if layout.has_gaps else seen[0, 0])
        layout.masks.append(mask)
        return mask

    def is_trimmable(self) -> bool:
        """Rows are never shortened."""
        return False

    def empty(self) -> bool:
        """Whether there is nothing to attend to yet."""
        return self.keys is None and self.prefix is None


def behind(prefix: mx.array, rows: mx.array) -> mx.array:
    """[1, H, P, D] and [B, H, S, D] -> [B, H, P + S, D]."""
    copies = mx.broadcast_to(prefix, (rows.shape[0], *prefix.shape[1:]))
    return mx.concatenate([copies, rows], axis=-2)


def gather_own(
    parents: Sequence[tuple[BranchCache, Int32Array]], num_direct: int, num_slots: int
) -> tuple[mx.array, mx.array] | None:
    """Own keys and values [B, H, S, D] for a new batch; None: there are none, or the layer keeps none.

    Args:
        parents: caches of earlier batches with the rows to go on from.
        num_direct: rows before these that have no own slots.
        num_slots: S, up to which the parents' slots are used.
    """
    if not parents or num_slots == 0 or any(cache.keys is None for cache, _ in parents):
        return None
    made = []
    for name in ("keys", "values"):
        pieces = []
        for cache, rows in parents:
            array = getattr(cache, name)
            array = array[..., :num_slots, :][mx.array(rows)]
            if array.shape[-2] < num_slots:
                array = mx.pad(array, [(0, 0), (0, 0), (0, num_slots - array.shape[-2]), (0, 0)])
            pieces.append(array)
        if num_direct:
            pieces.insert(0, mx.zeros((num_direct, *pieces[0].shape[1:]), pieces[0].dtype))
        made.append(mx.concatenate(pieces) if len(pieces) > 1 else pieces[0])
    return made[0], made[1]


def as_prefix(
    cache: BranchCache, row: int, slots: npt.NDArray[np.intp], before: tuple[mx.array, mx.array] | None
) -> tuple[mx.array, mx.array] | None:
    """Keys and values [1, H, P, D] of one row, behind those of the prefix that it stands behind.

    None: the layer keeps none.

    Args:
        cache: of the row's batch, which was read.
        row: the row.
        slots: own slots of the row that hold tokens.
        before: keys and values of its own prefix, if it has one.
    """
    if cache.keys is None:
        return None
    index = mx.array(slots.astype(np.int32))
    pair = []
    for place, array in enumerate(cache.state):
        own = array[row : row + 1]
        own = own if slots.size == own.shape[-2] else mx.take(own, index, axis=-2)
        whole = own if before is None else mx.concatenate([before[place], own], axis=-2)
        pair.append(mx.contiguous(whole))  # a view would be copied wherever a kernel reads it
    return pair[0], pair[1]


EMPTY_LAYOUT: Final = Layout(0, np.zeros((1, 0), np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32))
"""Of no row in particular."""
