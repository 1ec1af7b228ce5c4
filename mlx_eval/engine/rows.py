"""Copies rows of any cache object: each array of two or more axes in it is indexed on the first, the batch.

Knows no kind of cache: recurrent state, lists, quantised keys and kinds not yet invented are all objects with
arrays in them. Right for objects that hold no numbers of single rows beside these arrays, also none in arrays of one
axis; that is checked as far as it shows, and by the self-test (`sharing.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


class ForkError(ValueError):
    """A cache object that cannot be forked row by row."""


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
    lists = [arrays_in(cache) for cache in caches]
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


def arrays_in(value: Any) -> list[mx.array]:
    """Every array that an object reaches."""
    found: list[mx.array] = []

    def collect(array: mx.array) -> mx.array:
        found.append(array)
        return array

    _map_arrays(value, collect)
    return found
