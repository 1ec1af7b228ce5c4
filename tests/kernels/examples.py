"""A call of each kernel for each type and each shape that changes its text: what checks of the source run over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx_eval_kernels import AffineHead, DenseHead, Head
from mlx_eval_kernels.attention_parts import attention_by_parts
from mlx_eval_kernels.launch import Dispatch, Run
from mlx_eval_kernels.linear_logprob import by_kernel as linear_by_kernel
from mlx_eval_kernels.logprob import by_kernel as logprob_by_kernel

DTYPES = (mx.float32, mx.float16, mx.bfloat16)


@dataclass(frozen=True, slots=True)
class Example:
    """One call of a public function by its kernels."""

    name: str
    call: Callable[[Run], Sequence[mx.array]]

    def __str__(self) -> str:
        return self.name

    def dispatches(self) -> list[Dispatch]:
        """What it sends, none of it carried out."""
        sent: list[Dispatch] = []

        def keep(dispatch: Dispatch) -> list[mx.array]:
            sent.append(dispatch)
            return [
                mx.zeros(shape, dtype)
                for shape, dtype in zip(dispatch.output_shapes, dispatch.output_dtypes, strict=True)
            ]

        self.call(keep)
        return sent


def examples() -> Iterator[Example]:
    """Of every kernel."""
    for dtype in DTYPES:
        yield logprob_example(3, 1030, 2, dtype)
        yield logprob_example(1, 5, 1, dtype)  # fewer than eight numbers: MLX puts them into constant memory
        yield logprob_example(40, 7, 0, dtype)
        for mask in ("none", "causal", "array"):
            yield attention_example((3, 2, 3, 5, 70, 8, 64, 64), mask, dtype)
        yield attention_example((1, 1, 1, 1, 1, 1, 8, 8), "none", dtype)
        yield attention_example((9, 2, 1, 1, 600, 2, 24, 16), "array", dtype, sinks=True)
        for bits in (0, 4, 8):
            yield linear_example((33, 64, 131, 3), bits, dtype)
            yield linear_example((1, 32, 1, 1), bits, dtype)
            yield linear_example((9, 32, 70, 0), bits, dtype)
    for width in (80, 96, 128, 256):
        yield attention_example((2, 1, 2, 9, 40, 12, width, width), "causal", mx.float16)


def logprob_example(rows: int, size: int, count: int, dtype: mx.Dtype) -> Example:
    rng = np.random.default_rng(size)
    logits = mx.array(rng.standard_normal((rows, size)).astype(np.float32)).astype(dtype)
    targets = mx.array(rng.integers(-1, size, (rows, count)).astype(np.int32))
    return Example(
        f"logprob-{rows}x{size}x{count}-{_short(dtype)}", lambda run: logprob_by_kernel(logits, targets, run)
    )


def attention_example(sizes: tuple[int, ...], kind: str, dtype: mx.Dtype, sinks: bool = False) -> Example:
    """sizes: B, H, G, T, P, S, D, E."""
    batch, heads, groups, length, prefix, own, width, out = sizes
    rng = np.random.default_rng(sum(sizes))

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)

    arrays = (
        normal(batch, heads * groups, length, width),
        normal(1, heads, prefix, width),
        normal(1, heads, prefix, out),
        normal(batch, heads, own, width),
        normal(batch, heads, own, out),
    )
    seen = rng.random((batch, 1, length, own)) < 0.5
    seen[..., 0] = True
    mask = {"none": None, "causal": "causal", "array": mx.array(seen)}[kind]
    extra = normal(heads * groups) if sinks else None
    name = "x".join(map(str, sizes))
    return Example(
        f"attention-{name}-{kind}{'-sinks' if sinks else ''}-{_short(dtype)}",
        lambda run: [
            attention_by_parts(*arrays, scale=width**-0.5, mask=mask, sinks=extra, run=run),
        ],
    )


def linear_example(sizes: tuple[int, int, int, int], bits: int, dtype: mx.Dtype) -> Example:
    """sizes: N, D, V, K. bits: of a weight; 0: the weights are of the type."""
    rows, width, size, count = sizes
    rng = np.random.default_rng(sum(sizes))
    hidden = mx.array(rng.standard_normal((rows, width)).astype(np.float32)).astype(dtype)
    weight = mx.array(rng.standard_normal((size, width)).astype(np.float32)).astype(dtype)
    targets = mx.array(rng.integers(-1, size, (rows, count)).astype(np.int32))
    head: Head = DenseHead(weight)
    if bits:
        head = AffineHead(*mx.quantize(weight, group_size=32, bits=bits), group_size=32, bits=bits)
    return Example(
        f"linear-{'x'.join(map(str, sizes))}-{f'{bits}-bit' if bits else 'dense'}-{_short(dtype)}",
        lambda run: linear_by_kernel(hidden, head, targets, run),
    )


def _short(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]
