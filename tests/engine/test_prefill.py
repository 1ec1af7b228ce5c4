from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_eval import config
from mlx_eval.engine.batches import Batch, Limits, RowKey, ScoringPlan
from mlx_eval.engine.kv import Prefix, leaves
from mlx_eval.engine.plan import plan_prompts
from mlx_eval.engine.prefill import Prefill, find_stems, read_alone
from mlx_eval.engine.row_caches import ReadRows
from mlx_eval.engine.rows import arrays_in
from tests.engine.decoders import (
    BATCHED,
    VOCAB,
    allowed,
    attention_of,
    distinct_tokens,
    random_model,
    random_prompts,
    read_prompts,
)
from tests.engine.forests import Policy
from tests.tiny import TOLERANCE, oracle_logits, tiny_model


def planned(stem: int, behind: int, own: int = 4, others: int = 0) -> ScoringPlan:
    """Prompts behind one stem, each with tokens of its own, and others that share nothing."""
    prompts = [[1] * stem + [10 + row] * own for row in range(behind)]
    return plan_prompts([*prompts, *([100 + row] * own for row in range(others))], Limits(8))


# ---------------------------------------------------------------- what is worth a run of its own


def test_a_stem_is_stored_once_where_that_saves_more_than_a_run_costs() -> None:
    """20 rows read 50 tokens each, or one run reads them: 950 tokens less."""
    plan = planned(stem=50, behind=20)
    (key,) = find_stems(plan, 32)
    assert find_stems(plan, 32, run_tokens=950) == {key: key}
    assert find_stems(plan, 32, run_tokens=951) == {key: None}


def test_no_more_rows_count_than_are_decoded_together() -> None:
    plan = planned(stem=50, behind=20)
    (key,) = find_stems(plan, 4)
    assert find_stems(plan, 4, run_tokens=150) == {key: key}
    assert find_stems(plan, 4, run_tokens=151) == {key: None}


def nested() -> tuple[ScoringPlan, RowKey, list[RowKey]]:
    """A header of 40 tokens, behind it two passages of 30 with 6 questions each; the header's key, the passages'."""
    prompts = [
        [1] * 40 + [10 + passage] * 30 + [20 + question, 3] for passage in range(2) for question in range(6)
    ]
    with Policy(prefix_copies=1, ahead_tokens=0).applied():
        plan = plan_prompts(prompts, Limits(8))
    header, *passages = find_stems(plan, 32)
    return plan, header, passages


@pytest.mark.parametrize(
    ("run_tokens", "passage", "header"),
    [
        (0, "itself", "itself"),
        (110, "itself", "itself"),  # 6 * 30 tokens that rows would read, and 70 that the run reads
        (111, "header", "itself"),
        (440, "header", "itself"),  # 12 * 40 - 40
        (441, "nothing", "nothing"),
    ],
)
def test_of_prefixes_within_prefixes_the_innermost_that_pays_is_read_where_it_is(
    run_tokens: int, passage: str, header: str
) -> None:
    plan, first, passages = nested()
    assert len(passages) == 2
    found = find_stems(plan, 32, run_tokens)
    named = {"itself": None, "header": first, "nothing": None}
    assert found[first] == (first if header == "itself" else None)
    for key in passages:
        assert found[key] == (key if passage == "itself" else named[passage])


def test_where_the_outer_one_is_copied_the_inner_one_saves_all_of_it() -> None:
    """A header that few share pays only as a part of the passage."""
    prompts = [[1] * 40 + [10] * 30 + [20 + row] for row in range(3)] + [[1] * 40 + [11, 5]]
    with Policy(prefix_copies=1, ahead_tokens=0).applied():
        plan = plan_prompts(prompts, Limits(8))
    header, passage = find_stems(plan, 32)
    # 4 * 40 - 40 = 120 for the header; behind it 3 * 30 - 70, without it 3 * 70 - 70 = 140
    assert find_stems(plan, 32, 121) == {header: None, passage: passage}
    assert find_stems(plan, 32, 120) == {header: header, passage: header}


# ---------------------------------------------------------------- what is read


def parts_of(rows: ReadRows, row: int) -> list[Any]:
    """For each layer, the keys and values [H, S, D] of a row with its prefix, or the arrays of its state."""
    shared = 0 if rows.prefix is None else rows.prefix.length
    above: list[Any] = [None] * len(rows.layers) if rows.prefix is None else leaves(rows.prefix.caches)
    found: list[Any] = []
    for layer, before in zip(rows.layers, above, strict=True):
        if isinstance(layer, tuple):
            found.append([(np.array(array[row]), before, place) for place, array in enumerate(layer)])
        else:
            found.append([np.array(array[row]) for array in arrays_in(layer)])
    assert shared <= rows.lengths[row]
    return found


def assert_rows(model: nn.Module, ids: tuple[int, ...], rows: ReadRows, row: int) -> None:
    """What is remembered of one row is what mlx-lm's own caches hold of it."""
    assert rows.lengths[row] == len(ids)
    own_caches = leaves(read_alone(model, ids))
    assert len(own_caches) == len(rows.layers)
    for cache, part in zip(own_caches, parts_of(rows, row), strict=True):
        if isinstance(cache, KVCache | RotatingKVCache):
            kept = len(ids) if isinstance(cache, KVCache) else min(len(ids), cache.max_size)
            for (own, before, place), whole in zip(part, (cache.keys, cache.values), strict=True):
                expected = ordered(cache, whole, len(ids))[:, -kept:]
                if isinstance(cache, KVCache) and before is not None:
                    found = np.concatenate([np.array(before[place])[0], own], axis=1)
                else:
                    found = own
                np.testing.assert_allclose(found[:, :kept], expected, rtol=0, atol=TOLERANCE)
        else:
            arrays = arrays_in(cache)
            assert len(arrays) == len(part)
            for array, own in zip(arrays, part, strict=True):
                # states grow to hundreds
                np.testing.assert_allclose(own, np.array(array)[0], rtol=1e-5, atol=TOLERANCE)


def ordered(cache: Any, array: Any, length: int) -> Any:
    """[H, S, D] one of an mlx-lm cache's arrays in the order of the tokens."""
    whole = cache._temporal_order(array) if isinstance(cache, RotatingKVCache) else array[..., :length, :]
    return np.array(whole)[0]


@pytest.mark.parametrize("run_tokens", [0, config.RUN_TOKENS])
@pytest.mark.parametrize("kind", BATCHED)
def test_rows_remember_what_each_would_alone(kind: str, run_tokens: int) -> None:
    """Prefixes within prefixes, copies of parents, padded rows and prompts that begin one another."""
    model, (sharing, _) = random_model(kind), allowed(kind)
    prompts = random_prompts(1, stem=24, behind=6, others=4)
    prompts = [prompt for prompt in prompts if len(prompt) > 1]
    prompts += [(*prompts[0], 5, 6, 7), (*prompts[0][:-1], 9, 9), prompts[1]]
    with Policy(prefix_copies=1, ahead_tokens=8).applied():
        read = read_prompts(model, sharing, prompts, limits=Limits(4, step=256), run_tokens=run_tokens)
    assert sorted(number for numbers, _ in read for number in numbers) == list(range(len(prompts)))
    stored_once = [rows for _, rows in read if rows.prefix is not None]
    assert bool(stored_once) == (run_tokens == 0)
    for numbers, rows in read:
        for row, number in enumerate(numbers):
            assert_rows(model, prompts[number][:-1], rows, row)


def test_rows_behind_a_header_have_copies_of_what_lies_between_it_and_them() -> None:
    model, (sharing, _) = random_model(), allowed()
    rng = np.random.default_rng(0)
    header, *passages = (rng.integers(8, VOCAB, size).tolist() for size in (40, 12, 12))
    prompts = [(*header, *passage, 20 + question, 3) for passage in passages for question in range(4)]
    with Policy(prefix_copies=1, ahead_tokens=0).applied():
        read = read_prompts(model, sharing, prompts, run_tokens=100)
    prefixes = {id(rows.prefix): rows.prefix for _, rows in read}
    (header_prefix,) = prefixes.values()
    assert header_prefix is not None
    assert header_prefix.length == 40
    for numbers, rows in read:
        assert rows.layers[0][0].shape[2] == 12 + 1
        for row, number in enumerate(numbers):
            assert_rows(model, prompts[number][:-1], rows, row)


def test_batches_are_told_with_their_forward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (sharing, _) = tiny_model(vocab_size=VOCAB, seed=3), allowed()
    prompts = [tuple(range(8, 8 + size)) for size in (30, 12, 25)] + [(9, 8, 7, 6)]
    calls: list[tuple[int, ...]] = []

    class Counted(type(model)):  # type: ignore[misc]  # the class of a loaded model
        def __call__(self, inputs: mx.array, *arguments: Any, **options: Any) -> Any:
            calls.append(tuple(inputs.shape))
            return super().__call__(inputs, *arguments, **options)

    model.__class__ = Counted
    plan = plan_prompts([prompt[:-1] for prompt in prompts], Limits(4, step=8), sharing.sharing)
    told: list[tuple[Batch, int]] = []
    with attention_of(model, sharing):
        read = list(
            Prefill(model, sharing.caches(model), plan, 4, lambda batch, count: told.append((batch, count)))
        )
    assert [batch for batch, _ in told] == list(plan.batches)
    assert sum(count for _, count in told) == plan.num_forwards == len(calls)
    assert max(length for _, length in calls) == 8
    assert sum(batch.num_tokens for batch, _ in told) == plan.planned_tokens
    assert plan.unique_tokens == distinct_tokens([prompt[:-1] for prompt in prompts])
    del model.__class__.__call__
    for numbers, rows in read:
        for row, number in enumerate(numbers):
            assert_rows(model, prompts[number][:-1], rows, row)


def test_nothing_is_read_before_it_is_asked_for() -> None:
    model, (sharing, _) = random_model(), allowed()
    plan = plan_prompts([[8 + row] * 9 for row in range(6)], Limits(2), sharing.sharing)
    told: list[Batch] = []
    prompts = iter(Prefill(model, sharing.caches(model), plan, 4, lambda batch, count: told.append(batch)))
    assert told == []
    with attention_of(model, sharing):
        next(prompts)
        assert len(told) == 1
        next(prompts)
        assert len(told) == 2


def test_the_output_layer_is_never_computed() -> None:
    """It takes 64 MiB that nothing else needs."""
    model, (sharing, _) = tiny_model(vocab_size=VOCAB, seed=3), allowed()
    head = model.lm_head

    class Large(type(head)):  # type: ignore[misc]  # the class of a loaded layer
        def __call__(self, states: mx.array) -> Any:
            return super().__call__(states) + mx.sum(mx.arange(2**24, dtype=mx.float32))

    head.__class__ = Large

    def peak(*arrays: Any) -> float:
        mx.eval(arrays)
        return (mx.get_peak_memory() - before) / 2**20

    before = mx.get_active_memory()
    mx.reset_peak_memory()
    read = read_prompts(model, sharing, [tuple(range(8, 30)), tuple(range(8, 20))])
    alone = read_alone(model, [1, 2, 3])
    assert peak([rows.arrays() for _, rows in read], [cache.state for cache in alone]) < 16
    assert peak(model(mx.array([[1, 2, 3]]))) > 64


def prefixes_alive() -> int:
    gc.collect()
    return sum(type(one) is Prefix for one in gc.get_objects())


def test_stems_are_let_go_once_their_last_row_was_given() -> None:
    model, (sharing, _) = random_model(), allowed()
    before = prefixes_alive()
    plan = planned(stem=30, behind=6, others=2)
    prefill = Prefill(model, sharing.caches(model), plan, 8, run_tokens=0)
    seen: list[int] = []
    with attention_of(model, sharing):
        for numbers, rows in prefill:
            seen += numbers
            del rows
    assert sorted(seen) == list(range(8))
    assert prefixes_alive() == before


# ---------------------------------------------------------------- one row


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gemma2", "mamba"])
@pytest.mark.parametrize("size", [0, 1, 4, 5, 9])
def test_a_row_alone_is_read_in_steps(kind: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "PREFILL_STEP", 4)
    model = random_model(kind)
    ids = list(range(9, 9 + size))
    caches = read_alone(model, ids)
    logits = np.array(model(mx.array([[50]]), cache=caches)[0, -1])
    np.testing.assert_allclose(logits, oracle_logits(model, [*ids, 50])[-1], rtol=0, atol=TOLERANCE)
