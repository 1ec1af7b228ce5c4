"""What `kernels.py` measures: each kernel and what MLX has built in for the same, on the shapes of real models.

Makes arrays and calls functions. Knows nothing of clocks, memory or tables.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import mlx.core as mx
from mlx_eval_kernels import (
    AffineHead,
    Backend,
    DenseHead,
    Head,
    LogProb,
    linear_logprob,
    logprob,
    prefix_attention,
)

Arrays = tuple[mx.array, ...]
KERNELS: Final = ("logprob", "prefix_attention", "linear_logprob")
SEED: Final = 0
NATS: Final = 2e-3
"""`mx.logsumexp` of float32 on the CPU is off by up to 5e-4 nats (LOG.md); a wrong target or row is off by more."""
BLOCK_BYTES: Final = 2**28
"""Of float32 logits that the composition of head and `logprob` holds at once."""
CPU_KEYS_BYTES: Final = 2**31
"""Grouped heads of keys of this size, not of less, end the process in `mx.fast.scaled_dot_product_attention`."""
VOCABULARIES: Final = (32_000, 128_256, 262_144)
LOGIT_ROWS: Final = (1, 32, 1024, 4096)
HEADS: Final = ((32, 8, 128), (9, 3, 64))
"""Of queries, of keys, and their size: Llama 3 8B, SmolLM2 135M."""
PREFIXES: Final = (512, 2048, 8192)
BATCHES: Final = ((1, 64, 64), (16, 16, 16), (64, 64, 64), (1, 1, 64), (16, 1, 64), (64, 1, 64))
"""Rows, new tokens of each, and own keys with those of the new tokens: three of scoring, three of decoding."""
OUTPUT_LAYERS: Final = ((4096, 128_256), (576, 49_152))
"""Width and vocabulary of the same two models."""
HIDDEN_ROWS: Final = (1, 16, 256, 1024)
BITS: Final = (None, 4)
"""Of affine quantisation; None: dense."""
GROUP_SIZE: Final = 64


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compute a case."""

    name: str
    make: Callable[[], Arrays]
    """What it reads; the same numbers each time."""
    compute: Callable[..., Arrays]
    allowed: tuple[float, ...]
    """By how much its first outputs may differ from those of our own function, absolute."""
    held_bytes: int
    """Estimate of the most that it holds, what it reads included."""
    unable: str | None = None
    """Why MLX cannot compute it here; None: it can."""


@dataclass(frozen=True, slots=True)
class Case:
    """One shape of a kernel."""

    kernel: str
    shape: str
    ways: tuple[Way, ...]
    """Ours first."""
    num_bytes: int
    """That must move: each input read once, each output written once."""
    products: int
    """Multiplications."""


def cases(kernel: str, dtype: mx.Dtype, backend: Backend, quick: bool) -> Iterator[Case]:
    """Every shape of a kernel, or a few small ones."""
    if kernel == "logprob":
        for size in (32_000,) if quick else VOCABULARIES:
            for rows in (1, 64) if quick else LOGIT_ROWS:
                yield logprob_case(rows, size, dtype, backend)
    elif kernel == "prefix_attention":
        for heads in HEADS[1:] if quick else HEADS:
            for prefix in (512,) if quick else PREFIXES:
                for batch in ((4, 8, 8), (16, 1, 8)) if quick else BATCHES:
                    yield attention_case(batch, prefix, heads, dtype, backend)
    else:
        for width, size in OUTPUT_LAYERS[1:] if quick else OUTPUT_LAYERS:
            for bits in BITS:
                for rows in (1, 16) if quick else HIDDEN_ROWS:
                    yield linear_case(rows, (width, size), bits, dtype, backend)


def logprob_case(rows: int, size: int, dtype: mx.Dtype, backend: Backend) -> Case:
    """Logits [rows, size] and one target each."""
    make = functools.partial(_logits, rows, size, dtype)
    numbers = rows * size
    widened = 0 if dtype == mx.float32 else 4  # bytes of a float32 copy, a number
    # `cross_entropy` is fused on the GPU alone; on the CPU it computes in the type of the logits
    fused = mx.default_device() == mx.Device(mx.gpu)
    rounding = 0.0 if fused or dtype == mx.float32 else 32 * _step(dtype)
    copies = widened + 12 if backend == "reference" else 0
    return Case(
        kernel="logprob",
        shape=f"{rows:,} x {size:,}",
        ways=(
            Way(
                f"logprob, {backend}",
                make,
                lambda logits, targets: _flat(logprob(logits, targets, backend=backend)),
                (),
                numbers * (dtype.size + copies),
            ),
            Way(
                "mx.fast.cross_entropy + mx.argmax",
                make,
                _by_cross_entropy,
                (NATS + rounding, 0),
                numbers * (dtype.size + (0 if fused else 4)),
            ),
            Way(
                "float32, x - logsumexp, take, argmax",
                make,
                _by_log_softmax,
                (NATS, 0),
                numbers * (dtype.size + widened + 4),
            ),
        ),
        num_bytes=numbers * dtype.size + rows * (4 + 4 * len(LogProb._fields)),
        products=0,
    )


def attention_case(
    batch: tuple[int, int, int],
    prefix: int,
    heads: tuple[int, int, int],
    dtype: mx.Dtype,
    backend: Backend,
) -> Case:
    """Rows behind one prefix, causal in their own keys. `batch` and `heads` as in `BATCHES` and `HEADS`."""
    rows, tokens, own = batch
    num_queries, num_keys, width = heads
    scale = width**-0.5
    make = functools.partial(_attention_arrays, batch, prefix, heads, dtype)
    of_queries = rows * num_queries * tokens * width
    of_keys = num_keys * width  # a token
    shared = 2 * of_queries + 2 * of_keys * (prefix + rows * own)
    copied = 2 * of_queries + 2 * of_keys * rows * (prefix + own)
    # built-in attention holds its scores where it is not fused, which is so on the CPU
    scores = (
        0 if mx.default_device() == mx.Device(mx.gpu) else 2 * rows * num_queries * tokens * (prefix + own)
    )
    allowed = (1e-4 + _step(dtype) / 2,)  # outputs are some tenths, rounded to the type
    return Case(
        kernel="prefix_attention",
        shape=f"{rows} x {tokens}, own {own}, prefix {prefix:,}, heads {num_queries}/{num_keys} x {width}",
        ways=(
            Way(
                f"prefix_attention, {backend}",
                make,
                lambda *arrays: (prefix_attention(*arrays, scale=scale, mask="causal", backend=backend),),
                (),
                shared * dtype.size + 32 * of_queries + BLOCK_BYTES,
            ),
            Way(
                "mx.fast.scaled_dot_product_attention, prefix copied to each row",
                lambda: _with_copies(*make()),
                lambda *arrays: (mx.fast.scaled_dot_product_attention(*arrays, scale=scale, mask="causal"),),
                allowed,
                copied * dtype.size + 4 * scores,
                _fault_of_attention(rows * of_keys * (prefix + own) * dtype.size),
            ),
        ),
        num_bytes=shared * dtype.size,
        products=2 * rows * num_queries * tokens * (prefix + own) * width,
    )


def linear_case(
    rows: int, layer: tuple[int, int], bits: int | None, dtype: mx.Dtype, backend: Backend
) -> Case:
    """Hidden states and one target each. `layer` as in `OUTPUT_LAYERS`, `bits` as in `BITS`."""
    width, size = layer
    make = functools.partial(_hidden_and_head, rows, width, size, bits, dtype)
    weights = size * width * dtype.size if bits is None else size * width * bits // 8
    if bits is not None:
        weights += 2 * size * width // GROUP_SIZE * dtype.size
    states = rows * width * dtype.size
    made = weights + states + (0 if bits is None else size * width * dtype.size)  # quantised from dense ones
    allowed = NATS + 8 * _step(dtype)  # the head rounds its logits, of at most 16, to the type
    logits = min(BLOCK_BYTES, 4 * rows * size)
    return Case(
        kernel="linear_logprob",
        shape=f"{rows:,} x {width:,}, head {size:,}, {'dense' if bits is None else f'{bits}-bit'}",
        ways=(
            Way(
                f"linear_logprob, {backend}",
                make,
                lambda hidden, targets, *head: _flat(
                    linear_logprob(hidden, _head(head, bits), targets, backend=backend)
                ),
                (),
                made + (2**27 if backend == "reference" else 0),
            ),
            Way(
                f"head, then logprob, {backend}, in blocks of rows",
                make,
                lambda hidden, targets, *head: _head_then_logprob(
                    hidden, targets, _head(head, bits), backend
                ),
                (
                    allowed,
                    math.inf,
                    allowed,
                    allowed,
                ),  # where two logits are nearly equal, the argmax may differ
                made + 5 * logits,
            ),
        ),
        num_bytes=weights + states + rows * (4 + 4 * len(LogProb._fields)),
        products=rows * size * width,
    )


def _fault_of_attention(num_bytes: int) -> str | None:
    """Why MLX cannot attend to keys of so many bytes; None: it can."""
    if num_bytes < CPU_KEYS_BYTES or mx.default_device() == mx.Device(mx.gpu):
        return None
    return f"{num_bytes / 2**30:.1f} GiB of keys, on which MLX 0.32.4 ends in a segmentation fault on a CPU"


def _by_cross_entropy(logits: mx.array, targets: mx.array) -> Arrays:
    return -mx.fast.cross_entropy(logits, targets[:, 0])[:, None], mx.argmax(logits, axis=-1)


def _by_log_softmax(logits: mx.array, targets: mx.array) -> Arrays:
    values = logits.astype(mx.float32)
    scores = values - mx.logsumexp(values, axis=-1, keepdims=True)
    return mx.take_along_axis(scores, targets, axis=-1), mx.argmax(scores, axis=-1)


def _head_then_logprob(hidden: mx.array, targets: mx.array, head: Head, backend: Backend) -> Arrays:
    step = max(1, BLOCK_BYTES // (4 * head.shape[0]))
    found = []
    for start in range(0, hidden.shape[0], step):
        states = hidden[start : start + step]
        if isinstance(head, AffineHead):
            logits = mx.quantized_matmul(
                states,
                head.weight,
                head.scales,
                head.biases,
                transpose=True,
                group_size=head.group_size,
                bits=head.bits,
            )
        else:
            logits = states @ head.weight.T
        found.append(logprob(logits, targets[start : start + step], backend=backend))
        mx.eval(found[-1])  # as an engine does: the next block's logits take this one's place
        del logits
    return _flat(LogProb(*map(mx.concatenate, map(list, zip(*found, strict=True)))))


def _flat(result: LogProb) -> Arrays:
    """The log-probabilities, the argmax, and what the built-in ways do not have."""
    return result.logprob, result.argmax, result.logsumexp, result.argmax_logprob


def _normal(shape: tuple[int, ...], number: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(SEED + number)).astype(dtype)


def _repeated(shape: tuple[int, int], number: int, factor: float, dtype: mx.Dtype) -> mx.array:
    """Normal numbers of which some hundred rows are repeated: to draw a whole vocabulary's takes too long."""
    rows, columns = shape
    drawn = (factor * _normal((min(rows, 256), columns), number, mx.float32)).astype(dtype)
    return mx.tile(drawn, (-(-rows // drawn.shape[0]), 1))[:rows]


def _targets(rows: int, size: int) -> mx.array:
    return mx.random.randint(0, size, (rows, 1), key=mx.random.key(SEED)).astype(mx.int32)


def _logits(rows: int, size: int, dtype: mx.Dtype) -> Arrays:
    return _repeated((rows, size), 1, 3.0, dtype), _targets(rows, size)


def _attention_arrays(
    batch: tuple[int, int, int], prefix: int, heads: tuple[int, int, int], dtype: mx.Dtype
) -> Arrays:
    rows, tokens, own = batch
    num_queries, num_keys, width = heads
    shapes = (
        (rows, num_queries, tokens, width),
        *[(1, num_keys, prefix, width)] * 2,
        *[(rows, num_keys, own, width)] * 2,
    )
    return tuple(_normal(shape, number, dtype) for number, shape in enumerate(shapes))


def _with_copies(
    queries: mx.array, prefix_keys: mx.array, prefix_values: mx.array, keys: mx.array, values: mx.array
) -> Arrays:
    """What a model's cache holds that does not share: the prefix before each row's own."""
    pairs = ((prefix_keys, keys), (prefix_values, values))
    return queries, *(
        mx.concatenate([mx.broadcast_to(prefix, (keys.shape[0], *prefix.shape[1:])), own], axis=2)
        for prefix, own in pairs
    )


def _hidden_and_head(rows: int, width: int, size: int, bits: int | None, dtype: mx.Dtype) -> Arrays:
    weight = _repeated((size, width), 1, 2 * width**-0.5, dtype)
    head = (weight,) if bits is None else mx.quantize(weight, GROUP_SIZE, bits)
    return _normal((rows, width), 2, dtype), _targets(rows, size), *head


def _head(arrays: Arrays, bits: int | None) -> Head:
    if bits is None:
        (weight,) = arrays
        return DenseHead(weight)
    weight, scales, biases = arrays
    return AffineHead(weight, scales, biases, GROUP_SIZE, bits)


def _step(dtype: mx.Dtype) -> float:
    """Between 1 and the next number of the type."""
    return float(mx.finfo(dtype).eps)
