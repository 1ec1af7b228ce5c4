"""`prefix_attention` by Metal kernels.

`attention_part` runs twice, over the prefix with the queries of all rows together and over each row's own keys;
`attention_merge` divides and merges. The system ends what a GPU runs for seconds, so a dispatch over the prefix stays
below `DISPATCH_WORK`; own keys are cut between rows only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import mlx.core as mx

from mlx_eval_kernels.launch import DISPATCH_WORK, GROUPS, Dispatch, Run, Source, on_metal, read

WIDEST: Final = 256
"""Head size that the kernel's tiles have room for."""
SPLIT_KEYS: Final = 256
"""Keys below which a split is not worth the merge."""
MOST_QUERIES: Final = 32
"""Of a group of threads, 8 to each SIMD group."""
MERGE_THREADS: Final = 256
PART: Final = Source(
    name="mlx_eval_attention_part",
    inputs=("queries", "keys", "values", "mask", "scale"),
    outputs=("mixture", "tops", "sums"),
    body=read("attention_part.metal"),
    header=read("attention_tiles.metal"),
)
MERGE: Final = Source(
    name="mlx_eval_attention_merge",
    inputs=("far_mixture", "far_tops", "far_sums", "near_mixture", "near_tops", "near_sums", "sinks"),
    outputs=("mixed",),
    body=read("attention_merge.metal"),
)


class _Part(NamedTuple):
    """Attention to a stretch of keys, split X ways; all float32."""

    mixture: mx.array
    """[X, B, H, G, T, E] values, weighted by exp(score - top)."""
    tops: mx.array
    """[X, B, H, G, T] largest score."""
    sums: mx.array
    """[X, B, H, G, T] of the weights."""


@dataclass(frozen=True, slots=True)
class _Keys:
    """What queries [B, H, G, T, D] attend to."""

    keys: mx.array
    """[1, H, S, D] where `together`, else [B, H, S, D]."""
    values: mx.array
    """The same with E."""
    scale: mx.array
    """[] float32"""
    together: bool
    """Whether all rows read the same keys."""
    mask: mx.array | str | None = None
    """[B or 1, T, S] boolean, "causal" or None."""

    @property
    def token_work(self) -> int:
        """Multiplications of one query with one head."""
        return self.keys.shape[2] * (self.keys.shape[3] + self.values.shape[3])

    def of(self, rows: slice) -> _Keys:
        """Those of some of the rows."""
        if self.together:
            return self
        mask = self.mask
        if isinstance(mask, mx.array) and mask.shape[0] > 1:
            mask = mask[rows]
        return replace(self, keys=self.keys[rows], values=self.values[rows], mask=mask)


def attention_by_parts(
    queries: mx.array,
    prefix_keys: mx.array,
    prefix_values: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    run: Run = on_metal,
) -> mx.array:
    """`prefix_attention`; arguments as there."""
    batch, num_queries, length, width = queries.shape
    heads = keys.shape[1]
    if isinstance(mask, mx.array):
        mask = mask[(None,) * (4 - mask.ndim)][:, 0]  # [B or 1, T or 1, S or 1]
        mask = mx.broadcast_to(mask, (mask.shape[0], length, keys.shape[2]))
    grouped = queries.reshape(batch, heads, num_queries // heads, length, width)
    factor = mx.array(scale, dtype=mx.float32)
    far = _attend(grouped, _Keys(prefix_keys, prefix_values, factor, together=True), run)
    near = _attend(grouped, _Keys(keys, values, factor, together=False, mask=mask), run)
    merged = run(
        Dispatch(
            MERGE,
            inputs=(*far, *near, mx.zeros(1) if sinks is None else sinks),
            template=(("T", queries.dtype), ("E", values.shape[-1]), ("SINKS", sinks is not None)),
            grid=(near.mixture.size, 1, 1),
            threadgroup=(MERGE_THREADS, 1, 1),
            output_shapes=((batch, num_queries, length, values.shape[-1]),),
            output_dtypes=(queries.dtype,),
        )
    )
    return merged[0]


def _attend(queries: mx.array, keys: _Keys, run: Run) -> _Part:
    """One part, in as many dispatches as `DISPATCH_WORK` asks for: of some rows, or some tokens of a row."""
    batch, heads, groups, length, _ = queries.shape
    tokens = max(1, DISPATCH_WORK // (heads * groups * keys.token_work))
    splits = 1
    size = length
    if keys.together:
        blocks = heads * -(-min(tokens, batch * length) * groups // MOST_QUERIES)
        splits = _num_splits(blocks, keys.keys.shape[2])
        size = min(tokens, length)
    rows = []
    for row in _slices(batch, max(1, tokens // length)):
        pieces = [
            _dispatch(queries[row, ..., piece, :], keys.of(row), splits, run)
            for piece in _slices(length, size)
        ]
        rows.append(_joined(pieces, axis=4))
    return _joined(rows, axis=1)


def _dispatch(queries: mx.array, keys: _Keys, splits: int, run: Run) -> _Part:
    """One run of `PART`, its keys split so many ways."""
    batch, heads, groups, length, width = queries.shape
    num_queries = groups * length * (batch if keys.together else 1)
    simds = 4 if num_queries > 16 else 2 if num_queries > 8 else 1
    threads = 32 * simds
    out = keys.values.shape[-1]
    has_mask = isinstance(keys.mask, mx.array)
    shape = (splits, *queries.shape[:-1])
    mixture, tops, sums = run(
        Dispatch(
            PART,
            inputs=(
                queries,
                keys.keys,
                keys.values,
                keys.mask if isinstance(keys.mask, mx.array) else mx.zeros((1, 1, 1), mx.bool_),
                keys.scale,
            ),
            template=(
                ("T", queries.dtype),
                ("SIMDS", simds),
                ("BLOCK", 32 if max(width, out) <= WIDEST // 2 else 16),
                ("D", width),
                ("E", out),
                ("TOGETHER", keys.together),
                ("MASK", 2 if has_mask else 1 if keys.mask == "causal" else 0),
            ),
            grid=(
                threads * splits,
                -(-num_queries // (8 * simds)),
                heads if keys.together else batch * heads,
            ),
            threadgroup=(threads, 1, 1),
            output_shapes=((*shape, out), shape, shape),
            output_dtypes=(mx.float32, mx.float32, mx.float32),
        )
    )
    return _Part(mixture, tops, sums)


def _num_splits(groups: int, num_keys: int) -> int:
    """Into how many stretches keys are cut, where there are only so many groups of threads without it."""
    return max(1, min(GROUPS // groups, num_keys // SPLIT_KEYS))


def _slices(size: int, step: int) -> Iterator[slice]:
    step = min(size, step)  # MLX takes no index beyond 32 bits
    return (slice(start, start + step) for start in range(0, size, step))


def _joined(parts: list[_Part], axis: int) -> _Part:
    if len(parts) == 1:
        return parts[0]
    return _Part(*(mx.concatenate(list(arrays), axis=axis) for arrays in zip(*parts, strict=True)))
