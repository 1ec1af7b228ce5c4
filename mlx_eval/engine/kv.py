"""Forks, gathers and frees what a model remembers of the tokens it read, whatever the model.

Knows mlx-lm's cache objects; knows no plan, no request and no kind of model. Two ways, decided for each cache
object by what it is: keys and values (mlx-lm's plain and sliding caches) are kept in a `BranchCache`, whose rows
may go on from prefixes of any length; everything else is copied as a whole (`rows.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_eval.engine.branch import EMPTY_LAYOUT, BranchCache, Layout, as_prefix, gather_own
from mlx_eval.engine.rows import arrays_in, join_rows, take_rows

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Prefix:
    """What the model remembers of a row that others stand behind: one entry for each cache object."""

    length: int
    """Tokens, those before its own row included."""
    caches: list[Any]
    """(keys, values) [1, H, P, D] where a `BranchCache` holds them, else a cache object of one row."""

    def arrays(self) -> list[mx.array]:
        """Every array of it."""
        return arrays_of(self.caches)


@dataclass(frozen=True, slots=True)
class State:
    """What the model remembers of a batch that it has read."""

    layout: Layout
    """Where its rows stood before it was read."""
    num_new: int
    """Padded length that was read."""
    caches: list[Any]
    """As `CacheFactory.start` made them, advanced by `num_new`."""


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
        self.keys_only = branches and all(map(_is_branch, leaves(self.fresh())))
        """Whether everything that a row remembers is keys and values."""

    def start(
        self, layout: Layout, prefix: Prefix | None, parents: Sequence[tuple[State, Int32Array]]
    ) -> list[Any]:
        """Caches for rows that go on from a prefix, or from rows of earlier batches.

        Args:
            layout: of the new batch.
            prefix: what all rows stand behind; None: nothing.
            parents: batches with the rows to go on from, in the order of the new rows, which begin with those
                that go on from the prefix itself.
        """
        num_direct = layout.num_rows - sum(rows.size for _, rows in parents)
        return self._start_all(self.fresh(), layout, prefix, parents, num_direct)

    def _start_all(
        self, fresh: Sequence[Any], layout: Layout, prefix: Any, parents: Sequence[Any], num_direct: int
    ) -> list[Any]:
        """One for each of `fresh`; prefix and parents are objects that have as many `caches`."""
        return [
            self._start_one(
                cache,
                layout,
                None if prefix is None else prefix.caches[index],
                [(parent.caches[index], rows) for parent, rows in parents],
                num_direct,
            )
            for index, cache in enumerate(fresh)
        ]

    def _start_one(self, fresh: Any, layout: Layout, prefix: Any, parents: list[Any], num_direct: int) -> Any:
        if isinstance(inner := getattr(fresh, "caches", None), tuple | list):
            made = copy.copy(fresh)
            made.caches = type(inner)(self._start_all(inner, layout, prefix, parents, num_direct))
            return made
        if isinstance(fresh, BranchCache):
            own = gather_own(parents, num_direct, layout.num_slots)
            return BranchCache(
                layout, prefix=prefix, own=own, window=fresh.window, splits_attention=self.splits_attention
            )
        pieces = [take_rows(parent, rows) for parent, rows in parents]
        if num_direct and prefix is not None:
            pieces.insert(0, take_rows(prefix, np.zeros(num_direct, np.int32)))
        return join_rows(pieces) if pieces else fresh

    def prefix(self, state: State, row: int, before: Prefix | None) -> Prefix:
        """One row of a batch as a prefix, all that it stands behind included."""
        positions = state.layout.after(state.num_new)[row]
        slots = np.flatnonzero(positions >= 0)
        length = state.layout.prefix_len + slots.size
        return Prefix(length, _prefix_all(state.caches, row, slots, before))

    def fresh(self) -> list[Any]:
        """Caches of a model that has read nothing: `BranchCache` for keys and values, else mlx-lm's own."""
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


def next_layout(
    starts: Int32Array, lengths: Int32Array, prefix_len: int, parents: Sequence[tuple[State, Int32Array]]
) -> Layout:
    """Where the rows of a new batch stand; arguments as in `CacheFactory.start`."""
    num_direct = starts.size - sum(rows.size for _, rows in parents)
    taken = [state.layout.after(state.num_new)[rows] for state, rows in parents]
    num_slots = max((_num_used(positions) for positions in taken), default=0)
    direct = np.full((num_direct, num_slots), -1, np.int32)
    return Layout(
        prefix_len, np.concatenate([direct, *(_fit(one, num_slots) for one in taken)]), starts, lengths
    )


def prepare(caches: Sequence[Any], lengths: Int32Array, length: int) -> None:
    """Tell caches that ask for it how long the rows of a padded batch are."""
    if (lengths == length).all():
        return
    padding = length - lengths
    for cache in leaves(caches):
        if hasattr(cache, "prepare"):
            cache.prepare(lengths=lengths.tolist(), right_padding=padding.tolist())


def finalize(caches: Sequence[Any]) -> None:
    """Tell caches that ask for it that the padded tokens were read."""
    for cache in leaves(caches):
        if hasattr(cache, "finalize"):
            cache.finalize()


def arrays_of(caches: Sequence[Any]) -> list[mx.array]:
    """Every array that cache objects hold, for evaluation."""
    return [
        array
        for cache in leaves(caches)
        for array in arrays_in(cache.state if isinstance(cache, BranchCache) else cache)
    ]


def leaves(caches: Sequence[Any]) -> list[Any]:
    """The cache objects, or entries of a `Prefix`, that lists of them hold, in order."""
    found: list[Any] = []
    for cache in caches:
        inner = getattr(cache, "caches", None)
        found += leaves(inner) if isinstance(inner, tuple | list) else [cache]
    return found


def rebuilt(caches: Sequence[Any], parts: Iterator[Any]) -> list[Any]:
    """The same lists with other leaves: one of `parts` for each of `leaves(caches)`."""
    made: list[Any] = []
    for cache in caches:
        inner = getattr(cache, "caches", None)
        if isinstance(inner, tuple | list):
            outer = copy.copy(cache)
            outer.caches = type(inner)(rebuilt(inner, parts))
            made.append(outer)
        else:
            made.append(next(parts))
    return made


def _is_branch(cache: Any) -> bool:
    return isinstance(cache, BranchCache)


def _prefix_all(caches: Sequence[Any], row: int, slots: npt.NDArray[np.intp], before: Any) -> list[Any]:
    """One entry for each of `caches`; `before` is None or has as many `caches`."""
    return [
        _prefix_one(cache, row, slots, None if before is None else before.caches[index])
        for index, cache in enumerate(caches)
    ]


def _prefix_one(cache: Any, row: int, slots: npt.NDArray[np.intp], before: Any) -> Any:
    inner = getattr(cache, "caches", None)
    if isinstance(inner, tuple | list):
        made = copy.copy(cache)
        made.caches = type(inner)(_prefix_all(inner, row, slots, before))
        return made
    if not isinstance(cache, BranchCache):
        return take_rows(cache, np.array([row], np.int32))
    return as_prefix(cache, row, slots, before)


def _num_used(positions: Int32Array) -> int:
    """Slots up to the last one that holds a token in any row."""
    used = np.flatnonzero((positions >= 0).any(axis=0))
    return int(used[-1]) + 1 if used.size else 0


def _fit(positions: Int32Array, num_slots: int) -> Int32Array:
    """[B, s] -> [B, num_slots], with padding behind."""
    kept = positions[:, :num_slots]
    return np.pad(kept, [(0, 0), (0, num_slots - kept.shape[1])], constant_values=-1).astype(np.int32)
