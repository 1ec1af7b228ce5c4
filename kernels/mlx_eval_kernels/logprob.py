"""Log-probabilities of chosen tokens, the normaliser and the most probable token of each row of logits.

The Metal kernel reads the logits once. The reference takes the sum behind the logsumexp in two levels, groups of
256 values and then the groups: one float32 sweep over a whole vocabulary, as `mx.logsumexp` does on the CPU, was
off by 7e-5 nats at 49,152 values and by 2.6e-4 at 151,936, the same sign on every token; two levels are off by
1.4e-6.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import mlx.core as mx

from mlx_eval_kernels.exponential import exp_below
from mlx_eval_kernels.launch import (
    FLOATS,
    Backend,
    Dispatch,
    KernelError,
    Run,
    Source,
    chosen_backend,
    on_metal,
    read,
)

GROUP: Final = 256
NO_TARGET: Final = -1
"""Stands in `targets` where a row has fewer than K targets."""
THREADS: Final = 256
"""Of a group, which reads one row."""
SOURCE: Final = Source(
    name="mlx_eval_logprob",
    inputs=("logits", "targets"),
    outputs=("logprob", "logsumexp", "argmax", "argmax_logprob"),
    body=read("logprob.metal"),
    header=read("softmax_row.metal"),
)


class LogProb(NamedTuple):
    """What `logprob` returns, all of it float32 but for the indices."""

    logprob: mx.array
    """[N, K] log-probability of each target in nats; NaN for `NO_TARGET` and for ids outside the vocabulary."""
    logsumexp: mx.array
    """[N]; NaN tells that the row has a NaN."""
    argmax: mx.array
    """[N] uint32, the lowest index among equals; of a row with NaN, some index."""
    argmax_logprob: mx.array
    """[N] log-probability of the token `argmax`."""


def logprob(logits: mx.array, targets: mx.array, *, backend: Backend | None = None) -> LogProb:
    """Score the targets of each row.

    Args:
        logits: [N, V] float32, float16 or bfloat16, V at least one. Computed in float32 whatever the type.
        targets: [N, K] integer token ids, `NO_TARGET` where there is none; K may be 0.
        backend: see `launch.chosen_backend`.

    Raises:
        KernelError: the shapes do not fit together, or the backend cannot be had.
    """
    if logits.ndim != 2 or targets.ndim != 2 or logits.shape[0] != targets.shape[0] or not logits.shape[1]:
        raise KernelError(
            f"logprob takes logits [N, V] and targets [N, K], not {logits.shape} and {targets.shape}"
        )
    unsupported = None if logits.dtype in FLOATS else f"logits of type {logits.dtype}"
    if chosen_backend(backend, unsupported) == "metal":
        return by_kernel(logits, targets)
    return by_reference(logits, targets)


def as_targets(targets: mx.array, size: int) -> mx.array:
    """Targets of any integer type as int32; those outside a vocabulary of `size` may become `NO_TARGET`.

    Raises:
        KernelError: they are no integers.
    """
    if not mx.issubdtype(targets.dtype, mx.integer):
        raise KernelError(f"targets are integer token ids, not {targets.dtype}")
    ids = targets.astype(mx.int32)
    if targets.dtype.size < 4 or targets.dtype == mx.int32:
        return ids
    wide = targets.astype(mx.int64)  # ids beyond int32 would wrap around into the vocabulary
    return mx.where(mx.logical_and(wide >= 0, wide < size), ids, NO_TARGET)


def by_kernel(logits: mx.array, targets: mx.array, run: Run = on_metal) -> LogProb:
    """`logprob` as one dispatch."""
    targets = as_targets(targets, logits.shape[1])
    rows, num_targets = targets.shape
    if not rows:
        return by_reference(logits, targets)
    if not num_targets:  # a kernel cannot take an empty array
        targets = mx.full((rows, 1), NO_TARGET, dtype=mx.int32)
    outputs = run(
        Dispatch(
            SOURCE,
            inputs=(logits, targets),
            template=(("T", logits.dtype), ("THREADS", THREADS)),
            grid=(THREADS * rows, 1, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=(targets.shape, (rows,), (rows,), (rows,)),
            output_dtypes=(mx.float32, mx.float32, mx.uint32, mx.float32),
        )
    )
    scores, log_sum_exp, argmax, best = outputs
    return LogProb(scores[:, :num_targets], log_sum_exp, argmax, best)


def by_reference(logits: mx.array, targets: mx.array) -> LogProb:
    """`logprob` in plain MLX."""
    targets = as_targets(targets, logits.shape[1])
    rows, size = logits.shape
    if not rows:
        return LogProb(mx.zeros(targets.shape), mx.zeros(0), mx.zeros(0, dtype=mx.uint32), mx.zeros(0))
    values = logits.astype(mx.float32)  # [N, V]
    shift, log_sum = _shifted_logsumexp(values)  # [N, 1] each
    valid = mx.logical_and(targets >= 0, targets < size)
    chosen = mx.take_along_axis(values, mx.where(valid, targets, 0), axis=-1)  # [N, K]
    # not chosen - logsumexp: where logits are large, the sum of shift and log_sum has lost digits
    scores = mx.where(valid, (chosen - shift) - log_sum, mx.nan)
    argmax = mx.argmax(values, axis=-1)
    best = mx.take_along_axis(values, argmax[:, None], axis=-1)
    return LogProb(scores, (shift + log_sum)[:, 0], argmax, ((best - shift) - log_sum)[:, 0])


def _shifted_logsumexp(values: mx.array) -> tuple[mx.array, mx.array]:
    """[N, V] float32 -> [N, 1] shift and [N, 1] log-sum-exp of the row less its shift.

    Their sum is -inf for a row of -inf, inf where a row has one, NaN where it has one.
    """
    top = mx.max(values, axis=-1, keepdims=True)
    shift = mx.where(mx.isinf(top), 0.0, top)  # -inf - -inf would be NaN
    sums = grouped_sum(exp_below(values, shift))  # [N, 1]
    # without a number above -inf there is nothing to add, not even the smallest of `exp_below`
    return shift, mx.where(top == -mx.inf, -mx.inf, mx.log(sums))


def grouped_sum(terms: mx.array) -> mx.array:
    """[N, V] float32 -> [N, 1] sums of the rows, taken in groups first."""
    rows, size = terms.shape
    if size % GROUP:
        terms = mx.pad(terms, [(0, 0), (0, GROUP - size % GROUP)])
    return terms.reshape(rows, terms.shape[1] // GROUP, GROUP).sum(axis=-1).sum(axis=-1, keepdims=True)
