from __future__ import annotations

import importlib
import threading
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_eval.engine.attention import NAME, prefix_attention_in
from mlx_eval.engine.branch import BranchCache, Layout
from tests.tiny import tiny_model

VOCAB = 64
ROUNDING = 2e-6
"""Of values of about 1: float32 has 24 bits, softmax and sums over a dozen keys use three of them."""
PREFIX, BATCH, HEADS, GROUPS, LENGTH, WIDTH = 6, 3, 2, 2, 4, 8


def module_of(kind: str) -> Any:
    return importlib.import_module(f"mlx_lm.models.{kind}")


def originals() -> list[Any]:
    return [getattr(module_of(kind), NAME) for kind in ("base", "llama", "qwen2")]


def test_the_name_stands_for_another_function_only_in_the_models_module_and_only_in_the_block() -> None:
    before = originals()
    with prefix_attention_in(tiny_model("llama", VOCAB)):
        base, llama, qwen2 = originals()
        assert (base, qwen2) == (before[0], before[2])
        assert llama is not before[1]
    assert originals() == before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_the_name_is_given_back_whatever_is_raised(error: type[BaseException]) -> None:
    before = originals()
    with pytest.raises(error), prefix_attention_in(tiny_model("llama", VOCAB)):
        raise error
    assert originals() == before


def test_blocks_within_blocks_give_the_name_back_once() -> None:
    before = originals()
    model = tiny_model("llama", VOCAB)
    with prefix_attention_in(model):
        inside = originals()
        with prefix_attention_in(model), prefix_attention_in(tiny_model("qwen2", VOCAB)):
            assert originals()[1] == inside[1]
            assert originals()[2] != before[2]
        assert originals() == inside
    assert originals() == before


def test_a_class_of_the_users_finds_the_module_of_its_base_class() -> None:
    attention = tiny_model("llama", VOCAB).layers[0].self_attn
    cls = type(attention)

    class Mine(cls):  # type: ignore[misc,valid-type]
        pass

    attention.__class__ = Mine
    before = originals()
    with prefix_attention_in(attention):  # nothing else in it is of that module
        assert originals()[1] is not before[1]


def test_a_model_that_computes_its_attention_itself_is_left_alone() -> None:
    """gemma2 caps its scores."""
    module = module_of("gemma2")
    assert not hasattr(module, NAME)
    before = dict(vars(module)), originals()
    with prefix_attention_in(tiny_model("gemma2", VOCAB, query_pre_attn_scalar=8)):
        assert (dict(vars(module)), originals()) == before


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_calls_without_a_split_prefix_reach_the_original(kind: str) -> None:
    model = tiny_model(kind, VOCAB)
    tokens = mx.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    expected = np.array(model(tokens))
    with prefix_attention_in(model):
        assert np.array_equal(np.array(model(tokens)), expected)  # without any cache
        assert np.array_equal(np.array(model(tokens, cache=caches(model))), expected)


def caches(model: Any) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache

    return make_prompt_cache(model)


def test_quantised_keys_reach_the_original() -> None:
    from mlx_lm.models.cache import QuantizedKVCache

    model = tiny_model("llama", VOCAB, head_dim=64)
    tokens = mx.array([[3, 1, 4, 1, 5]])
    expected = np.array(model(tokens, cache=[QuantizedKVCache() for _ in model.layers]))
    with prefix_attention_in(model):
        result = np.array(model(tokens, cache=[QuantizedKVCache() for _ in model.layers]))
    assert np.array_equal(result, expected)


# ---------------------------------------------------------------- what the function computes


def random_array(seed: int, *shape: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def split_cache(positions: np.ndarray, window: int | None) -> BranchCache:
    """Rows behind a prefix that is stored once, with own slots already."""
    starts = (PREFIX + (positions >= 0).sum(axis=1)).astype(np.int32)
    layout = Layout(PREFIX, positions.astype(np.int32), starts, np.full(BATCH, LENGTH, np.int32))
    prefix = (random_array(0, 1, HEADS, PREFIX, WIDTH), random_array(1, 1, HEADS, PREFIX, WIDTH))
    slots = positions.shape[1]
    own = (random_array(2, BATCH, HEADS, slots, WIDTH), random_array(3, BATCH, HEADS, slots, WIDTH))
    return BranchCache(
        layout, prefix=prefix, own=own if slots else None, window=window, splits_attention=True
    )


def float64_attention(
    cache: BranchCache, queries: mx.array, positions: np.ndarray, window: int | None, sinks: mx.array | None
) -> np.ndarray:
    """[B, G * H, T, D] token by token; a sink is one more score, whose value is zero."""
    assert cache.prefix is not None
    keys, values = (np.array(array).astype(np.float64) for array in cache.state)
    far_keys, far_values = (np.array(array).astype(np.float64)[0] for array in cache.prefix)
    result = np.zeros(queries.shape)
    for row, head, token in np.ndindex(*queries.shape[:3]):
        source = head // GROUPS
        filled = [
            *np.flatnonzero(positions[row] >= 0),
            *range(positions.shape[1], positions.shape[1] + token + 1),
        ]
        seen_keys = np.concatenate([far_keys[source], keys[row, source, filled]])
        seen_values = np.concatenate([far_values[source], values[row, source, filled]])
        if window is not None:
            seen_keys, seen_values = seen_keys[-window:], seen_values[-window:]
        scores = 0.4 * seen_keys @ np.array(queries[row, head, token]).astype(np.float64)
        extra = [] if sinks is None else [float(sinks[head].item())]
        top = max([*scores, *extra])
        terms = np.exp(scores - top)
        total = terms.sum() + sum(np.exp(one - top) for one in extra)
        result[row, head, token] = terms @ seen_values / total
    return result


SLOTS = {
    "no own slots": np.zeros((BATCH, 0), int),
    "full slots": np.array([[6, 7], [6, 7], [6, 7]]),
    "gaps": np.array([[6, 7, 8], [6, -1, 7], [-1, -1, -1]]),
}


@pytest.mark.parametrize("name", SLOTS)
@pytest.mark.parametrize("window", [None, 3, 8, 100])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("return_array", [False, True])
def test_a_split_prefix_is_read_under_windows_and_beside_sinks(
    name: str, window: int | None, has_sinks: bool, return_array: bool
) -> None:
    cache = split_cache(SLOTS[name], window)
    queries = random_array(4, BATCH, HEADS * GROUPS, LENGTH, WIDTH)
    sinks = random_array(5, HEADS * GROUPS) if has_sinks else None
    mask = cache.make_mask(LENGTH, return_array=return_array)
    keys, values = cache.update_and_fetch(
        random_array(6, BATCH, HEADS, LENGTH, WIDTH), random_array(7, BATCH, HEADS, LENGTH, WIDTH)
    )
    with prefix_attention_in(tiny_model("llama", VOCAB)):
        attention = getattr(module_of("llama"), NAME)
        options = {"sinks": sinks} if has_sinks else {}
        result = attention(queries, keys, values, cache=cache, scale=0.4, mask=mask, **options)
    expected = float64_attention(cache, queries, SLOTS[name], window, sinks)
    np.testing.assert_allclose(np.array(result), expected, rtol=0, atol=ROUNDING)


def test_a_mask_that_the_model_makes_itself_is_refused() -> None:
    """It was made from keys without the prefix, so it says nothing of those."""
    cache = split_cache(SLOTS["gaps"], None)
    queries = random_array(4, BATCH, HEADS * GROUPS, LENGTH, WIDTH)
    mask = cache.make_mask(LENGTH)
    assert isinstance(mask, mx.array)
    keys, values = cache.update_and_fetch(
        random_array(6, BATCH, HEADS, LENGTH, WIDTH), random_array(7, BATCH, HEADS, LENGTH, WIDTH)
    )
    with prefix_attention_in(tiny_model("llama", VOCAB)):
        attention = getattr(module_of("llama"), NAME)
        for own in (mx.where(mask, 0.0, -1e9), mx.logical_and(mask, mask)):
            with pytest.raises(ValueError, match="a mask of its own"):
                attention(queries, keys, values, cache=cache, scale=0.4, mask=own)


def test_another_thread_waits_until_the_name_is_free() -> None:
    model = tiny_model("llama", VOCAB)
    seen: list[bool] = []

    def look() -> None:
        with prefix_attention_in(model):
            seen.append(inside.is_set())

    inside = threading.Event()
    with prefix_attention_in(model):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join(0.2)
        assert seen == []
        inside.set()
    thread.join()
    assert seen == [True]
