"""Whether the Metal kernels compute what plain MLX computes, on the machine at hand.

They are tested elsewhere; drivers, compilers and chips differ. A few small calls are compared once for each
combination of programs, system and chip, and what was found is kept in the user's cache folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_eval_kernels import AffineHead, DenseHead
from mlx_eval_kernels.attention_parts import MERGE, PART, attention_by_parts
from mlx_eval_kernels.launch import Run, on_metal
from mlx_eval_kernels.linear_logprob import SOURCE as LINEAR
from mlx_eval_kernels.linear_logprob import by_kernel as linear_by_kernel
from mlx_eval_kernels.linear_logprob import by_reference as linear_by_reference
from mlx_eval_kernels.logprob import SOURCE as LOGPROB
from mlx_eval_kernels.logprob import by_kernel as logprob_by_kernel
from mlx_eval_kernels.logprob import by_reference as logprob_by_reference
from mlx_eval_kernels.prefix_attention import by_reference as attention_by_reference

from mlx_eval.cache import read_cached, write_cached
from mlx_eval.errors import DeviceError
from mlx_eval.models import runtime

AGREE: Final = "agree"
NAME: Final = "kernels.json"
SOURCES: Final = (LOGPROB, LINEAR, PART, MERGE)
TOLERANCE: Final = 1e-2
"""Of numbers of about 1 to 10, of which bfloat16 keeps 8 bits and matrix units may keep 10. Mistakes in an index or a
mask are as large as the numbers."""


def check_kernels() -> None:
    """Compare the kernels with the reference, where Metal is taken and this was not done before.

    Raises:
        DeviceError: they differ, or cannot be compiled.
        InvalidOptionError: the environment asks for what is not there.
    """
    if runtime.kernel_backend() != "metal":
        return
    device = runtime.device()
    programs = [f"mlx={version('mlx')}", *(source.header + source.body for source in SOURCES)]
    key = hashlib.sha256(" ".join([*programs, device.name, device.os]).encode()).hexdigest()
    if read_cached(NAME, key) == AGREE:
        return
    if found := disagreement():
        raise DeviceError(
            f"a Metal kernel does not compute what plain MLX computes on this machine ({found}): "
            "set MLX_EVAL_KERNELS=reference to go on without, and please report it"
        )
    write_cached(NAME, key, AGREE)


def disagreement(run: Run = on_metal) -> str | None:
    """Which kernel is off and by how much; None: none is."""
    try:
        for dtype, width in ((mx.float16, 64), (mx.bfloat16, 256)):
            for name, ours, plain in _results(dtype, width, run):
                if off := _difference(ours, plain):
                    return f"{name} differs by {off:.1e} in {dtype}"
    except (RuntimeError, ValueError) as error:  # a text that is refused, a group that is too large
        return str(error).partition("\n")[0][:200]
    return None


def _results(dtype: mx.Dtype, width: int, run: Run) -> Iterator[tuple[str, mx.array, mx.array]]:
    """Results of each kernel beside those of the reference."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)

    logits, targets = 4 * normal(3, 5000), mx.array([[17, -1], [4999, 0], [2, 3]])
    for ours, plain in zip(
        logprob_by_kernel(logits, targets, run), logprob_by_reference(logits, targets), strict=True
    ):
        yield "logprob", ours, plain
    hidden, weight = normal(3, width), normal(1000, width)
    packed = mx.quantize(weight, group_size=64, bits=4)
    for head in (DenseHead(weight), AffineHead(*packed, group_size=64, bits=4)):
        results = linear_by_kernel(hidden, head, targets, run), linear_by_reference(hidden, head, targets)
        for ours, plain in zip(*results, strict=True):
            yield "linear_logprob", ours, plain
    shapes = ((2, 4, 5, width), *[(1, 2, 300, width)] * 2, *[(2, 2, 9, width)] * 2)
    heads = [normal(*shape) for shape in shapes]
    for mask in ("causal", mx.array(rng.random((2, 1, 5, 9)) < 0.5)):
        yield (
            "prefix_attention",
            attention_by_parts(*heads, scale=width**-0.5, mask=mask, run=run),
            attention_by_reference(
                *(array.astype(mx.float32) for array in heads), scale=width**-0.5, mask=mask
            ),
        )


def _difference(ours: mx.array, plain: mx.array) -> float:
    """The largest one, 0 where it is rounding; indices must be the same."""
    allowed = 0.0 if mx.issubdtype(plain.dtype, mx.integer) else TOLERANCE
    if mx.allclose(ours, plain, rtol=allowed, atol=allowed, equal_nan=True).item():
        return 0.0
    off = mx.abs(ours.astype(mx.float32) - plain.astype(mx.float32))
    same_nan = mx.isnan(ours) & mx.isnan(plain)
    largest: Any = mx.max(mx.where(same_nan, 0, off)).item()
    return float(largest)
