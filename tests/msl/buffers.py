"""Memory for a kernel's buffers: each far from the others, so that a stray index meets a guard, not a neighbour."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import mlx.core as mx
import numpy as np

from tests.msl.signature import dtype_name

GAP: Final = 1 << 30
"""Bytes before and after each buffer that no access may reach. cpp/runtime/memory.cpp knows the half of it."""
_NO_ACCESS, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_FIXED, _NO_RESERVE = 0x10, 0x4000
"""MAP_FIXED and MAP_NORESERVE of Linux, which Python 3.11 does not name."""
_RESERVE: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE

Rows = Mapping[int, mx.array]
"""The rows of a virtual input that hold data, by their index on the first axis; all others are zeros."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer argument of a kernel, in memory."""

    name: str
    address: int
    num_bytes: int
    item_size: int
    is_output: bool


class Memory:
    """Allocates buffers; leaving it as a context frees them all."""

    def __init__(self, *, misalign: int = 0) -> None:
        """`misalign`: items by which inputs lie behind an aligned address, as a slice of an array does."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._maps: list[tuple[int, int]] = []
        self._misalign = misalign

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for start, size in self._maps:
            self._libc.munmap(start, size)
        self._maps.clear()

    def given(self, name: str, data: np.ndarray) -> Buffer:
        """A buffer that the kernel reads, with the array's bytes."""
        values = np.ascontiguousarray(data)
        address = self._allocate(values.nbytes, self._misalign * values.itemsize)
        ctypes.memmove(address, values.ctypes.data, values.nbytes)
        return Buffer(name, address, values.nbytes, values.itemsize, is_output=False)

    def sparse(self, name: str, like: mx.array, rows: Rows) -> Buffer:
        """An input of the shape and type of `like` that takes memory for the given rows only.

        Raises:
            ValueError: a row does not fit.
        """
        num_bytes = math.prod(like.shape) * like.itemsize
        address = self._allocate(num_bytes, self._misalign * like.itemsize)
        row_bytes = math.prod(like.shape[1:]) * like.itemsize
        for index, row in rows.items():
            values = np.ascontiguousarray(as_numpy(row))
            if row.dtype != like.dtype or values.nbytes != row_bytes or not 0 <= index < like.shape[0]:
                given = f"{row.dtype} {row.shape} at {index}"
                raise ValueError(
                    f"a row of {name} is {like.dtype} {like.shape[1:]} below {like.shape[0]}, not {given}"
                )
            ctypes.memmove(address + index * row_bytes, values.ctypes.data, values.nbytes)
        return Buffer(name, address, num_bytes, like.itemsize, is_output=False)

    def output(self, name: str, num_items: int, item_size: int, poison: int) -> Buffer:
        """A buffer that the kernel writes, full of the byte `poison` before."""
        num_bytes = num_items * item_size
        address = self._allocate(num_bytes, 0)
        ctypes.memset(address, poison, num_bytes)
        return Buffer(name, address, num_bytes, item_size, is_output=True)

    def _allocate(self, num_bytes: int, offset: int) -> int:
        page = mmap.PAGESIZE
        body = max(page, -(-(num_bytes + offset) // page) * page)
        total = body + 2 * GAP
        start = self._map(None, total, _NO_ACCESS, _RESERVE)
        self._maps.append((start, total))
        return self._map(start + GAP, body, _READ_WRITE, _RESERVE | _FIXED) + offset

    def _map(self, at: int | None, size: int, access: int, flags: int) -> int:
        address = self._libc.mmap(at, size, access, flags, -1, 0)
        if address is None or address == ctypes.c_void_p(-1).value:
            raise MemoryError(f"no {size} bytes of address space")
        return int(address)


def contents(buffer: Buffer) -> bytes:
    """The bytes of a buffer."""
    return ctypes.string_at(buffer.address, buffer.num_bytes)


def as_numpy(array: mx.array) -> np.ndarray:
    """An array's values; the bits, as uint16, of a bfloat16."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def as_mlx(raw: bytes, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """The array whose row-contiguous bytes these are."""
    if dtype == mx.bfloat16:
        return mx.array(np.frombuffer(raw, np.uint16).reshape(shape)).view(mx.bfloat16)
    return mx.array(np.frombuffer(raw, dtype_name(dtype)).reshape(shape))
