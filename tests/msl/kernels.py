"""Small kernels for the tests of the emulation: a dispatch in one call."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx_eval_kernels.launch import Dispatch, Source

Output = tuple[str, tuple[int, ...], mx.Dtype]


def dispatch(
    body: str,
    inputs: dict[str, mx.array],
    outputs: Sequence[Output],
    threads: int = 64,
    *,
    group: int = 64,
    header: str = "",
    template: Sequence[tuple[str, mx.Dtype | int | bool]] = (),
) -> Dispatch:
    """A dispatch of `threads` threads in groups of `group`, on one axis."""
    return Dispatch(
        source=Source("small", tuple(inputs), tuple(name for name, _, _ in outputs), body, header),
        inputs=list(inputs.values()),
        template=list(template),
        grid=(threads, 1, 1),
        threadgroup=(group, 1, 1),
        output_shapes=[shape for _, shape, _ in outputs],
        output_dtypes=[dtype for _, _, dtype in outputs],
    )
