"""Asks MLX for the text that it makes of a kernel, on machines without Metal too.

Recorded into an exported function, a Metal kernel does not have to run, and the file holds its whole text.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx_eval_kernels.launch import Dispatch

from tests.msl.signature import Generated

_MARK: Final = (12).to_bytes(8, "little") + b"CustomKernel"


def exported(dispatch: Dispatch) -> Generated:
    """A dispatch's function name and text as MLX itself has them; `call` is the name alone."""
    source = dispatch.source
    kernel: Any = mx.fast.metal_kernel(
        name=source.name,
        input_names=list(source.inputs),
        output_names=list(source.outputs),
        source=source.body,
        header=source.header,
    )

    def function(*arrays: mx.array) -> list[mx.array]:
        outputs: list[mx.array] = kernel(
            inputs=list(arrays),
            template=list(dispatch.template) or None,
            grid=dispatch.grid,
            threadgroup=dispatch.threadgroup,
            output_shapes=list(dispatch.output_shapes),
            output_dtypes=list(dispatch.output_dtypes),
        )
        return outputs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.mlxfn"
        mx.export_function(str(path), function, *dispatch.inputs)
        raw = path.read_bytes()
    name, at = _string(raw, raw.index(_MARK) + len(_MARK))
    text, _ = _string(raw, at)
    return Generated(name, name, text)


def _string(raw: bytes, at: int) -> tuple[str, int]:
    """A string with its length before it, and the offset after it."""
    start = at + 8
    end = start + int.from_bytes(raw[at:start], "little")
    return raw[start:end].decode(), end
