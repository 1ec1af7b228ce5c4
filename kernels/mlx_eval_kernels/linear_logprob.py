"""`logprob` of hidden states and the weights of an output layer, without the logits in between.

For memory, not for time: a hand-written product of matrices does not reach MLX's own. The vocabulary is cut into
parts. Of each part the largest logit, the sum of exponentials and the logits of the targets are kept, [N] numbers
each, which are merged at the end. Logits are float32, whatever the types of states and weights: an output layer of
MLX rounds its logits to the type of the states, so log-probabilities differ by that rounding, and where two tokens
are equal after it, this argmax is the one that is larger before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import mlx.core as mx

from mlx_eval_kernels.exponential import exp_below
from mlx_eval_kernels.launch import (
    DISPATCH_WORK,
    FLOATS,
    GROUPS,
    Backend,
    Dispatch,
    KernelError,
    Run,
    Source,
    chosen_backend,
    on_metal,
    read,
)
from mlx_eval_kernels.logprob import NO_TARGET, LogProb, as_targets, grouped_sum

BLOCK_BYTES: Final = 2**24
"""Of the reference: the largest block of float32 logits, and of float32 weights, that is held at once."""
BITS: Final = (4, 8)
GROUP_SIZES: Final = (32, 64, 128)
"""Of quantised weights that the Metal kernel reads."""
THREADS: Final = 128
"""Of a group; this and the next two are also in `linear_logprob.metal`."""
ROWS: Final = 32
"""Of a group, which share what it reads of the weights."""
TOKENS: Final = 64
"""Of the vocabulary that a group multiplies at once; a part is a multiple."""
PART_TOKENS: Final = 4096
"""The most tokens of a part: longer sums would lose digits."""
SOURCE: Final = Source(
    name="mlx_eval_linear_logprob",
    inputs=("hidden", "weight", "scales", "biases", "targets"),
    outputs=("tops", "sums", "indices", "chosen"),
    body=read("linear_logprob.metal"),
    header=read("softmax_row.metal", "linear_tiles.metal"),
)


@dataclass(frozen=True, slots=True, eq=False)
class DenseHead:
    """An output layer whose weights are floating-point numbers."""

    weight: mx.array
    """[V, D]"""

    @property
    def shape(self) -> tuple[int, int]:
        """(V, D)"""
        size, width = self.weight.shape
        return size, width

    def rows(self, start: int, stop: int) -> mx.array:
        """The weights of some tokens in float32, [stop - start, D]."""
        return self.weight[start:stop].astype(mx.float32)


@dataclass(frozen=True, slots=True, eq=False)
class AffineHead:
    """An output layer in MLX's affine quantisation: a weight is scale * q + bias of its group."""

    weight: mx.array
    """[V, D * bits / 32] uint32"""
    scales: mx.array
    """[V, D / group_size]"""
    biases: mx.array
    """The same shape."""
    group_size: int
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        """(V, D)"""
        return self.scales.shape[0], self.scales.shape[1] * self.group_size

    def rows(self, start: int, stop: int) -> mx.array:
        """The weights of some tokens in float32, [stop - start, D]."""
        scales, biases = (array[start:stop].astype(mx.float32) for array in (self.scales, self.biases))
        return mx.dequantize(self.weight[start:stop], scales, biases, self.group_size, self.bits)


Head = DenseHead | AffineHead
"""An output layer without a bias, as it lies in memory."""


class _Parts(NamedTuple):
    """The softmax's state of X parts of the vocabulary."""

    tops: mx.array
    """[N, X] float32, the largest logit; NaN where there is one."""
    sums: mx.array
    """[N, X] float32, of exp(logit - top); of no meaning where the top is not finite."""
    indices: mx.array
    """[N, X] uint32, the lowest token that has the largest logit."""
    chosen: mx.array
    """[N, K] float32, the logits of the targets; NaN where there is none."""


def linear_logprob(
    hidden: mx.array, head: Head, targets: mx.array, *, backend: Backend | None = None
) -> LogProb:
    """Score the targets of each row of hidden states.

    Args:
        hidden: [N, D] float32, float16 or bfloat16.
        head: the output layer, of V tokens, which has no bias of its own.
        targets: [N, K] integer token ids, `NO_TARGET` where there is none; K may be 0.
        backend: see `launch.chosen_backend`. The Metal kernel takes widths D that are multiples of 8, and affine
            heads of `BITS` and `GROUP_SIZES`.

    Returns:
        What `logprob` says of the logits `hidden @ weight.T`, computed and kept in float32.

    Raises:
        KernelError: the shapes do not fit together, or the backend cannot be had.
    """
    _check(hidden, head, targets)
    if chosen_backend(backend, _unsupported(hidden, head)) == "metal":
        return by_kernel(hidden, head, targets)
    return by_reference(hidden, head, targets)


def by_kernel(hidden: mx.array, head: Head, targets: mx.array, run: Run = on_metal) -> LogProb:
    """`linear_logprob` in as many dispatches as `DISPATCH_WORK` asks for."""
    targets = as_targets(targets, head.shape[0])
    rows, num_targets = targets.shape
    size, width = head.shape
    if not rows:
        return by_reference(hidden, head, targets)
    if not num_targets:  # a kernel cannot take an empty array
        targets = mx.full((rows, 1), NO_TARGET, dtype=mx.int32)
    # rows are cut where blocks of them end, so that no weight is read more often
    step = min(rows, max(1, DISPATCH_WORK // (size * width * ROWS)) * ROWS)
    found = [
        _merged(_dispatch(hidden[start : start + step], head, targets[start : start + step], run))
        for start in range(0, rows, step)
    ]
    whole = LogProb(*(mx.concatenate(list(arrays)) for arrays in zip(*found, strict=True)))
    return whole._replace(logprob=whole.logprob[:, :num_targets])


def by_reference(hidden: mx.array, head: Head, targets: mx.array) -> LogProb:
    """`linear_logprob` in plain MLX, a block of the vocabulary at a time."""
    targets = as_targets(targets, head.shape[0])
    if not hidden.shape[0]:
        nothing = mx.zeros(0)
        return LogProb(mx.zeros(targets.shape), nothing, nothing.astype(mx.uint32), nothing)
    size, width = head.shape
    step = max(1, BLOCK_BYTES // (4 * max(width, hidden.shape[0])))
    states = hidden.astype(mx.float32)
    chosen = mx.full(targets.shape, mx.nan)
    parts: list[tuple[mx.array, mx.array, mx.array]] = []
    for start in range(0, size, step):
        if parts:  # one block after the other: MLX would be free to hold all of them at once
            states = mx.depends([states], [chosen, *parts[-1]])[0]
        logits = states @ head.rows(start, min(size, start + step)).T  # [N, step]
        top = mx.max(logits, axis=-1, keepdims=True)
        sums = grouped_sum(exp_below(logits, mx.where(mx.isinf(top), 0.0, top)))
        parts.append((top, sums, mx.argmax(logits, axis=-1, keepdims=True) + start))
        place = targets - start
        here = mx.logical_and(place >= 0, place < logits.shape[1])
        chosen = mx.where(here, mx.take_along_axis(logits, mx.where(here, place, 0), axis=-1), chosen)
    tops, sums, indices = (mx.concatenate(list(arrays), axis=-1) for arrays in zip(*parts, strict=True))
    return _merged(_Parts(tops, sums, indices, chosen))


def _check(hidden: mx.array, head: Head, targets: mx.array) -> None:
    """Raise a `KernelError` for shapes that do not fit together."""
    if isinstance(head, AffineHead):
        size, groups = head.scales.shape if head.scales.ndim == 2 else (0, 0)
        packed = (size, groups * head.group_size * head.bits // 32)
        fits = head.weight.shape == packed and head.biases.shape == head.scales.shape
        fits = fits and head.weight.dtype == mx.uint32
        asked = "packed weights, scales and biases"
        shapes = [head.weight.shape, head.scales.shape, head.biases.shape]
    else:
        fits = head.weight.ndim == 2
        asked = "weights [V, D]"
        shapes = [head.weight.shape]
    fits = fits and min(head.shape) > 0 and hidden.ndim == targets.ndim == 2
    if not fits or hidden.shape[1] != head.shape[1] or hidden.shape[0] != targets.shape[0]:
        given = ", ".join(map(str, [hidden.shape, *shapes, targets.shape]))
        raise KernelError(f"linear_logprob takes hidden [N, D], {asked} and targets [N, K], not {given}")


def _unsupported(hidden: mx.array, head: Head) -> str | None:
    """Why the kernel cannot take the arguments; None: it can."""
    numbers = [hidden, head.weight] if isinstance(head, DenseHead) else [hidden, head.scales, head.biases]
    if any(array.dtype not in FLOATS for array in numbers):
        return f"numbers of types {', '.join(sorted({str(array.dtype) for array in numbers}))}"
    if isinstance(head, AffineHead) and head.scales.dtype != head.biases.dtype:
        return f"scales of type {head.scales.dtype} beside biases of type {head.biases.dtype}"
    if hidden.shape[1] % 8:
        return f"hidden states of width {hidden.shape[1]}: a multiple of 8"
    if isinstance(head, AffineHead) and (head.bits not in BITS or head.group_size not in GROUP_SIZES):
        return f"{head.bits}-bit weights in groups of {head.group_size}"
    return None


def _dispatch(hidden: mx.array, head: Head, targets: mx.array, run: Run) -> _Parts:
    """One run of `SOURCE`."""
    rows = hidden.shape[0]
    size = head.shape[0]
    blocks = -(-rows // ROWS)
    splits = max(-(-size // PART_TOKENS), min(-(-GROUPS // blocks), -(-size // TOKENS)))
    per_split = -(-size // (splits * TOKENS)) * TOKENS
    splits = -(-size // per_split)  # none is empty
    if isinstance(head, AffineHead):
        scales, biases, bits, group = head.scales, head.biases, head.bits, head.group_size
    else:
        scales = biases = mx.zeros(1)
        bits, group = 0, GROUP_SIZES[0]
    return _Parts(
        *run(
            Dispatch(
                SOURCE,
                inputs=(hidden, head.weight, scales, biases, targets),
                template=(("BITS", bits), ("GROUP", group)),
                grid=(THREADS * splits, blocks, 1),
                threadgroup=(THREADS, 1, 1),
                output_shapes=((rows, splits), (rows, splits), (rows, splits), targets.shape),
                output_dtypes=(mx.float32, mx.float32, mx.uint32, mx.float32),
            )
        )
    )


def _merged(parts: _Parts) -> LogProb:
    """The whole vocabulary, with the values of `logprob` where logits are infinite or NaN."""
    top = mx.max(parts.tops, axis=-1, keepdims=True)  # [N, 1]
    shift = mx.where(mx.isinf(top), 0.0, top)
    weights = mx.exp(parts.tops - shift)
    sums = mx.sum(parts.sums * weights, axis=-1, keepdims=True)
    log_sum = mx.where(mx.isinf(top), top, mx.log(sums))
    # a row with NaN gets the token of some NaN
    has_top = mx.logical_or(parts.tops == top, mx.isnan(parts.tops))
    argmax = mx.min(mx.where(has_top, parts.indices, mx.array(2**32 - 1, mx.uint32)), axis=-1)
    # not chosen - logsumexp: where logits are large, that sum has lost digits
    return LogProb(
        (parts.chosen - shift) - log_sum, (shift + log_sum)[:, 0], argmax, ((top - shift) - log_sum)[:, 0]
    )
