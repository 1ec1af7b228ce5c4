"""Forks, gathers and frees what a model remembers of the tokens it read, whatever the model.

Knows mlx-lm's cache objects; knows no plan, no request and no kind of model. Two ways, decided for each cache
object by what it is:

Keys and values (mlx-lm's plain and sliding caches) are kept in a cache of our own, `BranchCache`. Its rows
go on from prefixes of any length, and padding stays where it is: a mask says which slots a row sees.

    prefix (once for all rows)   own slots of each row        new tokens, padded on the right
    h h h h h h h h              a a a a . .                  x x x
                                 b b b b b b                  y . .

Everything else (recurrent state, lists, kinds not yet invented) is copied as a whole: each array of two axes
or more that the object reaches is indexed on its first axis, the batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
Int32Array = npt.NDArray[np.int32]


class ForkError(ValueError):
    """A cache object that cannot be forked row by row."""


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

    @property
    def num_rows(self) -> int:
        """B."""
        return self.starts.size

    @property
    def num_slots(self) -> int:
        """S."""
        return self.positions.shape[1]

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
            prefix = np.broadcast_to(np.arange(self.prefix_len, dtype=np.int32), (self.num_rows, self.prefix_len))
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
        self.keys, self.values = (None, None) if own is None else own
        self._num_new = 0

    @property
    def offset(self) -> int | mx.array:
        """Position of the next token."""
        return self.layout.offset(self._num_new)

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None]:
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
        return _behind(self.prefix[0], keys), _behind(self.prefix[1], values)

    def whole_mask(self, mask: mx.array | str | None) -> mx.array | str | None:
        """A mask of `make_mask` that has no columns for the prefix, with them."""
        if not isinstance(mask, mx.array):
            return mask  # everything up to the token itself: so it is with the prefix in front
        seen = mx.ones((*mask.shape[:-1], self.layout.prefix_len), dtype=mx.bool_)
        return mx.concatenate([seen, mask], axis=-1)

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
        return mx.array(layout.mask(num_queries, self._num_new, window, with_prefix))

    def is_trimmable(self) -> bool:
        """Rows are never shortened."""
        return False

    def empty(self) -> bool:
        """Whether there is nothing to attend to yet."""
        return self.keys is None and self.prefix is None


def _behind(prefix: mx.array, rows: mx.array) -> mx.array:
    """[1, H, P, D] and [B, H, S, D] -> [B, H, P + S, D]."""
    copies = mx.broadcast_to(prefix, (rows.shape[0], *prefix.shape[1:]))
    return mx.concatenate([copies, rows], axis=-2)


@dataclass(frozen=True, slots=True)
class Prefix:
    """What the model remembers of a row that others stand behind: one entry for each cache object."""

    length: int
    caches: list[Any]
    """(keys, values) [1, H, P, D] where a `BranchCache` holds them, else a cache object of one row."""

    def arrays(self) -> list[mx.array]:
        """Every array of it."""
        return arrays_of(self.caches)


@dataclass(frozen=True, slots=True)
class State:
    """What the model remembers of a batch that it has read."""

    layout: Layout
    num_new: int
    """Padded length that was read."""
    caches: list[Any]


class CacheFactory:
    """Makes the cache objects of a batch from those of earlier ones."""

    def __init__(self, model: Any, *, branches: bool = True, splits_attention: bool = False) -> None:
        """Ask the model for its caches.

        Args:
            model: an mlx-lm model.
            branches: whether keys and values go into `BranchCache`.
            splits_attention: see `BranchCache`.
        """
        self._model = model
        self._branches = branches
        self.splits_attention = splits_attention
        self.keys_only = branches and all(map(_is_branch, _leaves(self._fresh())))
        """Whether everything that a row remembers is keys and values."""

    def start(self, layout: Layout, prefix: Prefix | None, parents: Sequence[tuple[State, Int32Array]]) -> list[Any]:
        """Caches for rows that go on from a prefix, or from rows of earlier batches.

        Args:
            layout: of the new batch.
            prefix: what all rows stand behind; None: nothing.
            parents: batches with the rows to go on from, in the order of the new rows, which begin with those
                that go on from the prefix itself.
        """
        num_direct = layout.num_rows - sum(rows.size for _, rows in parents)
        fresh = self._fresh()
        return [
            self._start_one(
                cache,
                layout,
                None if prefix is None else prefix.caches[index],
                [(state, state.caches[index], rows) for state, rows in parents],
                num_direct,
            )
            for index, cache in enumerate(fresh)
        ]

    def _start_one(self, fresh: Any, layout: Layout, prefix: Any, parents: list[Any], num_direct: int) -> Any:
        if isinstance(inner := getattr(fresh, "caches", None), tuple | list):
            made = copy.copy(fresh)
            made.caches = type(inner)(
                self._start_one(
                    cache,
                    layout,
                    None if prefix is None else prefix.caches[index],
                    [(state, parent.caches[index], rows) for state, parent, rows in parents],
                    num_direct,
                )
                for index, cache in enumerate(inner)
            )
            return made
        if isinstance(fresh, BranchCache):
            own = _gather_own(parents, num_direct, layout.num_slots)
            return BranchCache(
                layout, prefix=prefix, own=own, window=fresh.window, splits_attention=self.splits_attention
            )
        pieces = [take_rows(parent, rows) for _, parent, rows in parents]
        if num_direct and prefix is not None:
            pieces.insert(0, take_rows(prefix, np.zeros(num_direct, np.int32)))
        return join_rows(pieces) if pieces else fresh

    def prefix(self, state: State, row: int, before: Prefix | None) -> Prefix:
        """One row of a batch as a prefix, all that it stands behind included."""
        positions = state.layout.after(state.num_new)[row]
        slots = np.flatnonzero(positions >= 0)
        length = state.layout.prefix_len + slots.size
        caches = [
            _prefix_one(cache, row, slots, None if before is None else before.caches[index])
            for index, cache in enumerate(state.caches)
        ]
        return Prefix(length, caches)

    def _fresh(self) -> list[Any]:
        from mlx_lm.models.cache import make_prompt_cache

        made = make_prompt_cache(self._model)
        return [self._own(cache) for cache in made] if self._branches else list(made)

    def _own(self, cache: Any) -> Any:
        """A `BranchCache` in the place of mlx-lm's caches of keys and values, lists of them included."""
        from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

        if type(cache) is KVCache:
            return BranchCache(EMPTY_LAYOUT)
        if type(cache) is RotatingKVCache and cache.keep == 0:
            return BranchCache(EMPTY_LAYOUT, window=cache.max_size)
        if type(cache) is CacheList:
            made = copy.copy(cache)
            made.caches = tuple(self._own(inner) for inner in cache.caches)
            return made
        return cache


EMPTY_LAYOUT = Layout(0, np.zeros((1, 0), np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32))


def next_layout(
    starts: Int32Array, lengths: Int32Array, prefix_len: int, parents: Sequence[tuple[State, Int32Array]]
) -> Layout:
    """Where the rows of a new batch stand; arguments as in `CacheFactory.start`."""
    num_direct = starts.size - sum(rows.size for _, rows in parents)
    taken = [state.layout.after(state.num_new)[rows] for state, rows in parents]
    num_slots = max((_num_used(positions) for positions in taken), default=0)
    direct = np.full((num_direct, num_slots), -1, np.int32)
    return Layout(prefix_len, np.concatenate([direct, *(_fit(one, num_slots) for one in taken)]), starts, lengths)


def prepare(caches: Sequence[Any], lengths: Int32Array, length: int) -> None:
    """Tell caches that ask for it how long the rows of a padded batch are."""
    if (lengths == length).all():
        return
    padding = length - lengths
    for cache in _leaves(caches):
        if hasattr(cache, "prepare"):
            cache.prepare(lengths=lengths.tolist(), right_padding=padding.tolist())


def finalize(caches: Sequence[Any]) -> None:
    """Tell them that the padded tokens were read."""
    for cache in _leaves(caches):
        if hasattr(cache, "finalize"):
            cache.finalize()


def arrays_of(caches: Sequence[Any]) -> list[mx.array]:
    """Every array that the cache objects hold, for evaluation."""
    found: list[mx.array] = []

    def collect(array: mx.array) -> mx.array:
        found.append(array)
        return array

    for cache in _leaves(caches):
        _map_arrays(cache.state if isinstance(cache, BranchCache) else cache, collect)
    return found


def take_rows(cache: Any, rows: Int32Array) -> Any:
    """A copy of a cache object with the given rows of its batch, in that order, repeats allowed.

    Raises:
        ForkError: its arrays do not agree on the batch.
    """
    index = mx.array(rows)
    sizes: set[int] = set()

    def take(array: mx.array) -> mx.array:
        if array.ndim < 2:
            return array
        sizes.add(array.shape[0])
        return array[index]

    copied = _map_arrays(cache, take)
    if len(sizes) > 1:
        raise ForkError(f"first axes of {sorted(sizes)} in one {type(cache).__name__}")
    return copied


def join_rows(caches: Sequence[Any]) -> Any:
    """One cache object with the rows of several of one kind.

    Raises:
        ForkError: they differ in more than their rows.
    """
    if len(caches) == 1:
        return caches[0]
    lists = [arrays_of([cache]) for cache in caches]
    if len({len(arrays) for arrays in lists}) > 1 or len({_scalars(cache) for cache in caches}) > 1:
        raise ForkError(f"{type(caches[0]).__name__} objects of unlike rows")
    joined = iter([_join(arrays) for arrays in zip(*lists, strict=True)])
    return _map_arrays(caches[0], lambda _: next(joined))


def _join(arrays: Sequence[mx.array]) -> mx.array:
    if arrays[0].ndim < 2:
        return arrays[0]
    if len({array.shape[1:] for array in arrays}) > 1:
        raise ForkError("arrays of unlike shapes")
    return mx.concatenate(list(arrays))


def _map_arrays(value: Any, change: Callable[[mx.array], mx.array]) -> Any:
    """A copy of `value` with every array in it changed."""
    if isinstance(value, mx.array):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_arrays(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_map_arrays(item, change) for item in value)
    if isinstance(value, dict):
        return {key: _map_arrays(item, change) for key, item in value.items()}
    if hasattr(value, "__dict__") and not isinstance(value, type):
        made = copy.copy(value)
        made.__dict__.update({key: _map_arrays(item, change) for key, item in vars(value).items()})
        return made
    return value


def _scalars(value: Any) -> str:
    """What a cache object holds beside arrays of rows, to be compared."""
    if isinstance(value, mx.array):
        return str(value.tolist()) if value.ndim < 2 else ""
    if isinstance(value, list | tuple):
        return str([_scalars(item) for item in value])
    if isinstance(value, dict):
        return str({key: _scalars(item) for key, item in value.items()})
    if hasattr(value, "__dict__") and not isinstance(value, type):
        return type(value).__name__ + _scalars(vars(value))
    return repr(value)


def _leaves(caches: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for cache in caches:
        inner = getattr(cache, "caches", None)
        found += _leaves(inner) if isinstance(inner, tuple | list) else [cache]
    return found


def _is_branch(cache: Any) -> bool:
    return isinstance(cache, BranchCache)


def _gather_own(
    parents: Sequence[tuple[State, BranchCache, Int32Array]], num_direct: int, num_slots: int
) -> tuple[mx.array, mx.array] | None:
    """Own keys and values [B, H, S, D] for a new batch; None: there are none."""
    if not parents or num_slots == 0:
        return None
    made = []
    for name in ("keys", "values"):
        pieces = []
        for _, cache, rows in parents:
            array = getattr(cache, name)
            array = array[..., :num_slots, :][mx.array(rows)]
            if array.shape[-2] < num_slots:
                array = mx.pad(array, [(0, 0), (0, 0), (0, num_slots - array.shape[-2]), (0, 0)])
            pieces.append(array)
        if num_direct:
            pieces.insert(0, mx.zeros((num_direct, *pieces[0].shape[1:]), pieces[0].dtype))
        made.append(mx.concatenate(pieces) if len(pieces) > 1 else pieces[0])
    return made[0], made[1]


def _prefix_one(cache: Any, row: int, slots: Int32Array, before: Any) -> Any:
    inner = getattr(cache, "caches", None)
    if isinstance(inner, tuple | list):
        made = copy.copy(cache)
        made.caches = type(inner)(
            _prefix_one(one, row, slots, None if before is None else before.caches[index])
            for index, one in enumerate(inner)
        )
        return made
    if not isinstance(cache, BranchCache):
        return take_rows(cache, np.array([row], np.int32))
    index = mx.array(slots)
    pair = []
    for place, array in enumerate((cache.keys, cache.values)):
        own = array[row : row + 1]
        own = own if slots.size == own.shape[-2] else mx.take(own, index, axis=-2)
        pair.append(own if before is None else mx.concatenate([before[place], own], axis=-2))
    return pair[0], pair[1]


def _num_used(positions: Int32Array) -> int:
    """Slots up to the last one that holds a token in any row."""
    used = np.flatnonzero((positions >= 0).any(axis=0))
    return int(used[-1]) + 1 if used.size else 0


def _fit(positions: Int32Array, num_slots: int) -> Int32Array:
    """[B, s] -> [B, num_slots], with padding behind."""
    kept = positions[:, :num_slots]
    return np.pad(kept, [(0, 0), (0, num_slots - kept.shape[1])], constant_values=-1).astype(np.int32)
