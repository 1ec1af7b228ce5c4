from __future__ import annotations

import argparse
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from benchmarks.limits import Counts, Taken, ledger
from benchmarks.planning import make_requests
from benchmarks.side_by_side.bare import BareModel, GivenCache, forward_shapes, wanted_positions
from benchmarks.side_by_side.parts import Parts, num_pairs
from mlx_eval.engine.batches import Limits
from mlx_eval.engine.plan import plan_scoring
from mlx_eval.records import ScoringRequest
from tests.tiny import tiny_model

HEADER = tuple(range(1, 21))
REQUESTS = [
    ScoringRequest((*HEADER, *[30 + question] * 9), (choice, *range(1, 1 + choice)))
    for question in range(5)
    for choice in range(1, 4)
] + [ScoringRequest((7, 8), (9, 10, 11))]


def fed(request: ScoringRequest) -> list[int]:
    return [*request.context_ids.tolist(), *request.continuation_ids.tolist()][:-1]


def prefixes(ids: list[int]) -> list[tuple[int, ...]]:
    return [tuple(ids[: end + 1]) for end in range(len(ids))]


@pytest.fixture(scope="module")
def plan() -> Any:
    """Every shared token once: splits cost nothing."""
    return plan_scoring(REQUESTS, Limits(max_rows=4, step=16), split_tokens=1)


def test_the_forwards_of_a_plan_are_those_of_its_batches(plan: Any) -> None:
    shapes = list(forward_shapes(plan, REQUESTS))
    assert len(shapes) == plan.num_forwards
    positions = sum(shape.num_rows * shape.num_tokens for shape in shapes)
    assert positions == plan.planned_tokens + plan.padding
    assert max(shape.num_tokens for shape in shapes) == 16


def test_the_head_is_needed_once_for_each_distinct_text_before_a_scored_token(plan: Any) -> None:
    before = {text for request in REQUESTS for text in prefixes(fed(request))[request.context_ids.size - 1 :]}
    assert sum(shape.num_logits for shape in forward_shapes(plan, REQUESTS)) == len(before)
    assert sum(len(wanted_positions(batch, REQUESTS)) for batch in plan.batches) == len(before)


def test_pairs_are_counted_as_by_hand(plan: Any) -> None:
    distinct = {text for request in REQUESTS for text in prefixes(fed(request))}
    assert num_pairs(plan) == sum(map(len, distinct))
    assert plan.planned_tokens == len(distinct)


def test_rows_behind_a_prefix_say_what_stands_before_them(plan: Any) -> None:
    shapes = list(forward_shapes(plan, REQUESTS))
    assert {shape.num_shared for shape in shapes} > {0}
    assert all(shape.num_shared <= shape.num_cached for shape in shapes)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_multiply_are_counted(tied: bool) -> None:
    model: Any = tiny_model(tie_word_embeddings=tied)
    sizes = Parts(model, 1).sizes
    weights = dict(tree_flatten(model.parameters()))
    inner = [array for name, array in weights.items() if "layers" in name and array.ndim == 2]
    assert sizes.linear_weights == sum(array.size for array in inner)
    assert sizes.head_weights == weights["model.embed_tokens.weight"].size
    assert sizes.attention_width == 2 * 4 * 8  # layers, heads, size
    assert sizes.linear_flops(3) == 6 * sizes.linear_weights
    assert sizes.attention_flops(3) == 3 * 2 * 2 * 2 * 4 * 8  # queries with keys, weights with values


def test_other_forms_of_models_are_refused() -> None:
    with pytest.raises(SystemExit, match="llama's form"):
        Parts(
            tiny_model(
                "gpt2", n_ctx=64, n_embd=32, n_head=4, n_layer=2, n_positions=64, layer_norm_epsilon=1e-5
            ),
            1,
        )
    with pytest.raises(SystemExit, match="plain keys and values"):
        BareModel(
            tiny_model(layer_types=["sliding_attention", "full_attention"], sliding_window=8),
            prefix_once=False,
        )


@pytest.mark.parametrize("prefix_once", [True, False])
def test_bare_forwards_feed_the_model_the_plans_shapes(
    plan: Any, monkeypatch: pytest.MonkeyPatch, prefix_once: bool
) -> None:
    model: Any = tiny_model()
    bare = BareModel(model, prefix_once)
    seen: list[tuple[int, ...]] = []
    call = type(model.model).__call__

    def watched(self: Any, inputs: mx.array, *arguments: Any, **options: Any) -> Any:
        seen.append(inputs.shape)
        return call(self, inputs, *arguments, **options)

    monkeypatch.setattr(type(model.model), "__call__", watched)
    shapes = list(forward_shapes(plan, REQUESTS))
    assert bare.run(shapes).cpu > 0
    assert seen == [(shape.num_rows, shape.num_tokens) for shape in shapes]


@pytest.mark.parametrize("prefix_once", [True, False])
def test_each_row_of_a_bare_forward_sees_what_is_cached_and_itself(
    plan: Any, monkeypatch: pytest.MonkeyPatch, prefix_once: bool
) -> None:
    shape = max(forward_shapes(plan, REQUESTS), key=lambda one: one.num_shared)
    assert shape.num_shared > 0
    seen: list[int] = []
    update = GivenCache.update_and_fetch

    def watched(self: GivenCache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        assert self.offset == shape.num_cached
        given = update(self, keys, values)
        assert given[0].shape[0] == shape.num_rows
        seen.append(given[0].shape[2] + (0 if self.prefix is None else self.prefix[0].shape[2]))
        return given

    monkeypatch.setattr(GivenCache, "update_and_fetch", watched)
    BareModel(tiny_model(), prefix_once).run([shape])
    assert seen == [shape.num_cached + shape.num_tokens] * 2  # layers


def test_every_part_takes_time(plan: Any) -> None:
    parts = Parts(tiny_model(), 1)
    shapes = list(forward_shapes(plan, REQUESTS))
    found = [parts.linear(shapes), parts.attention(shapes), parts.copies(shapes), *parts.head(shapes)]
    assert min(*found, *parts.elementwise(shapes).values(), parts.best_rate()) > 0


def test_the_lines_add_up_to_the_whole_and_begin_with_the_limit() -> None:
    sizes = Parts(tiny_model(), 1).sizes
    counts = Counts(unique_tokens=100, planned_tokens=110, padding=7, pairs=1000, positions=20)
    taken = Taken(10.0, 0.1, 0.2, 0.3, 4.0, 2.0, {"norms": 0.5, "activations": 0.25}, 1.0, 0.5, 0.125)
    rate = 1e6
    lines = dict(ledger(sizes, counts, rate, taken))
    assert sum(lines.values()) == pytest.approx(10.0)
    least = (
        100 * 2 * sizes.linear_weights
        + 4 * sizes.attention_width * 1000 * 100 / 110
        + 20 * 2 * sizes.head_weights
    )
    first = next(iter(lines))
    assert "limit" in first
    assert lines[first] == pytest.approx(least / rate)
    parts = 4.0 + 2.0 + 0.5 + 0.25 + 1.0 + 0.5 + 0.125 + 0.1 + 0.2 + 0.3
    assert lines["not explained"] == pytest.approx(10.0 - parts)


def test_requests_to_plan_are_as_many_and_as_long_as_asked() -> None:
    arguments = argparse.Namespace(
        subjects=3, questions=60, choices=4, tokens=200, continuation=2, own_arrays=False
    )
    requests = make_requests(arguments)
    assert len(requests) == 240
    assert len({id(request.context_ids) for request in requests}) == 60
    assert {request.continuation_ids.size for request in requests} == {2}
    mean = sum(request.context_ids.size for request in requests) / 240
    assert 0.75 * 200 < mean < 1.25 * 200
