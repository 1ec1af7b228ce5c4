"""The container: a GGUF file's metadata and where its tensors lie. Knows no model, decodes no weight.

The header is read here rather than with the `gguf` package's reader, which makes a numpy array of every
vocabulary entry (ten seconds and 800 MB for 262,144 tokens) and fails on a cut file with whatever numpy
says. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

    magic, version, number of tensors, number of keys | keys | tensor descriptions | padding | tensor data
"""

from __future__ import annotations

import math
import mmap
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from mlx_eval.errors import ModelError

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
DEFAULT_ALIGNMENT: Final = 32
MAX_DIMENSIONS: Final = 4

STRING_TYPE: Final = 8
ARRAY_TYPE: Final = 9
FLOAT32_TYPE: Final = 6
SCALAR_FORMATS: Final[Mapping[int, str]] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4",
    7: "|b1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip

Number = TypeVar("Number", int, float)
Value = TypeVar("Value", str, bool)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor as it lies in the file."""

    name: str
    shape: tuple[int, ...]
    """Slowest dimension first, as in numpy: the file itself names the fastest first."""
    type_name: str
    """ggml's name of the element type, such as `F16` or `Q4_K`."""
    data: np.ndarray[Any, np.dtype[np.uint8]]
    """Its bytes [num_bytes], mapped from the file, not read yet."""


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """Metadata and tensors of one file."""

    path: Path
    metadata: Mapping[str, Any]
    """Scalars as Python values, arrays of strings as lists, other arrays as numpy arrays."""
    tensors: Mapping[str, Tensor]

    @property
    def architecture(self) -> str:
        """What `general.architecture` says."""
        return self.text("general.architecture")

    def text(self, key: str, default: str | None = None) -> str:
        """The string under `key`."""
        return self._value(key, str, default)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """The truth value under `key`."""
        return self._value(key, bool, default)

    def integer(self, key: str, default: int | None = None) -> int:
        """The whole number under `key`; an array that holds one number many times counts as that number."""
        return self._number(key, int, default)

    def number(self, key: str, default: float | None = None) -> float:
        """The number under `key`."""
        return self._number(key, float, default)

    def array(self, key: str) -> Any:
        """The array under `key`: a list of strings or a numpy array."""
        value = self._required(key)
        if not isinstance(value, list | np.ndarray):
            raise self.wrong_value(key, "an array")
        return value

    def wrong_value(self, key: str, expected: str) -> ModelError:
        """The error for a value that is not what `key` should hold."""
        shown = repr(self.metadata.get(key))
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return ModelError(f"{self.path}: the GGUF key {key} holds {shown}, expected {expected}")

    def _required(self, key: str) -> Any:
        try:
            return self.metadata[key]
        except KeyError:
            raise ModelError(
                f"{self.path}: the GGUF metadata has no key {key}, which this model needs; convert it again "
                "with a newer converter"
            ) from None

    def _value(self, key: str, kind: type[Value], default: Value | None) -> Value:
        if default is not None and key not in self.metadata:
            return default
        value = self._required(key)
        if not isinstance(value, kind):
            raise self.wrong_value(key, {str: "a string", bool: "true or false"}[kind])
        return value

    def _number(self, key: str, kind: type[Number], default: Number | None) -> Number:
        if default is not None and key not in self.metadata:
            return default
        value = self._required(key)
        if isinstance(value, np.ndarray) and value.size and (value == value.flat[0]).all():
            value = value.flat[0].item()
        accepted = (int,) if kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, accepted):
            raise self.wrong_value(key, "one whole number" if kind is int else "a number")
        return kind(value)


def read_file(path: Path) -> GGUFFile:
    """Map a GGUF file and read its header.

    Raises:
        ModelError: the file is missing, empty, no GGUF, damaged, cut short, one part of several, or of a
            version or element type that is not known.
    """
    data = _map(path)
    cursor = _Cursor(path, data)
    if cursor.take(4) != MAGIC:
        raise ModelError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
    version = cursor.unsigned(4)
    if version not in VERSIONS:
        why = "written for big-endian machines" if version & 0xFFFF == 0 else f"of version {version}"
        raise ModelError(f"{path} is a GGUF file {why}; little-endian versions 2 and 3 are read")
    num_tensors, num_keys = cursor.unsigned(8), cursor.unsigned(8)
    metadata: dict[str, Any] = {}
    for _ in range(cursor.checked_count(num_keys, 13)):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.unsigned(4))
    described = [_describe(cursor) for _ in range(cursor.checked_count(num_tensors, 24))]
    parts = metadata.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        raise ModelError(
            f"{path} is one part of a GGUF model in {parts} files; join them with llama-gguf-split --merge"
        )
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelError(f"{path} is damaged: its alignment is {alignment!r}")
    start = math.ceil(cursor.position / alignment) * alignment
    tensors = {each.name: _tensor(path, data, start, each) for each in described}
    return GGUFFile(path, metadata, tensors)


def _map(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if sys.byteorder != "little":
        raise ModelError("GGUF files are read on little-endian machines only")
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError:  # mmap's word for an empty file
        raise ModelError(f"{path} is empty, expected a GGUF file") from None
    return np.frombuffer(mapped, dtype=np.uint8)


class _Cursor:
    """Reads values one after the other, and never past the end."""

    def __init__(self, path: Path, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self.path = path
        self.position = 0
        self._bytes = data.data

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self._bytes):
            raise self._cut_short()
        taken = bytes(self._bytes[self.position : end])
        self.position = end
        return taken

    def unsigned(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def checked_count(self, count: int, least_bytes: int) -> int:
        """`count`, when that many items of at least `least_bytes` each can still follow."""
        if count * least_bytes > len(self._bytes) - self.position:
            raise self._cut_short()
        return count

    def string(self) -> str:
        try:
            return self.take(self.unsigned(8)).decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path} is damaged: a string in its header is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind == STRING_TYPE:
            return self.string()
        if kind == ARRAY_TYPE:
            return self._array()
        return self._scalars(kind, 1)[0].item() if kind != FLOAT32_TYPE else self._float32()

    def _array(self) -> Any:
        kind, count = self.unsigned(4), self.unsigned(8)
        if kind == STRING_TYPE:
            return self._strings(self.checked_count(count, 8))
        if kind == ARRAY_TYPE:
            return [self._array() for _ in range(self.checked_count(count, 12))]
        return self._scalars(kind, count)

    def _strings(self, count: int) -> list[str]:
        # A loop of its own: vocabularies hold hundreds of thousands of them.
        strings: list[str] = []
        data, position, size = self._bytes, self.position, len(self._bytes)
        read_length: Callable[..., tuple[int]] = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if position + 8 > size:
                raise self._cut_short()
            start = position + 8
            position = start + read_length(data, position)[0]
            if position > size:
                raise self._cut_short()
            try:
                strings.append(str(data[start:position], "utf-8"))
            except UnicodeDecodeError as error:
                raise ModelError(f"{self.path} is damaged: a string in its header is not UTF-8") from error
        self.position = position
        return strings

    def _scalars(self, kind: int, count: int) -> np.ndarray[Any, Any]:
        if kind not in SCALAR_FORMATS:
            raise ModelError(f"{self.path} is damaged: its header holds a value of unknown type {kind}")
        dtype = np.dtype(SCALAR_FORMATS[kind])
        return np.frombuffer(self.take(dtype.itemsize * count), dtype=dtype)

    def _float32(self) -> float:
        # The shortest decimal that names this float32: 1e-05, not 9.999999747378752e-06.
        return float(str(self._scalars(FLOAT32_TYPE, 1)[0]))

    def _cut_short(self) -> ModelError:
        return ModelError(f"{self.path} is damaged or cut short: its header does not end within the file")


class _Description(NamedTuple):
    """A tensor as the header describes it."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def _describe(cursor: _Cursor) -> _Description:
    name = cursor.string()
    num_dimensions = cursor.unsigned(4)
    if not 0 < num_dimensions <= MAX_DIMENSIONS:
        raise ModelError(f"{cursor.path} is damaged: tensor {name!r} has {num_dimensions} dimensions")
    dimensions = [cursor.unsigned(8) for _ in range(num_dimensions)]
    return _Description(name, tuple(reversed(dimensions)), cursor.unsigned(4), cursor.unsigned(8))


def _tensor(
    path: Path, data: np.ndarray[Any, np.dtype[np.uint8]], start: int, described: _Description
) -> Tensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    name, shape, kind, offset = described
    try:
        element_type = GGMLQuantizationType(kind)
    except ValueError:
        raise ModelError(
            f"{path}: tensor {name} has the element type number {kind}, which the installed gguf package "
            "does not know; upgrade it (pip install -U gguf)"
        ) from None
    block_size, block_bytes = GGML_QUANT_SIZES[element_type]
    if shape[-1] % block_size:
        raise ModelError(f"{path} is damaged: rows of tensor {name} are no whole {element_type.name} blocks")
    num_bytes = math.prod(shape) // block_size * block_bytes
    begin = start + offset
    if begin + num_bytes > data.size:
        raise ModelError(
            f"{path} is damaged or cut short: tensor {name} ends at byte {begin + num_bytes:,}, the file "
            f"has {data.size:,}"
        )
    return Tensor(name, shape, element_type.name, data[begin : begin + num_bytes])
