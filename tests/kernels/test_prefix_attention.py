from __future__ import annotations

import math
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_eval_kernels import KernelError, attention_parts, prefix_attention, row_attention

from tests.kernels.ways import Recorder, Way
from tests.msl.emulate import Emulator

Array = npt.NDArray[np.float64]
ROUNDING = 2e-6
"""Of values of about 1: float32 has 24 bits, and softmax and the sums over some tens of keys use three of them."""


class Sizes(NamedTuple):
    batch: int = 3
    heads: int = 2
    groups: int = 2
    length: int = 4
    prefix: int = 5
    own: int = 6
    width: int = 8
    out: int = 8


class Given(NamedTuple):
    queries: Array
    prefix_keys: Array
    prefix_values: Array
    keys: Array
    values: Array


def arrays(sizes: Sizes, seed: int = 0, size: float = 1.0) -> Given:
    """Random queries, keys and values, the products of queries and keys about `size` wide."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32).astype(np.float64)

    batch, heads, groups, length, prefix, own, width, out = sizes
    return Given(
        size * normal(batch, heads * groups, length, width),
        normal(1, heads, prefix, width),
        normal(1, heads, prefix, out),
        normal(batch, heads, own, width),
        normal(batch, heads, own, out),
    )


def reference(
    given_arrays: Given, scale: float, seen: npt.NDArray[np.bool_], sinks: Array | None = None
) -> Array:
    """Softmax attention over the prefix and the own keys as one, head by head, in float64. seen: [B, T, S]."""
    queries, prefix_keys, prefix_values, keys, values = given_arrays
    groups = queries.shape[1] // keys.shape[1]
    result = np.empty((*queries.shape[:3], values.shape[-1]))
    for row, head in np.ndindex(queries.shape[:2]):
        source = head // groups
        all_keys = np.concatenate([prefix_keys[0, source], keys[row, source]])
        all_values = np.concatenate([prefix_values[0, source], values[row, source]])
        scores = scale * queries[row, head] @ all_keys.T
        prefix_seen = np.ones((queries.shape[2], prefix_keys.shape[2]), np.bool_)
        scores = np.where(np.concatenate([prefix_seen, seen[row]], axis=1), scores, -np.inf)
        if sinks is not None:
            scores = np.concatenate([scores, np.full((len(scores), 1), sinks[head])], axis=1)
            all_values = np.concatenate([all_values, np.zeros((1, all_values.shape[1]))])
        terms = np.exp(scores - scores.max(axis=1, keepdims=True))
        result[row, head] = terms / terms.sum(axis=1, keepdims=True) @ all_values
    return result


def computed(way: Way, given_arrays: Given, scale: float, mask: Any, dtype: mx.Dtype = mx.float32) -> Array:
    queries, *rest = (mx.array(array.astype(np.float32)).astype(dtype) for array in given_arrays)
    result = way.prefix_attention(queries, *rest, scale=scale, mask=mask)
    assert result.dtype == dtype
    return np.array(result.astype(mx.float32)).astype(np.float64)


def causal(sizes: Sizes) -> npt.NDArray[np.bool_]:
    """[B, T, S] The queries' own tokens are the last of the keys."""
    query = np.arange(sizes.own - sizes.length, sizes.own)[:, None]
    return np.broadcast_to(query >= np.arange(sizes.own), (sizes.batch, sizes.length, sizes.own))


REFERENCE = Way("reference", None)

SIZES = st.builds(
    Sizes,
    batch=st.integers(1, 4),
    heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    length=st.integers(1, 4),
    prefix=st.integers(1, 9),
    own=st.integers(4, 7),
    width=st.sampled_from([4, 8]),
    out=st.sampled_from([4, 6, 8]),
)


@settings(deadline=None, max_examples=40)
@given(SIZES, st.integers(0, 9))
def test_any_shape_with_ragged_masks_is_softmax_attention_in_float64(sizes: Sizes, seed: int) -> None:
    way = REFERENCE
    given_arrays = arrays(sizes, seed)
    seen = np.random.default_rng(seed).random((sizes.batch, sizes.length, sizes.own)) < 0.5
    seen[..., sizes.own - 1] = True  # at least one is promised
    result = computed(way, given_arrays, 0.4, mx.array(seen[:, None]))
    np.testing.assert_allclose(result, reference(given_arrays, 0.4, seen), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(),
        Sizes(prefix=1),
        Sizes(length=1),
        Sizes(length=1, own=1),
        Sizes(batch=1, prefix=1, length=1, own=1),
        Sizes(groups=1),
        Sizes(heads=1, groups=6),
        Sizes(out=24),
        Sizes(width=16),
        Sizes(batch=1, heads=1, groups=1, length=70, prefix=40, own=75),
        Sizes(batch=20, heads=1, groups=3, length=1, prefix=33, own=35),
        Sizes(prefix=700, own=300, length=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["causal", "none"])
def test_masks_by_name(way: Way, sizes: Sizes, kind: str) -> None:
    seen = causal(sizes) if kind == "causal" else np.ones((sizes.batch, sizes.length, sizes.own), np.bool_)
    result = computed(way, arrays(sizes), 0.3, "causal" if kind == "causal" else None)
    np.testing.assert_allclose(result, reference(arrays(sizes), 0.3, seen), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize(
    "shape",
    [(4, 6), (1, 4, 6), (1, 1, 4, 6), (3, 1, 4, 6), (1, 6), (6,), (3, 1, 1, 6), (1, 1, 4, 1)],
    ids=str,
)
def test_masks_of_fewer_axes_and_rows_are_broadcast(way: Way, shape: tuple[int, ...]) -> None:
    sizes = Sizes()
    mask = np.random.default_rng(1).random(shape) < 0.5
    mask[..., -1] = True
    seen = np.broadcast_to(mask, (sizes.batch, 1, sizes.length, sizes.own))[:, 0]
    result = computed(way, arrays(sizes), 0.3, mx.array(mask))
    np.testing.assert_allclose(result, reference(arrays(sizes), 0.3, seen), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_types_differ_by_the_rounding_of_their_scores_and_values(way: Way, dtype: mx.Dtype) -> None:
    sizes = Sizes(length=5, own=9, prefix=40, width=64, out=64)
    rounded = [
        np.array(mx.array(one.astype(np.float32)).astype(dtype).astype(mx.float32)) for one in arrays(sizes)
    ]
    given_arrays = Given(*(one.astype(np.float64) for one in rounded))
    expected = reference(given_arrays, 0.125, causal(sizes))
    # scores up to 4, softmax weights and the result are rounded to the type: a few units of its last place
    bound = 8 * float(mx.finfo(dtype).eps) * float(np.abs(expected).max())
    np.testing.assert_allclose(
        computed(way, given_arrays, 0.125, "causal", dtype), expected, rtol=0, atol=bound
    )


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_types_are_about_as_exact_as_one_attention_over_all_keys(way: Way, dtype: mx.Dtype) -> None:
    sizes = Sizes(length=8, own=16, prefix=200, width=64, out=64)
    rounded = [
        np.array(mx.array(one.astype(np.float32)).astype(dtype).astype(mx.float32)) for one in arrays(sizes)
    ]
    given_arrays = Given(*(one.astype(np.float64) for one in rounded))
    expected = reference(given_arrays, 0.125, causal(sizes))
    queries, *_ = cast = [mx.array(one).astype(dtype) for one in rounded]
    behind = [
        mx.concatenate([mx.broadcast_to(far, (sizes.batch, *far.shape[1:])), near], axis=2)
        for far, near in ((cast[1], cast[3]), (cast[2], cast[4]))
    ]
    whole = mx.fast.scaled_dot_product_attention(queries, *behind, scale=0.125, mask="causal")
    ours = np.sqrt(np.mean((computed(way, given_arrays, 0.125, "causal", dtype) - expected) ** 2))
    usual = np.sqrt(np.mean((np.array(whole.astype(mx.float32)) - expected) ** 2))
    assert ours <= 2 * usual


@pytest.mark.parametrize("size", [1e2, 1e4, 1e8])
def test_very_large_scores_neither_overflow_nor_lose_the_largest(way: Way, size: float) -> None:
    sizes = Sizes(length=6, prefix=7)
    given_arrays = arrays(sizes, seed=5, size=size)
    result = computed(way, given_arrays, 0.5, "causal")
    assert np.isfinite(result).all()
    expected = reference(given_arrays, 0.5, causal(sizes))
    if size < 1e5:
        # the largest score is known to 24 bits, and the softmax depends on differences of scores
        bound = ROUNDING + size * 2.0**-22 * 8
        np.testing.assert_allclose(result, expected, rtol=0, atol=bound)
    else:  # differences of scores are whole nats: the value of the largest, or of one as large in float32, is taken
        distance = np.abs(result - expected).max(axis=-1)
        assert np.mean(distance < ROUNDING) > 0.9


@pytest.mark.parametrize("far", [-1e5, 1e5])
def test_one_part_far_above_the_other_takes_all_weight(way: Way, far: float) -> None:
    sizes = Sizes(prefix=1, own=1, length=1)
    given_arrays = arrays(sizes)
    given_arrays.queries[...] = 1.0
    given_arrays.keys[...] = 0.0
    given_arrays.prefix_keys[...] = far
    result = computed(way, given_arrays, 1.0, None)
    source = given_arrays.prefix_values if far > 0 else given_arrays.values
    expected = np.broadcast_to(np.repeat(source, sizes.groups, axis=1), result.shape)
    np.testing.assert_allclose(result, expected, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("num_scores", [1, 7, 30, 10**6])
def test_blocks_of_queries_give_what_one_block_gives(
    num_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scores against the prefix are computed so many at a time."""
    import sys

    sizes = Sizes()
    whole = computed(REFERENCE, arrays(sizes), 0.3, "causal")
    calls: list[int] = []
    module = sys.modules[prefix_attention.__module__]
    attend = module._attend  # type: ignore[attr-defined]

    def counting(queries: mx.array, *rest: Any) -> Any:
        calls.append(queries.shape[2])
        return attend(queries, *rest)

    for name in ("SCORES_BYTES", "CPU_SCORES_BYTES"):
        monkeypatch.setattr(module, name, 4 * num_scores)
    monkeypatch.setattr(module, "_attend", counting)
    np.testing.assert_allclose(
        computed(REFERENCE, arrays(sizes), 0.3, "causal"), whole, rtol=0, atol=ROUNDING
    )
    *blocks, _ = calls  # the last is that of the own keys
    assert sum(blocks) == sizes.groups * sizes.batch * sizes.length
    assert max(blocks) <= max(1, num_scores // (sizes.heads * sizes.prefix))
    assert len(blocks) == math.ceil(sum(blocks) / max(blocks))


FITTING = {
    "queries": (3, 4, 4, 8),
    "prefix_keys": (1, 2, 5, 8),
    "prefix_values": (1, 2, 5, 16),
    "keys": (3, 2, 6, 8),
    "values": (3, 2, 6, 16),
}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("queries", (3, 5, 4, 8)),  # five heads of queries for two of keys
        ("queries", (2, 4, 4, 8)),
        ("queries", (3, 4, 4, 16)),
        ("queries", (3, 4, 0, 8)),
        ("queries", (4, 4, 8)),
        ("prefix_keys", (3, 2, 5, 8)),  # a prefix for each row
        ("prefix_keys", (1, 4, 5, 8)),
        ("prefix_keys", (1, 2, 5, 16)),
        ("prefix_keys", (1, 2, 0, 8)),
        ("prefix_values", (1, 2, 3, 16)),
        ("prefix_values", (1, 1, 5, 16)),
        ("prefix_values", (1, 2, 5, 8)),
        ("keys", (3, 2, 6, 16)),
        ("keys", (3, 0, 6, 8)),
        ("values", (1, 2, 6, 16)),
        ("values", (3, 2, 4, 16)),
        ("values", (3, 2, 6, 8)),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_are_named(name: str, shape: tuple[int, ...]) -> None:
    queries, *rest = map(mx.zeros, FITTING.values())
    prefix_attention(queries, *rest, scale=1.0)
    queries, *rest = map(mx.zeros, {**FITTING, name: shape}.values())
    with pytest.raises(KernelError, match=r"queries \[B, G \* H, T, D\], a prefix \[1, H, P, D\] and"):
        prefix_attention(queries, *rest, scale=1.0)


@pytest.mark.parametrize("shape", [(), (3,), (4, 1)])
def test_sinks_that_do_not_fit_are_named(shape: tuple[int, ...]) -> None:
    queries, *rest = map(mx.zeros, FITTING.values())
    with pytest.raises(KernelError, match="each of 4 heads"):
        prefix_attention(queries, *rest, scale=1.0, sinks=mx.zeros(shape))


@pytest.mark.parametrize(
    "mask",
    [
        mx.zeros((4, 6)),
        mx.zeros((3, 4, 4, 6), mx.bool_),
        mx.zeros((4, 5), mx.bool_),
        mx.zeros((2, 1, 4, 6), mx.bool_),
        mx.zeros((3, 1, 4, 6, 1), mx.bool_),
    ],
    ids=["additive", "by head", "of other keys", "of other rows", "of five axes"],
)
def test_masks_that_do_not_fit_are_named(mask: mx.array) -> None:
    queries, *rest = (mx.array(array.astype(np.float32)) for array in arrays(Sizes()))
    with pytest.raises(KernelError, match=r"boolean and broadcast to \(3, 1, 4, 6\)"):
        prefix_attention(queries, *rest, scale=1.0, mask=mask)


def test_too_few_keys_are_named() -> None:
    one = mx.zeros((1, 1, 1, 8))
    with pytest.raises(KernelError, match="own keys for all 2 tokens, not 1"):
        prefix_attention(mx.zeros((1, 1, 2, 8)), one, one, one, one, scale=1.0, mask="causal")


def test_an_unknown_mask_is_named() -> None:
    one = mx.zeros((1, 1, 1, 4))
    with pytest.raises(ValueError, match="'full'"):
        prefix_attention(one, one, one, one, one, scale=1.0, mask="full")


def test_odd_widths_are_computed_by_the_reference_and_refused_by_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    sizes = Sizes(width=4, out=3)
    queries, *rest = (mx.array(array.astype(np.float32)) for array in arrays(sizes))
    with pytest.raises(KernelError, match=r"heads of sizes 3, 4: multiples of 8"):
        prefix_attention(queries, *rest, scale=0.3, backend="metal")
    result = prefix_attention(queries, *rest, scale=0.3)
    seen = np.ones((sizes.batch, sizes.length, sizes.own), np.bool_)
    np.testing.assert_allclose(np.array(result), reference(arrays(sizes), 0.3, seen), rtol=0, atol=ROUNDING)


def test_mixed_types_are_refused_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    one = mx.zeros((1, 1, 1, 8))
    with pytest.raises(KernelError, match=r"mlx\.core\.float16, mlx\.core\.float32"):
        prefix_attention(one.astype(mx.float16), one, one, one, one, scale=1.0, backend="metal")


HEAD_SIZES = [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (192, 128)]


@pytest.mark.parametrize("widths", HEAD_SIZES, ids=str)
def test_head_sizes_of_real_models_with_grouped_heads_and_ragged_rows(
    way: Way, widths: tuple[int, int]
) -> None:
    """Within 1e-5 of attention in float64 over all keys: what float32 has left after sums over 256 products."""
    sizes = Sizes(2, 2, 3, 6, 75, 13, *widths)
    given_arrays = arrays(sizes)
    seen = causal(sizes) & (np.arange(13) < np.array([13, 9])[:, None, None])
    seen[..., 0] = True  # padding, too, sees a key
    expected = reference(given_arrays, widths[0] ** -0.5, seen)
    result = computed(way, given_arrays, widths[0] ** -0.5, mx.array(seen[:, None]))
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["causal", "none", "array"])
def test_every_type_and_mask(way: Way, kind: str, dtype: mx.Dtype) -> None:
    sizes = Sizes(2, 2, 2, 5, 40, 9, 64, 64)
    given_arrays = as_rounded(arrays(sizes), dtype)
    seen = causal(sizes) if kind == "causal" else np.ones((2, 5, 9), np.bool_)
    if kind == "array":
        seen = np.random.default_rng(3).random(seen.shape) < 0.5
        seen[..., 0] = True
    mask = {"causal": "causal", "none": None, "array": mx.array(seen[:, None])}[kind]
    expected = reference(given_arrays, 0.125, seen)
    # the result is rounded to the type; the reference rounds scores and weights to it, too
    bound = (1 if way.run else 8) * float(mx.finfo(dtype).eps) * float(np.abs(expected).max()) + ROUNDING
    np.testing.assert_allclose(computed(way, given_arrays, 0.125, mask, dtype), expected, rtol=0, atol=bound)


def as_rounded(given_arrays: Given, dtype: mx.Dtype) -> Given:
    return Given(
        *(
            np.array(mx.array(one.astype(np.float32)).astype(dtype).astype(mx.float32)).astype(np.float64)
            for one in given_arrays
        )
    )


def test_a_long_prefix_is_split_and_merged(emulated: None) -> None:
    sizes = Sizes(2, 1, 1, 2, 1100, 3, 16, 8)
    way = Way("emulated", recorder := Recorder(Emulator()))
    result = computed(way, arrays(sizes), 0.25, "causal")
    assert recorder.dispatches[0].output_shapes[1][0] == 1100 // attention_parts.SPLIT_KEYS
    expected = reference(arrays(sizes), 0.25, causal(sizes))
    np.testing.assert_allclose(result, expected, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("work", [1, 2 * 2 * 5 * 16 * 3, 2 * 2 * 5 * 16 * 4 * 2, 2**40])
def test_work_is_cut_into_dispatches(emulated: None, work: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to one token of one row over the prefix; a row with its own keys is the least that is sent."""
    monkeypatch.setattr(attention_parts, "DISPATCH_WORK", work)
    sizes = Sizes()
    way = Way("emulated", recorder := Recorder(Emulator()))
    seen = np.random.default_rng(1).random((sizes.batch, sizes.length, sizes.own)) < 0.5
    seen[..., -1] = True
    result = computed(way, arrays(sizes), 0.3, mx.array(seen[:, None]))
    np.testing.assert_allclose(result, reference(arrays(sizes), 0.3, seen), rtol=0, atol=ROUNDING)
    prefix = [one for one in recorder.dispatches if dict(one.template).get("TOGETHER")]
    token = sizes.heads * sizes.groups * sizes.prefix * (sizes.width + sizes.out)
    for one in prefix:
        rows, tokens = one.inputs[0].shape[0], one.inputs[0].shape[3]
        assert rows * tokens * token <= max(work, token)
    assert (
        sum(one.inputs[0].shape[0] * one.inputs[0].shape[3] for one in prefix) == sizes.batch * sizes.length
    )


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_sinks_take_part_in_the_softmax(way: Way, dtype: mx.Dtype) -> None:
    sizes = Sizes()
    given_arrays = as_rounded(arrays(sizes), dtype)
    sinks = np.array([-3.0, 0.5, 2.0, 40.0])
    queries, *rest = (mx.array(array.astype(np.float32)).astype(dtype) for array in given_arrays)
    result = way.prefix_attention(
        queries, *rest, scale=0.3, mask="causal", sinks=mx.array(sinks.astype(np.float32)).astype(dtype)
    )
    expected = reference(given_arrays, 0.3, causal(sizes), sinks)
    bound = ROUNDING + 8 * float(mx.finfo(dtype).eps) * (dtype != mx.float32)  # its scores are rounded
    np.testing.assert_allclose(np.array(result.astype(mx.float32)), expected, rtol=0, atol=bound)


def test_nan_stays_in_its_query(way: Way) -> None:
    sizes = Sizes(length=9, own=9, prefix=40)
    given_arrays = arrays(sizes)
    clean = computed(way, given_arrays, 0.3, "causal")
    given_arrays.queries[1, 2, 4] = np.nan
    damaged = computed(way, given_arrays, 0.3, "causal")
    assert np.isnan(damaged[1, 2, 4]).all()
    damaged[1, 2, 4] = clean[1, 2, 4]
    np.testing.assert_array_equal(damaged, clean)


def test_the_prefix_is_read_once_for_32_queries(emulated: None) -> None:
    sizes = Sizes(6, 2, 3, 4, 300, 8, 64, 64)
    way = Way("emulated", emulator := Emulator())
    computed(way, arrays(sizes), 0.125, "causal", mx.float16)
    prefix, own, merge = emulator.reports
    blocks = -(-sizes.batch * sizes.groups * sizes.length // 32)
    of_prefix = 2 * sizes.heads * sizes.prefix * sizes.width
    assert prefix.read["keys"] == prefix.read["values"] == blocks * of_prefix
    assert prefix.read["queries"] == 2 * sizes.batch * sizes.heads * sizes.groups * sizes.length * sizes.width
    of_own = 2 * sizes.batch * sizes.heads * sizes.own * sizes.width
    assert own.read["keys"] == own.read["values"] == of_own
    out = sizes.batch * sizes.heads * sizes.groups * sizes.length * sizes.out
    assert sum(prefix.written.values()) == sum(own.written.values()) == 4 * out * (1 + 2 / sizes.out)
    assert merge.written["mixed"] == 2 * out


def test_keys_above_the_diagonal_are_not_read(emulated: None) -> None:
    sizes = Sizes(1, 1, 1, 96, 1, 96, 8, 8)
    way = Way("emulated", emulator := Emulator())
    computed(way, arrays(sizes), 0.3, "causal")
    own = emulator.reports[1]
    assert own.read["keys"] == 4 * 8 * (32 + 64 + 96)  # three blocks of queries


def test_offsets_beyond_32_bits(emulated: None) -> None:
    """Own keys of 2^32 numbers and more, of which the last row is there."""
    rows, size, width = 4097, 8192, 128
    near = arrays(Sizes(1, 1, 1, 1, 4, size, width, width))
    queries = np.zeros((rows, 1, 1, width))
    queries[-1] = near.queries[0]
    last = {"keys": near.keys[0], "values": near.values[0]}
    emulator = Emulator(
        sparse={name: {rows - 1: mx.array(array.astype(np.float32))} for name, array in last.items()},
        groups=[(0, 0, rows - 1)],
    )
    empty = mx.broadcast_to(mx.zeros(()), (rows, 1, size, width))
    part = attention_parts._dispatch(
        mx.array(queries.astype(np.float32))[:, :, None],
        attention_parts._Keys(empty, empty, mx.array(0.1), together=False),
        1,
        emulator,
    )
    scores = 0.1 * near.queries[0, 0] @ near.keys[0, 0].T
    terms = np.exp(scores - scores.max())
    found = np.array(part.mixture[0, -1, 0, 0] / part.sums[0, -1, 0, 0][..., None])
    np.testing.assert_allclose(found, terms @ near.values[0, 0] / terms.sum(), rtol=0, atol=ROUNDING)


# ---------------------------------------------------------------- rows without a prefix


def own_only(sizes: Sizes, seed: int = 0, size: float = 1.0) -> Given:
    """Queries and own keys, behind a prefix of no tokens."""
    made = arrays(sizes, seed, size)
    return made._replace(prefix_keys=made.prefix_keys[:, :, :0], prefix_values=made.prefix_values[:, :, :0])


def rows_computed(
    given_arrays: Given, mask: Any = None, sinks: Array | None = None, dtype: mx.Dtype = mx.float32
) -> Array:
    queries, keys, values = (
        mx.array(array.astype(np.float32)).astype(dtype)
        for array in (given_arrays.queries, given_arrays.keys, given_arrays.values)
    )
    own_sinks = None if sinks is None else mx.array(sinks.astype(np.float32)).astype(dtype)
    own_mask = None if mask is None else mx.array(mask)
    result = row_attention(queries, keys, values, scale=0.3, mask=own_mask, sinks=own_sinks)
    assert result.dtype == dtype
    return np.array(result.astype(mx.float32)).astype(np.float64)


@settings(max_examples=40, deadline=None)
@given(
    st.builds(
        Sizes,
        batch=st.integers(1, 4),
        heads=st.integers(1, 3),
        groups=st.integers(1, 3),
        length=st.integers(1, 4),
        prefix=st.just(1),
        own=st.integers(1, 9),
        width=st.integers(1, 9),
        out=st.integers(1, 9),
    ),
    st.integers(0, 99),
    st.booleans(),
)
def test_rows_of_any_shape_with_ragged_masks_are_softmax_attention_in_float64(
    sizes: Sizes, seed: int, has_sinks: bool
) -> None:
    given_arrays = own_only(sizes, seed)
    rng = np.random.default_rng(seed)
    seen = rng.random((sizes.batch, sizes.length, sizes.own)) < 0.6
    seen[..., rng.integers(sizes.own)] = True  # at least one
    sinks = rng.standard_normal(sizes.heads * sizes.groups) if has_sinks else None
    rounded = None if sinks is None else sinks.astype(np.float32).astype(np.float64)
    expected = reference(given_arrays, 0.3, seen, rounded)
    result = rows_computed(given_arrays, seen[:, None], rounded)
    np.testing.assert_allclose(result, expected, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("shape", [(6,), (4, 6), (1, 1, 4, 6), (3, 1, 1, 6), (1, 1, 1, 6), (3, 1, 4, 6)])
def test_masks_of_rows_are_broadcast(shape: tuple[int, ...]) -> None:
    sizes = Sizes()
    given_arrays = own_only(sizes)
    mask = np.random.default_rng(3).random(shape) < 0.6
    mask[..., 0] = True
    whole = (sizes.batch, 1, sizes.length, sizes.own)
    expected = reference(given_arrays, 0.3, np.broadcast_to(mask, whole)[:, 0])
    np.testing.assert_allclose(rows_computed(given_arrays, mask), expected, rtol=0, atol=ROUNDING)


def test_rows_without_a_mask_see_everything() -> None:
    sizes = Sizes(length=1)
    given_arrays = own_only(sizes)
    everything = np.ones((sizes.batch, sizes.length, sizes.own), np.bool_)
    expected = reference(given_arrays, 0.3, everything)
    np.testing.assert_allclose(rows_computed(given_arrays), expected, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_rows_in_half_types_differ_by_the_rounding_of_their_scores_and_values(dtype: mx.Dtype) -> None:
    sizes = Sizes(own=40)
    given_arrays = as_rounded(own_only(sizes), dtype)
    sinks = np.array([-3.0, 0.5, 2.0, 40.0])
    expected = reference(given_arrays, 0.3, causal(sizes), sinks)
    result = rows_computed(given_arrays, causal(sizes)[:, None], sinks, dtype)
    # scaled queries, scores of a few nats and the result are each rounded
    np.testing.assert_allclose(result, expected, rtol=0, atol=8 * float(mx.finfo(dtype).eps))


@pytest.mark.parametrize("size", [100.0, 1e4])
def test_very_large_scores_of_rows_do_not_overflow(size: float) -> None:
    sizes = Sizes()
    given_arrays = own_only(sizes, size=size)
    expected = reference(given_arrays, 0.3, causal(sizes))
    result = rows_computed(given_arrays, causal(sizes)[:, None])
    # a score of 1e4 is rounded by 1e-3
    np.testing.assert_allclose(result, expected, rtol=0, atol=ROUNDING * size)


def test_nan_of_a_row_stays_in_it() -> None:
    sizes = Sizes()
    given_arrays = own_only(sizes)
    clean = rows_computed(given_arrays, causal(sizes)[:, None])
    given_arrays.keys[1] = np.nan
    given_arrays.values[1] = np.nan
    damaged = rows_computed(given_arrays, causal(sizes)[:, None])
    assert np.isnan(damaged[1]).all()
    np.testing.assert_array_equal(damaged[[0, 2]], clean[[0, 2]])


def test_rows_are_what_a_prefix_and_the_rest_of_their_keys_give() -> None:
    """One split of the keys or none: the same attention."""
    sizes = Sizes(batch=1)
    given_arrays = arrays(sizes)
    queries, *rest = (mx.array(array.astype(np.float32)) for array in given_arrays)
    split = prefix_attention(queries, *rest, scale=0.3, mask=mx.array(causal(sizes)[:, None]))
    keys, values = mx.concatenate([rest[0], rest[2]], axis=2), mx.concatenate([rest[1], rest[3]], axis=2)
    mask = np.concatenate([np.ones((1, sizes.length, sizes.prefix), np.bool_), causal(sizes)], axis=2)
    whole = row_attention(queries, keys, values, scale=0.3, mask=mx.array(mask[:, None]))
    np.testing.assert_allclose(np.array(split), np.array(whole), rtol=0, atol=ROUNDING)
