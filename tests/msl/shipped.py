"""Runs the Metal kernels that MLX itself ships as headers in its wheel: they are known to be right on real GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tests.msl.buffers import Memory, contents
from tests.msl.build import PRELUDE, kernel_library, mlx_kernel
from tests.msl.run import Code, Report, Settings, Size, launch
from tests.msl.translate import translated

_INCLUDE: Final = re.compile(
    r'^[ \t]*#include (?:<metal_\w+>|"mlx/backend/metal/kernels/([^"]+)")[ \t]*$', re.M
)
_CONSTANT: Final = re.compile(r"constant (\w+) (\w+) \[\[function_constant\(\d+\)\]\];")
_REPLACED: Final = frozenset({"utils.h", "steel/utils/type_traits.h"})
"""Headers that are compiled as they stand, with those in cpp/overlay."""


@dataclass(frozen=True, slots=True)
class Shipped:
    """One of MLX's kernels."""

    header: str
    """Its file, below mlx/backend/metal/kernels."""
    call: str
    """The function with its template arguments."""
    constants: Mapping[str, int | bool] = field(default_factory=dict)
    """Function constants; the others are 0."""
    needs: tuple[str, ...] = ()
    """Headers that its file takes for granted."""


@dataclass(frozen=True, slots=True)
class Argument:
    """A buffer argument: what the kernel reads, or what it writes into."""

    name: str
    value: np.ndarray
    is_output: bool = False


def run_shipped(
    kernel: Shipped, arguments: Sequence[Argument], grid: Size, threadgroup: Size
) -> tuple[list[np.ndarray], Report]:
    """The outputs, and what the launch did."""
    seen: set[str] = set()
    text = "".join(_flat(header, seen) for header in (*kernel.needs, kernel.header))
    text = _CONSTANT.sub(lambda found: _constant(found, kernel.constants), text)
    function = kernel.call.split("<")[0]
    code = translated(text, function, kernel.call)
    headers = "".join(f'#include "mlx/backend/metal/kernels/{name}"\n' for name in sorted(_REPLACED & seen))
    library = kernel_library(code, prelude=PRELUDE + headers)
    assert code.num_buffers == len(arguments), f"{function} has {code.num_buffers} buffers"
    with Memory() as memory:
        buffers = [
            memory.output(a.name, a.value.size, a.value.itemsize, poison=0xCB)
            if a.is_output
            else memory.given(a.name, a.value)
            for a in arguments
        ]
        report = launch(Code(function, library, text), buffers, grid, threadgroup, Settings(order="shuffled"))
        outputs = [
            np.frombuffer(contents(buffer), a.value.dtype).reshape(a.value.shape)
            for buffer, a in zip(buffers, arguments, strict=True)
            if a.is_output
        ]
    return outputs, report


def _flat(header: str, seen: set[str]) -> str:
    """A header with those that it includes, each once; preprocessor lines of its own stay."""
    if header in seen:
        return ""
    seen.add(header)
    if header in _REPLACED:
        return ""
    text = mlx_kernel(header).replace("#pragma once", "")
    return _INCLUDE.sub(lambda found: _flat(found[1], seen) if found[1] else "", text)


def _constant(found: re.Match[str], values: Mapping[str, int | bool]) -> str:
    value = values.get(found[2], 0)
    return f"static constexpr {found[1]} {found[2]} = {str(value).lower()};"
