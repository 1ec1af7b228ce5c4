from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from mlx_eval.engine.rows import ForkError, arrays_in, join_rows, take_rows


def numbered(rows: int, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """[rows, *shape] numbers, all different."""
    size = rows * int(np.prod(shape))
    return mx.arange(size).reshape(rows, *shape).astype(dtype)


def ids(*rows: int) -> np.ndarray:
    return np.array(rows, np.int32)


def plain(rows: int, length: int = 5) -> Any:
    from mlx_lm.models.cache import KVCache

    cache = KVCache()
    cache.update_and_fetch(numbered(rows, 2, length, 4), -numbered(rows, 2, length, 4))
    return cache


def rotating(rows: int, length: int = 5) -> Any:
    from mlx_lm.models.cache import RotatingKVCache

    cache = RotatingKVCache(4)
    for _ in range(length):
        cache.update_and_fetch(numbered(rows, 2, 1, 4) + cache.offset, numbered(rows, 2, 1, 4) - cache.offset)
    return cache


def quantised(rows: int, length: int = 5) -> Any:
    from mlx_lm.models.cache import QuantizedKVCache

    cache = QuantizedKVCache(group_size=32, bits=8)
    cache.update_and_fetch(numbered(rows, 2, length, 32), -numbered(rows, 2, length, 32))
    return cache


def recurrent(rows: int, length: int = 5) -> Any:
    from mlx_lm.models.cache import ArraysCache

    cache = ArraysCache(3)
    cache[0], cache[2] = numbered(rows, 3, 4) + length, numbered(rows, 6)
    return cache


def listed(rows: int, length: int = 5) -> Any:
    from mlx_lm.models.cache import CacheList

    return CacheList(plain(rows, length), recurrent(rows, length), CacheList(rotating(rows, length)))


class Pair(NamedTuple):
    left: mx.array
    right: mx.array


class Odd:
    """A kind not yet invented."""

    def __init__(self, rows: int, length: int = 5) -> None:
        self.by_name = {"state": numbered(rows, 3), "inner": OrderedDict(deep=[numbered(rows, 2, 2), None])}
        self.pair = Pair(numbered(rows, 1), -numbered(rows, 1))
        self.nested = (plain(rows, length), [("text", numbered(rows, 2, dtype=mx.int32))])
        self.steps = length
        self.scale = mx.array([0.5, 0.25])  # one axis: of no row

    kind = Pair


KINDS = [plain, rotating, quantised, recurrent, listed, Odd]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_taken_of_every_array_in_order_and_more_than_once(kind: Any) -> None:
    cache = kind(3)
    before = [array.tolist() for array in arrays_in(cache)]
    taken = take_rows(cache, ids(2, 0, 2))
    assert type(taken) is type(cache)
    for array, other in zip(arrays_in(taken), arrays_in(cache), strict=True):
        expected = other if other.ndim < 2 else other[mx.array([2, 0, 2])]
        assert array.dtype == other.dtype
        assert array.tolist() == expected.tolist()
    assert [array.tolist() for array in arrays_in(cache)] == before


@pytest.mark.parametrize("kind", KINDS)
def test_rows_taken_apart_join_to_what_they_were(kind: Any) -> None:
    cache = kind(4)
    joined = join_rows([take_rows(cache, ids(0)), take_rows(cache, ids(1, 2)), take_rows(cache, ids(3))])
    assert type(joined) is type(cache)
    for array, other in zip(arrays_in(joined), arrays_in(cache), strict=True):
        assert array.tolist() == other.tolist()
    one = take_rows(cache, ids(1))
    assert join_rows([one]) is one


@pytest.mark.parametrize("kind", [plain, rotating, quantised])
@pytest.mark.parametrize("length", [1, 3])
def test_a_fork_goes_on_as_rows_that_were_never_forked_and_leaves_its_parent_alone(
    kind: Any, length: int
) -> None:
    """mlx-lm writes into the arrays of its caches in place."""
    width = 32 if kind is quantised else 4
    cache, twin = kind(3), kind(3)
    before = [array.tolist() for array in arrays_in(cache)]
    fork = take_rows(cache, ids(2, 1))
    new = numbered(3, 2, length, width) * 7
    whole = twin.update_and_fetch(new, -new)
    parts = fork.update_and_fetch(new[mx.array([2, 1])], -new[mx.array([2, 1])])
    for array, other in zip(arrays_in(parts), arrays_in(whole), strict=True):
        assert array.tolist() == other[mx.array([2, 1])].tolist()
    assert fork.offset == twin.offset
    assert cache.offset == 5
    assert [array.tolist() for array in arrays_in(cache)] == before


def test_a_fork_of_a_list_can_be_written_to_without_changing_its_parent() -> None:
    cache = listed(2)
    fork = take_rows(cache, ids(1, 0))
    fork[0].update_and_fetch(mx.ones((2, 2, 1, 4)), mx.ones((2, 2, 1, 4)))
    fork[1][0] = mx.zeros((2, 1))
    fork[2][0].update_and_fetch(mx.ones((2, 2, 1, 4)), mx.ones((2, 2, 1, 4)))
    assert [array.tolist() for array in arrays_in(cache)] == [
        array.tolist() for array in arrays_in(listed(2))
    ]
    assert cache[0].offset == cache[2][0].offset == 5


def test_what_is_no_array_of_rows_is_kept() -> None:
    odd = Odd(3)
    taken = take_rows(odd, ids(1))
    assert isinstance(taken.pair, Pair)
    assert taken.pair.left.shape == (1, 1)
    assert taken.scale.tolist() == [0.5, 0.25]
    assert taken.nested[1][0][0] == "text"
    assert taken.by_name["inner"]["deep"][1] is None
    assert (taken.steps, taken.kind) == (5, Pair)


def test_an_empty_cache_has_no_rows_to_take() -> None:
    from mlx_lm.models.cache import KVCache

    taken = take_rows(KVCache(), ids(0, 0))
    assert (taken.keys, taken.values, taken.offset) == (None, None, 0)


def test_arrays_that_do_not_agree_on_the_batch_are_refused() -> None:
    class Crossed:
        def __init__(self) -> None:
            self.by_row, self.by_head = numbered(3, 2), numbered(2, 3)

    with pytest.raises(ForkError, match=r"\[2, 3\].*Crossed"):
        take_rows(Crossed(), ids(0))


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([plain(1, 5), plain(1, 4)], id="unlike offsets"),
        pytest.param([rotating(2, 6), rotating(1, 7)], id="unlike places in a ring"),
        pytest.param([quantised(1, 5), quantised(1, 4)], id="unlike offsets of quantised keys"),
        pytest.param([listed(1, 5), listed(1, 4)], id="unlike offsets in a list"),
        pytest.param([plain(1, 5), recurrent(1, 5)], id="unlike kinds"),
        pytest.param([plain(1, 256), plain(1, 257)], id="unlike shapes"),
    ],
)
def test_rows_that_differ_in_more_than_themselves_are_not_joined(pieces: list[Any]) -> None:
    with pytest.raises(ForkError):
        join_rows(pieces)


def test_numbers_of_single_rows_that_differ_are_not_joined() -> None:
    class Counted:
        def __init__(self, count: int) -> None:
            self.state, self.counts = numbered(1, 2), mx.array([count])

    joined = join_rows([Counted(3), Counted(3)])
    assert joined.state.shape == (2, 2)
    with pytest.raises(ForkError, match="Counted objects of unlike rows"):
        join_rows([Counted(3), Counted(4)])


def test_state_of_unlike_width_is_not_joined() -> None:
    class Wide:
        def __init__(self, width: int) -> None:
            self.state = numbered(1, width)

    with pytest.raises(ForkError, match="unlike shapes"):
        join_rows([Wide(2), Wide(3)])
