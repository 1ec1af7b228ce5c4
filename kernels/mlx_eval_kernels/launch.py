"""Runs Metal kernels: the only place that calls `mx.fast.metal_kernel`. Knows no kernel.

A kernel is a `Source`, a call of it a `Dispatch`. Functions that make dispatches take the `Run` that carries them
out, so that tests can execute the same source by other means.
"""

from __future__ import annotations

import functools
import importlib.resources
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import mlx.core as mx

Backend = Literal["reference", "metal"]
"""Plain MLX on any device, or the Metal source."""
VARIABLE: Final = "MLX_EVAL_KERNELS"
"""Environment variable that forces a `Backend` where the caller names none."""
DISPATCH_WORK: Final = 2**37
"""Multiplications of a dispatch: about a second at a tenth of the M1's 1.3 * 10^12 a second (2.6 TFLOPS, Apple)."""
GROUPS: Final = 96
"""Groups of threads that keep a GPU of some tens of cores busy: work with fewer is split until there are as many."""
FLOATS: Final = (mx.float32, mx.float16, mx.bfloat16)
"""The types that kernels are written for."""


class KernelError(ValueError):
    """A kernel cannot run as it was asked to; the message says what can."""


@dataclass(frozen=True, slots=True)
class Source:
    """A Metal kernel as `mx.fast.metal_kernel` takes it: MLX writes the signature."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str
    """Of the kernel function, in Metal."""
    header: str = ""
    """Functions and constants before it."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One call of a kernel."""

    source: Source
    inputs: Sequence[mx.array]
    """In the order of `source.inputs`; made row-contiguous where they are not."""
    template: Sequence[tuple[str, mx.Dtype | int | bool]]
    grid: tuple[int, int, int]
    """Threads, not groups."""
    threadgroup: tuple[int, int, int]
    output_shapes: Sequence[tuple[int, ...]]
    output_dtypes: Sequence[mx.Dtype]


Run = Callable[[Dispatch], Sequence[mx.array]]
"""Carries a dispatch out and gives its outputs."""


def read(*names: str) -> str:
    """The text of files in `metal/`, one after the other."""
    folder = importlib.resources.files(__package__) / "metal"
    return "".join((folder / name).read_text(encoding="utf-8") for name in names)


def on_metal(dispatch: Dispatch) -> Sequence[mx.array]:
    """Put a dispatch into MLX's graph, for the GPU."""
    outputs: Sequence[mx.array] = _built(dispatch.source)(
        inputs=list(dispatch.inputs),
        template=list(dispatch.template),
        grid=dispatch.grid,
        threadgroup=dispatch.threadgroup,
        output_shapes=list(dispatch.output_shapes),
        output_dtypes=list(dispatch.output_dtypes),
        stream=mx.gpu,
    )
    return outputs


def chosen_backend(asked: Backend | None, unsupported: str | None = None) -> Backend:
    """Which backend a call takes.

    Args:
        asked: by the caller; None: what the environment variable says, else Metal where MLX computes on it.
        unsupported: why the kernel cannot take the arguments; None: it can.

    Raises:
        KernelError: Metal is asked for and is not there, or cannot take the arguments, or the name is unknown.
    """
    forced = asked or os.environ.get(VARIABLE) or None
    if forced is not None and forced not in get_args(Backend):
        names = " or ".join(get_args(Backend))
        raise KernelError(f"the kernels' backend is {names}, not {forced!r} (argument or {VARIABLE})")
    if forced == "metal":
        if not mx.metal.is_available():
            raise KernelError(f"Metal is not available here: ask for the reference, or unset {VARIABLE}")
        if unsupported is not None:
            raise KernelError(f"the Metal kernel does not support {unsupported}: ask for the reference")
        return "metal"
    if forced == "reference" or unsupported is not None:
        return "reference"
    on_gpu = mx.metal.is_available() and mx.default_device().type == mx.gpu
    return "metal" if on_gpu else "reference"


@functools.cache
def _built(source: Source) -> Any:
    return mx.fast.metal_kernel(
        name=source.name,
        input_names=list(source.inputs),
        output_names=list(source.outputs),
        source=source.body,
        header=source.header,
    )
