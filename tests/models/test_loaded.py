from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from mlx_eval import config
from mlx_eval.models.loaded import LoadedModel, context_window
from tests.tiny import bpe_tokenizer, loaded, tiny_model


def own(model: nn.Module) -> LoadedModel:
    return loaded(model, bpe_tokenizer())


@pytest.mark.parametrize(
    ("settings", "tokenizer_length", "window"),
    [
        ({"max_position_embeddings": 512}, None, 512),
        ({"n_positions": 100, "max_position_embeddings": 512}, None, 100),
        ({"n_ctx": 77}, 512, 77),
        ({"max_position_embeddings": None, "n_ctx": 77}, None, 77),
        ({"text_config": {"max_position_embeddings": 300}, "max_position_embeddings": 512}, None, 300),
        ({}, 900, 900),
        ({}, 10**30, config.MAX_LENGTH),
        ({}, None, config.MAX_LENGTH),
    ],
)
def test_the_window_is_found_as_lm_eval_finds_it(
    settings: dict[str, Any], tokenizer_length: int | None, window: int
) -> None:
    assert context_window(settings, SimpleNamespace(model_max_length=tokenizer_length)) == window


def test_what_is_said_of_a_model() -> None:
    model = own(tiny_model())
    assert model.max_length == 64
    assert model.dtype == "float32"
    assert model.quantization is None
    expected = 2 * 330 * 32 + 32 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32 + 2 * 32)
    assert model.num_parameters == expected
    assert model.num_bytes == 4 * expected


def test_a_quantised_model() -> None:
    model = tiny_model()
    plain = own(model).num_parameters
    nn.quantize(model, group_size=32, bits=4)
    assert own(model).quantization == "4-bit, groups of 32"
    assert own(model).num_parameters == plain


def test_equal_weights_have_equal_fingerprints_and_any_change_shows() -> None:
    base = own(tiny_model()).fingerprint()
    assert own(tiny_model()).fingerprint() == base
    assert own(tiny_model(seed=1)).fingerprint() != base

    bit = tiny_model()
    weight = bit.model.norm.weight
    bit.model.norm.weight = mx.where(mx.arange(32) == 7, mx.array(1.0000001) * weight, weight)
    assert own(bit).fingerprint() != base

    exchanged = tiny_model()
    rows = exchanged.model.embed_tokens.weight
    exchanged.model.embed_tokens.weight = rows[mx.array([1, 0, *range(2, 330)])]
    assert own(exchanged).fingerprint() != base

    swapped = tiny_model()
    layer = swapped.model.layers[0].self_attn
    layer.k_proj.weight, layer.v_proj.weight = layer.v_proj.weight, layer.k_proj.weight
    assert own(swapped).fingerprint() != base

    half = tiny_model()
    half.set_dtype(mx.bfloat16)
    assert own(half).fingerprint() != base


def test_a_negative_zero_and_a_transposed_view_are_seen() -> None:
    base = own(tiny_model())
    view = tiny_model()
    projection = view.model.layers[0].self_attn.q_proj
    projection.weight = mx.contiguous(projection.weight.T).T  # the same numbers in another order in memory
    assert own(view).fingerprint() == base.fingerprint()
    zero = tiny_model()
    zero.model.norm.weight = mx.zeros((32,))
    negative = tiny_model()
    negative.model.norm.weight = -mx.zeros((32,))
    assert own(zero).fingerprint() != own(negative).fingerprint()
