from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from mlx_eval.engine import sharing
from mlx_eval.engine.batches import Batch, CacheSize, Level, ScoringPlan, Sharing
from mlx_eval.engine.kv import CacheFactory
from mlx_eval.engine.plan import plan_scoring
from mlx_eval.engine.sharing import FAILURES, WAYS, ModelSharing, Way, describe, find_sharing, probe_requests
from mlx_eval.models.head import RowHead
from tests.tiny import RECURRENT, ScriptedModel, tiny_model

VOCAB = 64
RAGGED, RAGGED_COPIED, EQUAL, EQUAL_COPIED, EQUAL_CACHES, ROWS, ALONE = WAYS
LOGITS_BYTES = 2**28


def found(model: nn.Module) -> ModelSharing:
    return find_sharing(model, RowHead(model, LOGITS_BYTES))


def tiny(kind: str = "llama", vocab: int = VOCAB, **changes: Any) -> Any:
    return tiny_model(kind, vocab, **{**RECURRENT.get(kind, {}), **changes})


# ---------------------------------------------------------------- models as they are

WINDOW = {"query_pre_attn_scalar": 8, "sliding_window": 4, "sliding_window_pattern": 2}
SINKS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_scaling": None,
}


@pytest.mark.parametrize(
    ("kind", "changes", "way"),
    [
        ("llama", {}, RAGGED),
        ("qwen2", {}, RAGGED),
        ("gemma3_text", WINDOW, RAGGED),
        ("gpt_oss", SINKS, RAGGED),
        # its attention caps the scores, so it does not call the function that reads prefixes
        ("gemma2", {"query_pre_attn_scalar": 8, "num_key_value_heads": 4}, RAGGED_COPIED),
        ("mamba", {}, EQUAL),  # its state runs over padding
        ("mamba2", {}, RAGGED),  # it is told of padding, and listens
        ("recurrent_gemma", {}, EQUAL),
    ],
)
def test_models_are_run_in_the_fastest_way_that_is_right(
    kind: str, changes: dict[str, Any], way: Way
) -> None:
    assert found(tiny(kind, **changes)).way == way


@pytest.mark.parametrize("heads", [1, 2])
def test_gemma2_with_grouped_heads_takes_no_mask_of_its_own_for_each_row(heads: int) -> None:
    """It takes the rows of a mask for heads, aloud or silently."""
    result = found(tiny("gemma2", query_pre_attn_scalar=8, num_key_value_heads=heads))
    assert result.way.level is Level.EQUAL
    assert result.findings[0].startswith(describe(RAGGED))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize(("kind", "way"), [("llama", RAGGED), ("mamba", EQUAL)])
def test_half_precision_is_no_reason_to_share_less_or_more(kind: str, way: Way, dtype: mx.Dtype) -> None:
    model = tiny(kind)
    model.set_dtype(dtype)
    assert found(model).way == way


def test_a_vocabulary_of_six_is_enough() -> None:
    assert found(tiny(vocab=6)).way == RAGGED


def test_a_model_without_a_split_head_is_tested_too() -> None:
    """It looks back through its cache for marks that the probe does not hold: every number is the same."""
    assert found(ScriptedModel("abc")).way.level is Level.RAGGED


def test_a_model_that_gives_nan_alone_has_other_troubles_than_batches() -> None:
    model = tiny()
    model.model.norm.weight = mx.full((32,), math.nan)
    assert found(model).way == RAGGED


# ---------------------------------------------------------------- models with faults


def with_attention(change: Callable[[Any, Any], tuple[Any, Any]], layers: slice = slice(None)) -> Any:
    """A llama whose attention is given another mask or cache."""
    model = tiny()
    cls = type(model.layers[0].self_attn)

    class Faulty(cls):  # type: ignore[misc,valid-type]
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            mask, cache = change(mask, cache)
            return super().__call__(x, mask, cache)

    for layer in model.layers[layers]:
        layer.self_attn.__class__ = Faulty
    return model


def without_arrays(mask: Any, cache: Any) -> tuple[Any, Any]:
    return ("causal" if isinstance(mask, mx.array) else mask), cache


def of_the_first_row(mask: Any, cache: Any) -> tuple[Any, Any]:
    return (mask[:1] if isinstance(mask, mx.array) and mask.ndim == 4 else mask), cache


def without_past(mask: Any, cache: Any) -> tuple[Any, Any]:
    """Attends to the new tokens only, as if nothing had been read before."""

    class Forgetful:
        offset = 0 if cache is None else cache.offset

        def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
            cache.update_and_fetch(keys, values)
            return keys, values

    return "causal", Forgetful()


class Offset(nn.Module):
    """Rotary positions that do something else with an offset for each row."""

    def __init__(self, inner: nn.Module, change: Callable[[mx.array], Any]) -> None:
        super().__init__()
        self.inner = inner
        self._change = change

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        return self.inner(x, offset=self._change(offset) if isinstance(offset, mx.array) else offset)


def with_offsets(change: Callable[[mx.array], Any], layers: slice = slice(None)) -> Any:
    model = tiny()
    for layer in model.layers[layers]:
        layer.self_attn.rope = Offset(layer.self_attn.rope, change)
    return model


def refuse(offset: mx.array) -> int:
    raise TypeError("rope() takes an int\nand nothing else")


def with_call(change: Callable[..., mx.array], kind: str = "llama") -> Any:
    """A model whose whole call is changed."""
    model = tiny(kind)
    cls = type(model)

    class Faulty(cls):  # type: ignore[misc,valid-type]
        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            return change(functools.partial(super().__call__, cache=cache), inputs)

    model.__class__ = Faulty
    return model


def neighbours(call: Any, inputs: mx.array) -> mx.array:
    logits = call(inputs)
    return logits if len(inputs) == 1 else logits[::-1]


def mixed_a_little(call: Any, inputs: mx.array) -> mx.array:
    logits = call(inputs)
    return 0.99 * logits + 0.01 * mx.mean(logits, axis=0, keepdims=True)


def two_rows_at_most(call: Any, inputs: mx.array) -> mx.array:
    if len(inputs) > 2:
        raise ValueError("two rows at most")
    return call(inputs)


def padding_read(call: Any, inputs: mx.array) -> mx.array:
    """Counts the tokens that rows are padded with, in all of a row."""
    logits = call(inputs)
    return logits + (inputs == 0).sum(axis=1, keepdims=True)[..., None] * mx.arange(logits.shape[-1]) * 0.01


def own_attention() -> Any:
    """A llama that computes its attention without the function that reads prefixes."""
    model = tiny()
    cls = type(model.layers[0].self_attn)

    class Own(cls):  # type: ignore[misc,valid-type]
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            rows, length, _ = x.shape
            queries, keys, values = (
                made.reshape(rows, length, heads, -1).transpose(0, 2, 1, 3)
                for made, heads in (
                    (self.q_proj(x), self.n_heads),
                    (self.k_proj(x), self.n_kv_heads),
                    (self.v_proj(x), self.n_kv_heads),
                )
            )
            offset = 0 if cache is None else cache.offset
            queries, keys = self.rope(queries, offset=offset), self.rope(keys, offset=offset)
            if cache is not None:
                keys, values = cache.update_and_fetch(keys, values)
            mixed = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self.scale, mask=mask)
            return self.o_proj(mixed.transpose(0, 2, 1, 3).reshape(rows, length, -1))

    for layer in model.layers:
        layer.self_attn.__class__ = Own
    return model


def with_cache(make: Callable[[], Any]) -> Any:
    """A llama that keeps its keys in something else."""
    model = tiny()
    cls = type(model)

    class Keeping(cls):  # type: ignore[misc,valid-type]
        def make_cache(self) -> list[Any]:
            return [make() for _ in self.layers]

    model.__class__ = Keeping
    return model


def crossed_cache() -> Any:
    from mlx_lm.models.cache import KVCache

    class Crossed(KVCache):  # type: ignore[misc]
        """Has an array whose first axis is no batch."""

        table = None

        def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
            self.table = mx.zeros((keys.shape[0] + 1, 2))
            return super().update_and_fetch(keys, values)

    return Crossed()


def slotted_cache() -> Any:
    """Keeps its arrays where nobody finds them."""
    from mlx_lm.models.cache import KVCache

    class Slotted:
        __slots__ = ("inner",)

        def __init__(self) -> None:
            self.inner = KVCache()

        @property
        def offset(self) -> int:
            return self.inner.offset

        def make_mask(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner.make_mask(*args, **kwargs)

        def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
            return self.inner.update_and_fetch(keys, values)

    return Slotted()


def unknown_cache() -> Any:
    from mlx_lm.models.cache import KVCache

    class Unknown(KVCache):  # type: ignore[misc]
        pass

    return Unknown()


FAULTS: dict[str, tuple[Callable[[], Any], Way]] = {
    "array masks are ignored": (lambda: with_attention(without_arrays), EQUAL),
    "array masks are ignored in one layer": (lambda: with_attention(without_arrays, slice(1, None)), EQUAL),
    "the mask of the first row is used for all": (lambda: with_attention(of_the_first_row), EQUAL),
    "the past is forgotten": (lambda: with_attention(without_past), ROWS),
    "offsets of rows are refused": (lambda: with_offsets(refuse), EQUAL),
    "the first row's offset is used for all": (lambda: with_offsets(lambda offset: offset[0].item()), EQUAL),
    "one layer is off by one where rows differ": (
        lambda: with_offsets(lambda offset: offset + 1, slice(1, None)),
        EQUAL,
    ),
    "attention of its own": (own_attention, RAGGED_COPIED),
    "rows are exchanged": (lambda: with_call(neighbours), ALONE),
    "rows are mixed a little": (lambda: with_call(mixed_a_little), ALONE),
    "many rows are refused": (lambda: with_call(two_rows_at_most), ALONE),
    "padding is read": (lambda: with_call(padding_read), ALONE),
    "a cache whose rows cannot be told": (lambda: with_cache(crossed_cache), ROWS),
    "a cache that hides its arrays": (lambda: with_cache(slotted_cache), ROWS),
    "a cache of an unknown kind": (lambda: with_cache(unknown_cache), EQUAL),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found_and_the_best_right_way_is_taken(fault: str) -> None:
    make, way = FAULTS[fault]
    model = make()
    before = [np.array(array) for _, array in tree_flatten(model.parameters())]
    result = found(model)
    assert result.way == way
    assert len(result.findings) == WAYS.index(way)
    for finding, wrong in zip(result.findings, WAYS, strict=False):
        assert finding.startswith(describe(wrong) + ": ")
        assert "\n" not in finding
    after = [np.array(array) for _, array in tree_flatten(model.parameters())]
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))


def test_findings_say_what_was_raised_or_how_far_off_it_is() -> None:
    refused = found(with_offsets(refuse)).findings
    assert refused[0].endswith("TypeError: rope() takes an int")
    ignored = found(with_attention(without_arrays)).findings
    assert ignored[0].split(": ")[1].startswith("differs from a row alone by ")


@pytest.mark.parametrize("error", FAILURES)
@pytest.mark.parametrize("text", ["several rows", ""])
def test_whatever_a_model_raises_in_batches_is_a_finding(error: type[Exception], text: str) -> None:
    def fail(call: Any, inputs: mx.array) -> mx.array:
        if len(inputs) > 2:
            raise error(text)
        return call(inputs)

    result = found(with_call(fail))
    assert result.way == ALONE
    assert all(finding.split(": ")[1] == error.__name__ for finding in result.findings)


def test_a_stopped_test_is_no_finding() -> None:
    def stop(call: Any, inputs: mx.array) -> mx.array:
        if len(inputs) > 2:
            raise KeyboardInterrupt
        return call(inputs)

    with pytest.raises(KeyboardInterrupt):
        found(with_call(stop))


def test_nan_in_batches_is_a_difference() -> None:
    def spoil(call: Any, inputs: mx.array) -> mx.array:
        logits = call(inputs)
        return logits * math.nan if len(inputs) > 2 else logits

    result = found(with_call(spoil))
    assert result.way == ALONE
    assert "by inf of" in result.findings[0]


# ---------------------------------------------------------------- the probe


def plans(vocab: int, way: Way = RAGGED) -> list[ScoringPlan]:
    rows = Sharing(way.level, way.branches, True)
    return [
        plan_scoring(requests, sharing.PROBE_LIMITS, rows, split_tokens=1)
        for requests in probe_requests(vocab)
    ]


def batches_of(vocab: int, way: Way = RAGGED) -> list[Batch]:
    return [batch for plan in plans(vocab, way) for batch in plan.batches]


@pytest.mark.parametrize("vocab", [64, 330, 1000, 150_000])
def test_the_probe_has_everything_that_a_plan_can_have_more_than_once(vocab: int) -> None:
    batches = batches_of(vocab)
    assert sum(batch.prefix is not None and len(batch.rows) > 1 for batch in batches) > 1
    copies = [batch for batch in batches if any(row.parent is not None for row in batch.rows)]
    assert sum(len(batch.rows) > 1 for batch in copies) > 1
    assert any(len({row.start for row in batch.rows}) > 1 for batch in copies)
    assert any(batch.padding and batch.is_parent for batch in batches)
    assert sum(batch.padding > 0 for batch in batches) > 1
    assert any(batch.length == 1 and len(batch.rows) > 1 for batch in batches)
    gone_on_from = {
        (index, place, row.parent)
        for index, plan in enumerate(plans(vocab))
        for place, batch in enumerate(plan.batches)
        for row in batch.rows
        if row.parent is not None
    }
    behind_padding = [
        key
        for index, _, key in gone_on_from
        if plans(vocab)[index].batches[key.batch].rows[key.row].length
        < plans(vocab)[index].batches[key.batch].length
    ]
    assert behind_padding


@pytest.mark.parametrize("vocab", [6, 64, 150_000])
def test_the_probe_is_small_and_within_the_vocabulary(vocab: int) -> None:
    assert sum(plan.planned_tokens for plan in plans(vocab, ALONE)) < 2000
    for requests in probe_requests(vocab):
        ids = np.concatenate([np.append(one.context_ids, one.continuation_ids) for one in requests])
        assert ids.min() > 0
        assert ids.max() < min(vocab, 1000)
    assert probe_requests(vocab) == probe_requests(vocab)


# ---------------------------------------------------------------- records


def test_ways_have_different_names() -> None:
    assert len({describe(way) for way in WAYS}) == len(WAYS)


@pytest.mark.parametrize("way", WAYS, ids=describe)
def test_what_was_found_survives_a_file(way: Way) -> None:
    result = ModelSharing(way, True, CacheSize(12, 34), ("a: b", "c"))
    stored = json.loads(json.dumps(result.as_dict()))
    assert ModelSharing.from_dict(stored) == result
    assert result.sharing == Sharing(way.level, prefix_once=way.branches, keys_only=True)


@pytest.mark.parametrize(
    "change",
    [
        {"way": {"level": "SIDEWAYS", "branches": True, "splits_attention": True}},
        {"way": {"level": "ROWS"}},
        {"way": {"level": "ROWS", "branches": True, "splits_attention": True, "more": 1}},
        {"way": None},
        {"cache": {"bytes": 1}},
        {"findings": None},
    ],
    ids=str,
)
def test_a_file_of_something_else_is_refused(change: dict[str, Any]) -> None:
    stored = ModelSharing(ROWS, True, CacheSize()).as_dict()
    with pytest.raises((KeyError, TypeError)):
        ModelSharing.from_dict({**stored, **change})
    for name in stored:
        with pytest.raises((KeyError, TypeError)):
            ModelSharing.from_dict({key: value for key, value in stored.items() if key != name})


def test_caches_are_those_of_the_way() -> None:
    model = tiny()
    for way in WAYS:
        factory = ModelSharing(way, True, CacheSize()).caches(model)
        assert isinstance(factory, CacheFactory)
        assert factory.splits_attention == way.splits_attention
        assert factory.keys_only == way.branches


FLOAT, LAYERS, KEYS_AND_VALUES = 4, 2, 2


@pytest.mark.parametrize(
    ("kind", "changes", "token_bytes", "row_bytes"),
    [
        ("llama", {}, LAYERS * KEYS_AND_VALUES * 2 * 8 * FLOAT, 0),
        ("llama", {"num_key_value_heads": 4}, LAYERS * KEYS_AND_VALUES * 4 * 8 * FLOAT, 0),
        ("gemma3_text", WINDOW, LAYERS * KEYS_AND_VALUES * 2 * 8 * FLOAT, 0),
        ("mamba", {}, 1, LAYERS * 64 * (4 + 3 - 1) * FLOAT),  # state and convolution
    ],
)
def test_memory_of_a_token_and_a_row(
    kind: str, changes: dict[str, Any], token_bytes: int, row_bytes: int
) -> None:
    assert found(tiny(kind, **changes)).cache == CacheSize(token_bytes, row_bytes)


def test_memory_of_half_precision_is_half() -> None:
    model = tiny()
    model.set_dtype(mx.bfloat16)
    assert found(model).cache.token_bytes == found(tiny()).cache.token_bytes // 2
