from __future__ import annotations

import importlib
import threading
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_eval.engine.attention import NAME, prefix_attention_in
from mlx_eval.engine.branch import BranchCache, Layout
from mlx_eval.engine.kv import Prefix
from mlx_eval.engine.slots import Run, SlotCache, Table
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


# ---------------------------------------------------------------- rows that are decoded together

RUNS = ((5, (7, 5, 9)), (0, (4,)), (3, (3,)), (0, (2, 6)))
"""Tokens of the prefix of each run, and of each of its rows when it joined."""
READ = (2, 0, 1, 3, 1, 0, 2)
"""Tokens that each row has read since."""


class Decoded:
    """Rows in runs, all that each has read, and the cache of a layer that holds it."""

    def __init__(self, num_new: int, kept: int | None) -> None:
        rng = np.random.default_rng(0)

        def tokens(count: int) -> np.ndarray:
            return rng.standard_normal((HEADS, count, 2 * WIDTH)).astype(np.float32)

        self.table = Table()
        self.cache = SlotCache(self.table, 0, kept)
        self.texts: list[np.ndarray] = []
        """[H, N, 2 D] keys and values of each row, its new tokens included."""
        for shared, lengths in RUNS:
            stem = tokens(shared)
            prefix = Prefix(shared, [self.split(stem[None])]) if shared else None
            begin = len(self.texts)
            places = range(begin, begin + len(lengths))
            self.table.runs.append(Run(prefix, begin, begin + len(lengths)))
            self.texts += [np.concatenate([stem, tokens(length - shared)], axis=1) for length in lengths]
            self.table.place(places, np.array(lengths, np.int32))
            first = np.array([shared if kept is None else max(0, length - kept) for length in lengths])
            width = int((np.array(lengths) - first).max())
            own = np.zeros((len(lengths), HEADS, width, 2 * WIDTH), np.float32)
            for row, place in enumerate(places):
                own[row, :, : lengths[row] - first[row]] = self.texts[place][:, first[row] :]
            self.cache.write(places, *self.split(own))
        most = max(READ)
        self.table.begin_step(most)
        news = np.stack([tokens(most) for _ in self.texts])
        self.cache.update_and_fetch(*self.split(news))
        for row, read in enumerate(READ):  # the rest of a draft is forgotten
            self.texts[row] = np.concatenate([self.texts[row], news[row, :, :read]], axis=1)
        self.table.advance(np.array(READ, np.int32))
        self.table.begin_step(num_new)
        self.news = np.stack([tokens(num_new) for _ in self.texts])
        self.texts = [
            np.concatenate([text, new], axis=1) for text, new in zip(self.texts, self.news, strict=True)
        ]

    @staticmethod
    def split(array: np.ndarray) -> tuple[mx.array, mx.array]:
        return mx.array(array[..., :WIDTH]), mx.array(array[..., WIDTH:])

    def expected(self, queries: mx.array, window: int | None, sinks: mx.array | None) -> np.ndarray:
        """[B, G * H, T, D] token by token in float64; a sink is one more score, whose value is zero."""
        result = np.zeros(queries.shape)
        num_new = queries.shape[2]
        for row, head, token in np.ndindex(*queries.shape[:3]):
            text = self.texts[row][head // GROUPS].astype(np.float64)
            end = len(text) - num_new + token + 1
            seen = text[max(0, end - window) if window else 0 : end]
            scores = 0.4 * seen[:, :WIDTH] @ np.array(queries[row, head, token]).astype(np.float64)
            extra = [] if sinks is None else [float(sinks[head].item())]
            top = max([*scores, *extra])
            terms = np.exp(scores - top)
            total = terms.sum() + sum(np.exp(one - top) for one in extra)
            result[row, head, token] = terms @ seen[:, WIDTH:] / total
        return result


@pytest.mark.parametrize("num_new", [1, 3])
@pytest.mark.parametrize(
    ("kept", "window"), [(None, None), (None, 3), (None, 8), (None, 100), (3, None), (8, None), (8, 8)]
)
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("return_array", [False, True])
def test_each_run_reads_its_prefix_and_each_row_its_own_slots(
    num_new: int, kept: int | None, window: int | None, has_sinks: bool, return_array: bool
) -> None:
    """`kept`: by the cache itself; `window`: by the mask that the model asks for."""
    rows = Decoded(num_new, kept)
    queries = random_array(4, len(rows.texts), HEADS * GROUPS, num_new, WIDTH)
    sinks = random_array(5, HEADS * GROUPS) if has_sinks else None
    mask = rows.cache.make_mask(num_new, window_size=window, return_array=return_array)
    keys, values = rows.cache.update_and_fetch(*rows.split(rows.news))
    with prefix_attention_in(tiny_model("llama", VOCAB)):
        attention = getattr(module_of("llama"), NAME)
        options = {"sinks": sinks} if has_sinks else {}
        result = attention(queries, keys, values, cache=rows.cache, scale=0.4, mask=mask, **options)
    expected = rows.expected(queries, window or kept, sinks)
    np.testing.assert_allclose(np.array(result), expected, rtol=0, atol=ROUNDING)


def test_a_mask_of_the_models_own_is_refused_for_rows_that_are_decoded_together() -> None:
    rows = Decoded(1, None)
    queries = random_array(4, len(rows.texts), HEADS * GROUPS, 1, WIDTH)
    mask = rows.cache.make_mask(1, return_array=True)
    assert isinstance(mask, mx.array)
    keys, values = rows.cache.update_and_fetch(*rows.split(rows.news))
    with prefix_attention_in(tiny_model("llama", VOCAB)):
        attention = getattr(module_of("llama"), NAME)
        for own in (mx.where(mask, 0.0, -1e9), mx.logical_and(mask, mask)):
            with pytest.raises(ValueError, match="a mask of its own"):
                attention(queries, keys, values, cache=rows.cache, scale=0.4, mask=own)


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
