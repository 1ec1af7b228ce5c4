"""Attention of many rows to one prefix that is stored once, and of each row to its own keys and values.

The two parts are computed apart and merged by the logsumexp of their scores, which is exact: the softmax over
both is the mean of the two softmaxes, weighted by the sums of their exponentials (Hydragen, arXiv 2402.05099).
All rows read the prefix as one long row of queries, so its keys and values are never copied.
"""

from __future__ import annotations

from typing import Final

import mlx.core as mx

from mlx_eval_kernels.attention_parts import WIDEST, attention_by_parts
from mlx_eval_kernels.exponential import exp_below
from mlx_eval_kernels.launch import FLOATS, Backend, KernelError, chosen_backend

SCORES_BYTES: Final = 2**28
"""The largest block of float32 scores of queries against the prefix that is held at once."""
CPU_SCORES_BYTES: Final = 2**21
"""The same on the CPU, whose caches hold so much: a quarter less time than large blocks (benchmarks/LOG.md)."""


def prefix_attention(
    queries: mx.array,
    prefix_keys: mx.array,
    prefix_values: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    backend: Backend | None = None,
) -> mx.array:
    """Attend to a common prefix and to own keys, with grouped-query heads.

    Args:
        queries: [B, G * H, T, D], G of them for each head of keys.
        prefix_keys: [1, H, P, D], P at least one; every query sees all of them.
        prefix_values: [1, H, P, E]
        keys: [B, H, S, D] of each row itself, the last T of them for the queries' own tokens.
        values: [B, H, S, E]
        scale: of the products of queries and keys.
        mask: which of `keys` a query sees, at least one: boolean, broadcastable to [B, 1, T, S]; "causal": those
            up to its own token; None: all.
        sinks: [G * H] scores that take part in each head's softmax and add nothing to its mean; None: there are none.
        backend: see `launch.chosen_backend`. The Metal kernel takes widths D and E that are multiples of 8 up to
            `WIDEST`, and one floating type for all arrays.

    Returns:
        [B, G * H, T, E] in the type of `queries`; the sums are taken in float32.

    Raises:
        KernelError: the shapes do not fit together, or the backend cannot be had.
    """
    arrays = (queries, prefix_keys, prefix_values, keys, values)
    _check(arrays, mask, sinks)
    unsupported = _unsupported(arrays)
    if chosen_backend(backend, unsupported) == "metal":
        return attention_by_parts(*arrays, scale=scale, mask=mask, sinks=sinks)
    return by_reference(*arrays, scale=scale, mask=mask, sinks=sinks)


def _check(arrays: tuple[mx.array, ...], mask: mx.array | str | None, sinks: mx.array | None) -> None:
    """Raise a `KernelError` for arguments that do not fit together."""
    queries, prefix_keys, prefix_values, keys, values = arrays
    if any(array.ndim != 4 or not array.size for array in arrays) or queries.shape[1] % keys.shape[1]:
        raise KernelError(_misfit(arrays))
    batch, num_queries, length, width = queries.shape
    heads, num_keys = keys.shape[1:3]
    prefix_len, out = prefix_keys.shape[2], values.shape[3]
    wanted = ((1, heads, prefix_len, width), (1, heads, prefix_len, out), (batch, heads, num_keys, width))
    if (prefix_keys.shape, prefix_values.shape, keys.shape) != wanted or values.shape[:3] != keys.shape[:3]:
        raise KernelError(_misfit(arrays))
    if sinks is not None and sinks.shape != (num_queries,):
        raise KernelError(f"sinks are a score for each of {num_queries} heads, not {sinks.shape}")
    if isinstance(mask, str):
        if mask != "causal":
            raise KernelError(f'mask is an array, "causal" or None, not {mask!r}')
        if num_keys < length:
            raise KernelError(f"a causal mask needs own keys for all {length} tokens, not {num_keys}")
    elif mask is not None:
        whole = (batch, 1, length, num_keys)
        sizes = (1,) * (4 - mask.ndim) + mask.shape
        fits = len(sizes) == 4 and all(size in (1, most) for size, most in zip(sizes, whole, strict=True))
        if mask.dtype != mx.bool_ or not fits:
            raise KernelError(f"a mask is boolean and broadcast to {whole}, not {mask.dtype} {mask.shape}")


def _misfit(arrays: tuple[mx.array, ...]) -> str:
    shapes = ", ".join(str(array.shape) for array in arrays)
    return (
        "prefix_attention takes queries [B, G * H, T, D], a prefix [1, H, P, D] and [1, H, P, E] and own keys and "
        f"values [B, H, S, D] and [B, H, S, E], none of them empty, not {shapes}"
    )


def _unsupported(arrays: tuple[mx.array, ...]) -> str | None:
    """Why the kernel cannot take the arguments; None: it can."""
    types = {array.dtype for array in arrays}
    widths = {array.shape[-1] for array in arrays}
    if len(types) > 1 or types.isdisjoint(FLOATS):
        return f"arrays of types {', '.join(sorted(map(str, types)))}"
    if any(width % 8 or not 0 < width <= WIDEST for width in widths):
        return f"heads of sizes {', '.join(map(str, sorted(widths)))}: multiples of 8 up to {WIDEST}"
    return None


def by_reference(
    queries: mx.array,
    prefix_keys: mx.array,
    prefix_values: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """`prefix_attention` in plain MLX."""
    batch, num_queries, length, width = queries.shape
    heads = keys.shape[1]
    groups = num_queries // heads
    grouped = (queries * scale).reshape(batch, heads, groups, length, width)
    as_one = grouped.transpose(1, 2, 0, 3, 4).reshape(1, heads, groups * batch * length, width)
    far, far_sum = _in_blocks(as_one, prefix_keys, prefix_values)
    far, far_sum = (
        part.reshape(heads, groups, batch, length, -1).transpose(2, 0, 1, 3, 4) for part in (far, far_sum)
    )  # [B, H, G, T, E], [B, H, G, T, 1]
    near, near_sum = _attend_grouped(grouped, keys, values, mask)
    near, near_sum = near.reshape(far.shape), near_sum.reshape(far_sum.shape)
    weight = mx.sigmoid(far_sum - near_sum)
    merged = far * weight + near * (1 - weight)
    if sinks is not None:
        merged = merged * mx.sigmoid(mx.logaddexp(far_sum, near_sum) - sinks.reshape(1, heads, groups, 1, 1))
    return merged.astype(queries.dtype).reshape(batch, num_queries, length, -1)


def row_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: mx.array | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend to own keys alone, in plain MLX, with grouped-query heads.

    For the CPU device, where MLX's own attention takes twice as long for rows of a token or a few
    (benchmarks/LOG.md); on Metal `mx.fast.scaled_dot_product_attention` is a kernel.

    Args:
        queries: [B, G * H, T, D], G of them for each head of keys.
        keys: [B, H, S, D]
        values: [B, H, S, E]
        scale: of the products of queries and keys.
        mask: which keys a query sees, at least one: boolean, broadcastable to [B, 1, T, S]; None: all.
        sinks: [G * H] scores that take part in each head's softmax and add nothing to its mean; None: there are none.

    Returns:
        [B, G * H, T, E] in the type of `queries`; the sums are taken in float32.
    """
    batch, num_queries, length, width = queries.shape
    heads = keys.shape[1]
    grouped = (queries * scale).reshape(batch, heads, num_queries // heads, length, width)
    mixed, total = _attend_grouped(grouped, keys, values, mask)
    mixed = mixed.reshape(batch, num_queries, length, -1)
    if sinks is not None:
        mixed = mixed * mx.sigmoid(total.reshape(batch, num_queries, length, 1) - sinks.reshape(1, -1, 1, 1))
    return mixed.astype(queries.dtype)


def _attend_grouped(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None
) -> tuple[mx.array, mx.array]:
    """Attention [B, H, G * T, E] of scaled queries [B, H, G, T, D], and its scores' logsumexp [B, H, G * T, 1]."""
    batch, heads, groups, length, width = queries.shape
    return _attend(
        queries.reshape(batch, heads, groups * length, width),
        keys,
        values,
        _grouped_mask(mask, groups, keys, length),
    )


def _in_blocks(queries: mx.array, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    """`_attend` without a mask, so many queries at a time that their scores stay small."""
    limit = CPU_SCORES_BYTES if mx.default_device() == mx.Device(mx.cpu) else SCORES_BYTES
    size = max(1, limit // (4 * keys.shape[1] * keys.shape[2]))
    starts = range(0, queries.shape[2], size)
    parts = [_attend(queries[:, :, start : start + size], keys, values, None) for start in starts]
    if len(parts) == 1:
        return parts[0]
    return mx.concatenate([part for part, _ in parts], axis=2), mx.concatenate(
        [part for _, part in parts], axis=2
    )


def _attend(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None
) -> tuple[mx.array, mx.array]:
    """Softmax attention [B, H, N, E] and the logsumexp of its scores [B, H, N, 1], both float32."""
    scores = (queries @ keys.swapaxes(-1, -2)).astype(mx.float32)  # [B, H, N, S]
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf)
    top = mx.max(scores, axis=-1, keepdims=True)
    terms = exp_below(scores, top)
    total = mx.sum(terms, axis=-1, keepdims=True)
    mixed = (terms.astype(values.dtype) @ values).astype(mx.float32)
    return mixed / total, top + mx.log(total)


def _grouped_mask(mask: mx.array | str | None, groups: int, keys: mx.array, length: int) -> mx.array | None:
    """[B or 1, 1, G * T, S] for queries whose groups stand behind one another."""
    if mask is None:
        return None
    if isinstance(mask, str):
        size = keys.shape[2]
        mask = mx.arange(size - length, size)[:, None] >= mx.arange(size)
    mask = mask[(None,) * (4 - mask.ndim)]
    return mx.tile(mx.broadcast_to(mask, (*mask.shape[:2], length, keys.shape[2])), (1, 1, groups, 1))
