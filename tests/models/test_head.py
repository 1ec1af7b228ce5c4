"""The head on chosen rows: the same logits as a full call, by the model's own last steps."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_eval.models.head import RowHead
from tests.tiny import ScriptedModel, tiny_model

VOCAB = 64
ROUNDING = 1e-5
"""Of logits of a few units in float32: a product over fewer rows may add up in another order."""
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0},
    "gemma3_text": {"query_pre_attn_scalar": 8, "sliding_window": 4, "sliding_window_pattern": 2},
    "cohere": {"logit_scale": 0.25},
    "gpt2": {
        "n_ctx": 64,
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 64,
        "layer_norm_epsilon": 1e-5,
    },
}
TOKENS = mx.array([[5, 9, 3, 60, 7, 7], [1, 2, 3, 4, 5, 6], [8, 0, 0, 0, 0, 0]])
ROWS = [17, 0, 5, 6, 11, 11]


def make(name: str) -> nn.Module:
    return tiny_model(name.split(maxsplit=1)[0], VOCAB, **MODELS[name])


def picked(head: RowHead, model: nn.Module, rows: list[int] = ROWS) -> np.ndarray:
    blocks = list(head.logits(TOKENS, mx.array(rows), make_prompt_cache(model)))
    assert all(1 <= block.shape[0] <= head.max_rows for block in blocks)
    return np.array(mx.concatenate(blocks))


def full(model: nn.Module) -> np.ndarray:
    return np.array(model(TOKENS, cache=make_prompt_cache(model))).reshape(-1, VOCAB)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("max_rows", [1, 2, 100])
def test_chosen_rows_have_the_logits_of_a_full_call(name: str, max_rows: int) -> None:
    """Tied embeddings, soft-capping and logit scaling stay the model's own, in one block and in many."""
    model = make(name)
    head = RowHead(model, logits_bytes=max_rows * VOCAB * 4)
    assert head.is_split
    assert head.max_rows == max_rows
    np.testing.assert_allclose(picked(head, model), full(model)[ROWS], atol=ROUNDING, rtol=0)


def test_the_head_runs_on_the_chosen_rows_only() -> None:
    model = make("llama")
    head = RowHead(model, logits_bytes=100 * VOCAB * 4)
    shapes: list[tuple[int, ...]] = []

    class Watched(nn.Linear):
        def __call__(self, x: mx.array) -> mx.array:
            shapes.append(tuple(x.shape))
            return super().__call__(x)

    assert head._split is not None
    head._split.lm_head.__class__ = Watched  # the same module as the model's own
    picked(head, model)
    assert shapes == [(1, len(ROWS), 32)]


def test_the_cache_is_advanced_as_by_the_model_itself() -> None:
    model = make("llama")
    head = RowHead(model, logits_bytes=2 * VOCAB * 4)
    own, other = make_prompt_cache(model), make_prompt_cache(model)
    list(head.logits(TOKENS, mx.array(ROWS), own))
    model(TOKENS, cache=other)
    for first, second in zip(own, other, strict=True):
        assert first.offset == second.offset == TOKENS.shape[1]
        assert mx.array_equal(first.state[0], second.state[0])


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_left_as_it_was(name: str) -> None:
    model = make(name)
    before = full(model)
    classes = [(path, type(module)) for path, module in model.named_modules()]
    head = RowHead(model, logits_bytes=2 * VOCAB * 4)
    picked(head, model)
    assert [(path, type(module)) for path, module in model.named_modules()] == classes
    np.testing.assert_array_equal(full(model), before)


def test_classes_are_restored_when_the_model_fails() -> None:
    class Failing(type(make("llama"))):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            super().__call__(*args, **kwargs)
            raise RuntimeError("no")

    model = make("llama")
    model.__class__ = Failing
    classes = [type(module) for _, module in model.named_modules()]
    with pytest.raises(RuntimeError, match="no"):
        RowHead(model, 100)
    assert [type(module) for _, module in model.named_modules()] == classes


def test_a_model_without_hidden_states_is_not_split() -> None:
    model = ScriptedModel("abc")
    head = RowHead(model, 2 * 4 * 277)
    assert not head.is_split
    tokens = mx.array([[261, 97, 98], [3, 261, 97]])
    blocks = list(head.logits(tokens, mx.array([5, 0, 2]), make_prompt_cache(model)))
    expected = model(tokens, cache=make_prompt_cache(model)).reshape(6, -1)[mx.array([5, 0, 2])]
    assert mx.array_equal(mx.concatenate(blocks), expected)


def test_a_split_that_gives_other_logits_is_not_used() -> None:
    """What follows the last hidden states mixes positions here: picking before it changes the result."""

    class Mixing(type(make("llama"))):  # type: ignore[misc]
        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            logits = super().__call__(inputs, cache=cache)
            return logits + mx.cumsum(logits, axis=1)

    model = make("llama")
    model.__class__ = Mixing
    head = RowHead(model, logits_bytes=2 * VOCAB * 4)
    assert not head.is_split
    np.testing.assert_allclose(picked(head, model), full(model)[ROWS], atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_and_quantised_heads_are_split(dtype: mx.Dtype) -> None:
    model = make("llama tied")
    model.set_dtype(dtype)
    assert RowHead(model, 100).is_split
    nn.quantize(model, group_size=32, bits=4)
    assert RowHead(model, 100).is_split


def test_a_hidden_size_equal_to_the_vocabulary() -> None:
    """Logits and hidden states cannot be told apart by their shape: slower, never wrong."""
    model = tiny_model("llama", 32)
    head = RowHead(model, logits_bytes=2 * 32 * 4)
    tokens = mx.array([[5, 9, 3], [1, 2, 3]])
    blocks = list(head.logits(tokens, mx.array([5, 0]), make_prompt_cache(model)))
    expected = model(tokens, cache=make_prompt_cache(model)).reshape(6, -1)[mx.array([5, 0])]
    np.testing.assert_allclose(np.array(mx.concatenate(blocks)), np.array(expected), atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_are_what_the_last_steps_make_logits_of(name: str) -> None:
    model = make(name)
    head = RowHead(model, logits_bytes=100 * VOCAB * 4)
    own, other = make_prompt_cache(model), make_prompt_cache(model)
    hidden = head.hidden(TOKENS, mx.array(ROWS), own)
    assert hidden.shape == (len(ROWS), 32)
    np.testing.assert_allclose(np.array(head.logits_of(hidden)), full(model)[ROWS], atol=ROUNDING, rtol=0)
    model(TOKENS, cache=other)
    for first, second in zip(own, other, strict=True):
        assert mx.array_equal(first.state[0], second.state[0])
