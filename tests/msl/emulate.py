"""Carries dispatches out on the CPU: an `Emulator` is a `launch.Run` that executes the Metal source, checked.

What it compiles is the text that MLX generates (`signature.py`); what it finds, it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import mlx.core as mx
import numpy as np
from mlx_eval_kernels.launch import Dispatch

from tests.msl.buffers import Buffer, Memory, Rows, as_mlx, as_numpy, contents
from tests.msl.build import CompileError, Fill, kernel_library, why_not
from tests.msl.run import Code, Order, Report, Settings, Size, launch
from tests.msl.signature import facts, generated
from tests.msl.translate import translated

__all__ = ["EmulationError", "Emulator", "Order", "Report", "Rows", "on_every_schedule"]


MOST_BYTES: Final = 1 << 30
"""Of an input that is really there; a larger one is taken for a placeholder that nobody may evaluate."""


class EmulationError(Exception):
    """The kernel is wrong; `errors` says how, a line a finding."""

    def __init__(self, errors: Sequence[str]) -> None:
        super().__init__("\n".join(errors))
        self.errors = tuple(errors)


class Emulator:
    """A `launch.Run`. Usable for any number of dispatches; `reports` keeps what each of them did."""

    def __init__(
        self,
        *,
        order: Order = "forward",
        seed: int = 0,
        poison: int = 0xCB,
        fill: Fill = "pattern",
        sparse: Mapping[str, Rows] | None = None,
        groups: Sequence[Size] | None = None,
        misalign: int = 0,
        flush_subnormals: bool = True,
        timeout_seconds: float = 60.0,
        raises: bool = True,
    ) -> None:
        """Options of all dispatches.

        Args:
            order: in which threads and groups take turns.
            seed: of the shuffled order.
            poison: the byte that fills threadgroup memory and outputs before.
            fill: what a thread's own variables hold before.
            sparse: rows of virtual inputs, by the input's name. The dispatch has a placeholder of the full shape
                without memory, such as `mx.broadcast_to(mx.zeros((), dtype), shape)`.
            groups: threadgroups to run, by position; None: all. With some only, unwritten outputs are no finding.
            misalign: items by which inputs lie behind an aligned address, as those of a sliced array do.
            flush_subnormals: take float32 subnormals for zeros, as the GPU may.
            timeout_seconds: CPU time of one dispatch.
            raises: raise `EmulationError` for findings; False: leave them to the report.

        Raises:
            RuntimeError: this machine cannot run the emulation.
        """
        unable = why_not()
        if unable is not None:
            raise RuntimeError(unable)
        chosen = None if groups is None else tuple(groups)
        self.reports: list[Report] = []
        self._settings = Settings(order, seed, poison, chosen, flush_subnormals, timeout_seconds)
        self._fill: Fill = fill
        self._sparse = dict(sparse or {})
        self._misalign = misalign
        self._raises = raises

    def __call__(self, dispatch: Dispatch) -> list[mx.array]:
        """Carry a dispatch out and give its outputs.

        Raises:
            EmulationError: the kernel does not compile, or something was found.
            SourceError: the source is not Metal.
            ValueError: the dispatch is not one that Metal takes, or a row of a virtual input does not fit.
        """
        text = generated(dispatch)
        kernel = translated(text.text, text.function, text.call)
        try:
            library = kernel_library(kernel, fill=self._fill)
        except CompileError as error:
            raise EmulationError([f"COMPILE: {error}"]) from error
        with Memory(misalign=self._misalign) as memory:
            given = self._inputs(memory, dispatch)
            outputs = self._outputs(memory, dispatch)
            code = Code(dispatch.source.name, library, text.text)
            report = launch(code, [*given, *outputs], dispatch.grid, dispatch.threadgroup, self._settings)
            shapes = zip(outputs, dispatch.output_shapes, dispatch.output_dtypes, strict=True)
            arrays = [as_mlx(contents(buffer), shape, dtype) for buffer, shape, dtype in shapes]
        self.reports.append(report)
        if report.errors and self._raises:
            raise EmulationError(report.errors)
        return arrays

    def _inputs(self, memory: Memory, dispatch: Dispatch) -> list[Buffer]:
        buffers = []
        for name, array in zip(dispatch.source.inputs, dispatch.inputs, strict=True):
            if name in self._sparse:
                buffers.append(memory.sparse(name, array, self._sparse[name]))
            elif array.nbytes > MOST_BYTES:
                known = ", ".join(self._sparse) or "none"
                raise ValueError(
                    f"{name} has {array.nbytes} bytes: name its rows in `sparse`, which has {known}"
                )
            else:
                buffers.append(memory.given(name, as_numpy(array)))
            asked = facts(dispatch.source.body, name, array.ndim)
            if asked.shape:
                buffers.append(memory.given(f"{name}_shape", np.array(array.shape, np.int32)))
            if asked.strides:
                strides = [int(np.prod(array.shape[axis + 1 :], dtype=object)) for axis in range(array.ndim)]
                buffers.append(memory.given(f"{name}_strides", np.array(strides, np.int64)))
            if asked.ndim:
                buffers.append(memory.given(f"{name}_ndim", np.array([array.ndim], np.int32)))
        return buffers

    def _outputs(self, memory: Memory, dispatch: Dispatch) -> list[Buffer]:
        buffers = []
        described = zip(dispatch.source.outputs, dispatch.output_shapes, dispatch.output_dtypes, strict=True)
        for name, shape, dtype in described:
            num_items = int(np.prod(shape, dtype=object))
            buffers.append(memory.output(name, num_items, dtype.size, self._settings.poison))
        return buffers


def on_every_schedule(call: Callable[[Emulator], Sequence[mx.array]], seed: int = 1) -> list[mx.array]:
    """What a call gives, the same bits on three schedules, whatever unset memory holds.

    Raises:
        EmulationError: the outputs differ, or something was found.
    """
    emulators = (
        Emulator(order="forward", poison=0x33),
        Emulator(order="reverse", poison=0x66),
        Emulator(order="shuffled", seed=seed, poison=0xFF, fill="zero"),
    )
    first, *others = (list(call(emulator)) for emulator in emulators)
    for emulator, arrays in zip(emulators[1:], others, strict=True):
        for index, (one, other) in enumerate(zip(first, arrays, strict=True)):
            if as_numpy(one).tobytes() != as_numpy(other).tobytes():
                kernels = ", ".join(report.kernel for report in emulator.reports)
                raise EmulationError(
                    [f"ORDER: output {index} of {kernels} depends on the schedule or on unset memory"]
                )
    return first
