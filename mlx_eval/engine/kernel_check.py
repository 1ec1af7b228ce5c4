"""Whether the Metal kernels compute what plain MLX computes, on the machine at hand.

They are tested elsewhere; drivers, compilers and chips differ. A few small calls are compared once for each
combination of programs, system and chip, and what was found is kept in the user's cache folder.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_eval_kernels import AffineHead
from mlx_eval_kernels.attention_parts import attention_by_parts
from mlx_eval_kernels.launch import Run, on_metal
from mlx_eval_kernels.linear_logprob import by_kernel as linear_by_kernel
from mlx_eval_kernels.linear_logprob import by_reference as linear_by_reference
from mlx_eval_kernels.logprob import by_kernel as logprob_by_kernel
from mlx_eval_kernels.logprob import by_reference as logprob_by_reference
from mlx_eval_kernels.prefix_attention import by_reference as attention_by_reference

from mlx_eval.cache import read_cached, write_cached
from mlx_eval.errors import DeviceError
from mlx_eval.models import runtime

AGREE: Final = "agree"
NAME: Final = "kernels.json"
TOLERANCE: Final = 5e-3
"""Of numbers of about 1 to 10 computed from float16: matrix units may round float32 to 10 bits. Mistakes in an index
or a mask are as large as the numbers."""


def check_kernels() -> None:
    """Compare the kernels with the reference, where Metal is taken and this was not done before.

    Raises:
        DeviceError: they differ, or cannot be compiled.
        InvalidOptionError: the environment asks for what is not there.
    """
    if runtime.kernel_backend() != "metal":
        return
    device = runtime.device()
    programs = [f"{name}={version(name)}" for name in ("mlx", "mlx-eval")]
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
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(mx.float16)

    logits, targets = 4 * normal(3, 5000), mx.array([[17, -1], [4999, 0], [2, 3]])
    hidden, output = normal(3, 64), AffineHead(*mx.quantize(normal(5000, 64)), group_size=64, bits=4)
    heads = [normal(*shape) for shape in ((2, 4, 5, 64), *[(1, 2, 300, 64)] * 2, *[(2, 2, 9, 64)] * 2)]
    try:
        found = {
            "logprob": zip(
                logprob_by_kernel(logits, targets, run), logprob_by_reference(logits, targets), strict=True
            ),
            "linear_logprob": zip(
                linear_by_kernel(hidden, output, targets, run),
                linear_by_reference(hidden, output, targets),
                strict=True,
            ),
            "prefix_attention": [
                (
                    attention_by_parts(*heads, scale=0.125, mask="causal", run=run),
                    attention_by_reference(*heads, scale=0.125, mask="causal"),
                )
            ],
        }
        for name, results in found.items():
            for ours, plain in results:
                if off := _difference(ours, plain):
                    return f"{name} differs by {off:.1e}"
    except RuntimeError as error:
        return str(error).partition("\n")[0][:200]
    return None


def _difference(ours: mx.array, plain: mx.array) -> float:
    """The largest one, 0 where it is rounding; indices must be the same."""
    allowed = 0.0 if mx.issubdtype(plain.dtype, mx.integer) else TOLERANCE
    if mx.allclose(ours, plain, rtol=allowed, atol=allowed, equal_nan=True).item():
        return 0.0
    off = mx.abs(ours.astype(mx.float32) - plain.astype(mx.float32))
    same_nan = mx.isnan(ours) & mx.isnan(plain)
    largest: Any = mx.max(mx.where(same_nan, 0, off)).item()
    return float(largest)
