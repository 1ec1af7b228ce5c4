from __future__ import annotations

import math
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_eval_kernels import prefix_attention

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


def reference(given_arrays: Given, scale: float, seen: npt.NDArray[np.bool_]) -> Array:
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
        terms = np.exp(scores - scores.max(axis=1, keepdims=True))
        result[row, head] = terms / terms.sum(axis=1, keepdims=True) @ all_values
    return result


def computed(given_arrays: Given, scale: float, mask: Any, dtype: mx.Dtype = mx.float32) -> Array:
    queries, *rest = (mx.array(array.astype(np.float32)).astype(dtype) for array in given_arrays)
    result = prefix_attention(queries, *rest, scale=scale, mask=mask)
    assert result.dtype == dtype
    return np.array(result.astype(mx.float32)).astype(np.float64)


def causal(sizes: Sizes) -> npt.NDArray[np.bool_]:
    """[B, T, S] The queries' own tokens are the last of the keys."""
    query = np.arange(sizes.own - sizes.length, sizes.own)[:, None]
    return np.broadcast_to(query >= np.arange(sizes.own), (sizes.batch, sizes.length, sizes.own))


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
    given_arrays = arrays(sizes, seed)
    seen = np.random.default_rng(seed).random((sizes.batch, sizes.length, sizes.own)) < 0.5
    seen[..., sizes.own - 1] = True  # at least one is promised
    result = computed(given_arrays, 0.4, mx.array(seen[:, None]))
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
        Sizes(out=3),
        Sizes(prefix=700, own=300, length=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["causal", "none"])
def test_masks_by_name(sizes: Sizes, kind: str) -> None:
    seen = causal(sizes) if kind == "causal" else np.ones((sizes.batch, sizes.length, sizes.own), np.bool_)
    result = computed(arrays(sizes), 0.3, "causal" if kind == "causal" else None)
    np.testing.assert_allclose(result, reference(arrays(sizes), 0.3, seen), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize(
    "shape",
    [(4, 6), (1, 4, 6), (1, 1, 4, 6), (3, 1, 4, 6), (1, 6), (6,), (3, 1, 1, 6), (1, 1, 4, 1)],
    ids=str,
)
def test_masks_of_fewer_axes_and_rows_are_broadcast(shape: tuple[int, ...]) -> None:
    sizes = Sizes()
    mask = np.random.default_rng(1).random(shape) < 0.5
    mask[..., -1] = True
    seen = np.broadcast_to(mask, (sizes.batch, 1, sizes.length, sizes.own))[:, 0]
    result = computed(arrays(sizes), 0.3, mx.array(mask))
    np.testing.assert_allclose(result, reference(arrays(sizes), 0.3, seen), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_types_differ_by_the_rounding_of_their_scores_and_values(dtype: mx.Dtype) -> None:
    sizes = Sizes(length=5, own=9, prefix=40, width=64, out=64)
    rounded = [
        np.array(mx.array(one.astype(np.float32)).astype(dtype).astype(mx.float32)) for one in arrays(sizes)
    ]
    given_arrays = Given(*(one.astype(np.float64) for one in rounded))
    expected = reference(given_arrays, 0.125, causal(sizes))
    # scores up to 4, softmax weights and the result are rounded to the type: a few units of its last place
    bound = 8 * float(mx.finfo(dtype).eps) * float(np.abs(expected).max())
    np.testing.assert_allclose(computed(given_arrays, 0.125, "causal", dtype), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_types_are_about_as_exact_as_one_attention_over_all_keys(dtype: mx.Dtype) -> None:
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
    ours = np.sqrt(np.mean((computed(given_arrays, 0.125, "causal", dtype) - expected) ** 2))
    usual = np.sqrt(np.mean((np.array(whole.astype(mx.float32)) - expected) ** 2))
    assert ours <= 2 * usual


@pytest.mark.parametrize("size", [1e2, 1e4, 1e8])
def test_very_large_scores_neither_overflow_nor_lose_the_largest(size: float) -> None:
    sizes = Sizes(length=6, prefix=7)
    given_arrays = arrays(sizes, seed=5, size=size)
    result = computed(given_arrays, 0.5, "causal")
    assert np.isfinite(result).all()
    expected = reference(given_arrays, 0.5, causal(sizes))
    # the largest score is known to 24 bits, and the softmax depends on differences of scores
    bound = ROUNDING + min(2.0, size * 2.0**-22 * 8)
    np.testing.assert_allclose(result, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("far", [-1e5, 1e5])
def test_one_part_far_above_the_other_takes_all_weight(far: float) -> None:
    sizes = Sizes(prefix=1, own=1, length=1)
    given_arrays = arrays(sizes)
    given_arrays.queries[...] = 1.0
    given_arrays.keys[...] = 0.0
    given_arrays.prefix_keys[...] = far
    result = computed(given_arrays, 1.0, None)
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
    whole = computed(arrays(sizes), 0.3, "causal")
    calls: list[int] = []
    module = sys.modules[prefix_attention.__module__]
    attend = module._attend  # type: ignore[attr-defined]

    def counting(queries: mx.array, *rest: Any) -> Any:
        calls.append(queries.shape[2])
        return attend(queries, *rest)

    for name in ("SCORES_BYTES", "CPU_SCORES_BYTES"):
        monkeypatch.setattr(module, name, 4 * num_scores)
    monkeypatch.setattr(module, "_attend", counting)
    np.testing.assert_allclose(computed(arrays(sizes), 0.3, "causal"), whole, rtol=0, atol=ROUNDING)
    *blocks, _ = calls  # the last is that of the own keys
    assert sum(blocks) == sizes.groups * sizes.batch * sizes.length
    assert max(blocks) <= max(1, num_scores // (sizes.heads * sizes.prefix))
    assert len(blocks) == math.ceil(sum(blocks) / max(blocks))


@pytest.mark.parametrize(
    ("queries", "prefix", "keys"),
    [
        ((3, 5, 4, 8), (1, 2, 5, 8), (3, 2, 6, 8)),  # five heads of queries for two of keys
        ((3, 4, 4, 8), (3, 2, 5, 8), (3, 2, 6, 8)),  # a prefix for each row
        ((3, 4, 4, 8), (1, 4, 5, 8), (3, 2, 6, 8)),  # a prefix of other heads
        ((2, 4, 4, 8), (1, 2, 5, 8), (3, 2, 6, 8)),  # queries of fewer rows
    ],
)
def test_shapes_that_do_not_fit_are_named(
    queries: tuple[int, ...], prefix: tuple[int, ...], keys: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"queries \[B, G \* H, T, D\], a prefix \[1, H, P, D\]"):
        prefix_attention(
            mx.zeros(queries), mx.zeros(prefix), mx.zeros(prefix), mx.zeros(keys), mx.zeros(keys), scale=1.0
        )


def test_an_unknown_mask_is_named() -> None:
    one = mx.zeros((1, 1, 1, 4))
    with pytest.raises(ValueError, match="'full'"):
        prefix_attention(one, one, one, one, one, scale=1.0, mask="full")
