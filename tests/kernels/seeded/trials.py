"""Small calls of the kernels' functions, compared with the suite's oracles within the suite's bounds."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from mlx_eval_kernels import attention_parts
from mlx_eval_kernels.launch import Run
from mlx_eval_kernels.logprob import LogProb

from tests.kernels import test_edges as of_edges
from tests.kernels import test_logprob as of_logprob
from tests.kernels import test_prefix_attention as of_attention
from tests.kernels.seeded.bugs import Trial
from tests.kernels.test_prefix_attention import Array, Sizes
from tests.kernels.ways import Way

PREFIX = {"TOGETHER": True}
OWN = {"TOGETHER": False}


def logprob_trial(rows: int, size: int, count: int, dtype: mx.Dtype = mx.float32) -> Trial:
    """Rows of every sort."""
    return logprob_trial_of(
        of_logprob.hurtful(rows, size, dtype), mx.array(of_logprob.targets_for(rows, size, count))
    )


def logprob_trial_of(logits: mx.array, targets: mx.array) -> Trial:
    """These logits, read as often as the suite allows."""
    rows, count = targets.shape

    def call(run: Run) -> None:
        of_logprob.check(Way("seeded", run).logprob(logits, targets), logits, targets)

    reads = {"logits": rows * (logits.shape[1] + count + 1) * logits.dtype.size, "targets": 4 * rows * count}
    return Trial(call, "mlx_eval_logprob", most_read=reads)


def large_logprob_trial() -> Trial:
    """Logits about 10,000, whose differences are all that counts."""

    def call(run: Run) -> None:
        of_edges.check_digits(Way("seeded", run), 1e4)

    return Trial(call, "mlx_eval_logprob")


def sparse_logprob_trial() -> Trial:
    """The last of so many rows that it begins behind 2^32 numbers."""
    size, rows = 65_536, 65_538
    last = mx.array(np.random.default_rng(0).standard_normal((1, size)).astype(np.float32)).astype(
        mx.bfloat16
    )

    def call(run: Run) -> None:
        empty = mx.broadcast_to(mx.zeros((), mx.bfloat16), (rows, size))
        result = Way("seeded", run).logprob(empty, mx.full((rows, 1), 77, mx.int32))
        of_logprob.check(LogProb(*(array[-1:] for array in result)), last, [[77]])

    return Trial(call, "mlx_eval_logprob", sparse={"logits": {rows - 1: last[0]}}, groups=[(rows - 1, 0, 0)])


def attention_trial(
    sizes: Sizes,
    mask: str | np.ndarray | None = None,
    *,
    part: dict[str, int | bool] | None = None,
    size: float = 1.0,
    key: float | None = None,
    growing: bool = False,
    dtype: mx.Dtype = mx.float32,
    sinks: tuple[float, ...] = (),
    nan_query: tuple[int, int, int] | None = None,
    most_read: dict[str, int] | None = None,
) -> Trial:
    """Attention of random queries.

    Args:
        sizes: of all arrays.
        mask: "causal", None, or what broadcasts to [B, 1, T, S].
        part: `PREFIX` or `OWN`, the part that a bug is put into; None: the merge.
        size: about the largest product of a query and a key.
        key: every number of every key, where all queries are 1; None: random ones.
        growing: whether scores grow with the number of a prefix's key, for all queries.
        dtype: of all arrays.
        sinks: of the heads.
        nan_query: (row, head, token) of a query that is NaN.
        most_read: bytes of inputs.
    """
    given = of_attention.as_rounded(of_attention.arrays(sizes, size=size), dtype)
    if key is not None:
        for array in (given.keys, given.prefix_keys):
            array[...] = key
        given.queries[...] = 1.0
    if growing:
        of_edges.make_growing(given)
    if nan_query is not None:
        given.queries[nan_query] = np.nan
    shape = (sizes.batch, sizes.length, sizes.own)
    seen = of_attention.causal(sizes)
    if not isinstance(mask, str):
        seen = np.broadcast_to(True if mask is None else mask, (sizes.batch, 1, *shape[1:]))[:, 0]
    expected = of_attention.reference(given, SCALE, seen, np.array(sinks) if sinks else None)

    def call(run: Run) -> None:
        queries, *rest = (mx.array(array.astype(np.float32)).astype(dtype) for array in given)
        result = Way("seeded", run).prefix_attention(
            queries,
            *rest,
            scale=SCALE,
            mask=mx.array(mask) if isinstance(mask, np.ndarray) else mask,
            sinks=mx.array(sinks).astype(dtype) if sinks else None,
        )
        found = np.array(result.astype(mx.float32)).astype(np.float64)
        # a half type is rounded once, at the end; large scores are known to 24 bits
        rounded = 0.0 if dtype == mx.float32 else float(mx.finfo(dtype).eps) / 2
        large = min(2.0, size * 2.0**-22 * 8) if size > 1 else 0.0
        np.testing.assert_allclose(found, expected, rtol=rounded, atol=of_attention.ROUNDING + large)

    kernel = "mlx_eval_attention_merge" if part is None else "mlx_eval_attention_part"
    return Trial(call, kernel, template=part or {}, most_read=most_read or {})


SCALE = 0.3


def sparse_attention_trial(size: int, width: int, out: int) -> Trial:
    """The last of so many rows that its own keys, or its values, begin behind 2^32 numbers."""
    rows = 2**32 // (size * max(width, out)) + 1
    last = of_attention.arrays(Sizes(1, 1, 1, 1, 1, size, width, out))
    rounded = {"keys": _float32(last.keys[0]), "values": _float32(last.values[0])}
    scores = SCALE * last.queries[0, 0] @ last.keys[0, 0].T
    terms = np.exp(scores - scores.max())
    expected = terms @ last.values[0, 0] / terms.sum()

    def call(run: Run) -> None:
        nothing = mx.zeros(())
        keys = attention_parts._Keys(
            mx.broadcast_to(nothing, (rows, 1, size, width)),
            mx.broadcast_to(nothing, (rows, 1, size, out)),
            mx.array(SCALE),
            together=False,
        )
        queries = mx.broadcast_to(_float32(last.queries)[:, :, None], (rows, 1, 1, 1, width))
        part = attention_parts._dispatch(queries, keys, 1, run)
        found = np.array(part.mixture[0, -1, 0, 0] / part.sums[0, -1, 0, 0][..., None])
        np.testing.assert_allclose(found, expected, rtol=0, atol=of_attention.ROUNDING)

    sparse = {name: {rows - 1: array} for name, array in rounded.items()}
    return Trial(call, "mlx_eval_attention_part", sparse=sparse, groups=[(0, 0, rows - 1)])


def share_trial() -> Trial:
    """What the first of four splits reads: as many keys as the others but for the last."""
    sizes = Sizes(1, 1, 1, 2, 1153, 3, 8, 8)
    arrays = of_attention.arrays(sizes)

    def call(run: Run) -> None:
        prefix = (_float32(arrays.prefix_keys), _float32(arrays.prefix_values), mx.array(SCALE))
        attention_parts._dispatch(
            _float32(arrays.queries)[:, :, None], attention_parts._Keys(*prefix, together=True), 4, run
        )

    share = 4 * 8 * 320  # a quarter of 1,153 in blocks of 32
    return Trial(
        call, "mlx_eval_attention_part", most_read={"keys": share, "values": share}, groups=[(0, 0, 0)]
    )


def _float32(array: Array) -> mx.array:
    return mx.array(array.astype(np.float32))


FAR = attention_trial(Sizes(5, 2, 3, 4, 70, 3, 8, 16), part=PREFIX, most_read={"keys": 2 * 2 * 4 * 70 * 8})
"""Two blocks of 32 queries of two heads, the second with 28 of them; three blocks of keys, the last with six."""
NEAR = attention_trial(Sizes(3, 2, 3, 4, 3, 37, 16, 8), part=OWN)
"""Twelve queries of each of six heads; keys wider than values."""
SPLIT = attention_trial(Sizes(2, 3, 1, 2, 1153, 3, 8, 8), part=PREFIX)
"""Four splits of the prefix, none of them a quarter of the keys."""
WIDE = attention_trial(Sizes(9, 1, 1, 4, 40, 3, 136, 136), part=PREFIX, size=0.25)
"""Two blocks of 32 queries, whose tiles have 16 rows."""
