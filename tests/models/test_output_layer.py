"""The output layer of a model is found, or it is said why the model has none that would do."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_eval_kernels import AffineHead, DenseHead, Head, LogProb

from mlx_eval.errors import DeviceError, InvalidOptionError
from mlx_eval.models import output_layer as module
from mlx_eval.models.head import RowHead
from mlx_eval.models.output_layer import output_layer
from tests.models.test_head import MODELS
from tests.tiny import ScriptedModel, tiny_model

VOCAB = 96
PLAIN = {name: changes for name, changes in MODELS.items() if name not in ("gemma2", "cohere")}


def make(name: str, dtype: mx.Dtype = mx.float32, bits: int = 0) -> Any:
    model = tiny_model(name.split(maxsplit=1)[0], VOCAB, **MODELS[name])
    model.set_dtype(dtype)
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
    return model


def found(model: Any) -> Head:
    return output_layer(model, RowHead(model, 10**6))


def layer_of(model: Any) -> Any:
    """What mlx-lm's models call it."""
    if "lm_head" in model:
        return model.lm_head
    return model.model.wte if "wte" in model.model else model.model.embed_tokens


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [0, 4, 8])
@pytest.mark.parametrize("name", PLAIN)
def test_tied_or_not_quantised_or_not_the_layer_is_the_models_own(
    name: str, bits: int, dtype: mx.Dtype
) -> None:
    model = make(name, dtype, bits)
    head, layer = found(model), layer_of(model)
    assert head.weight is layer.weight
    if bits:
        assert isinstance(head, AffineHead)
        assert (head.bits, head.group_size) == (bits, 32)
        assert head.scales is layer.scales
        assert head.biases is layer.biases
    else:
        assert isinstance(head, DenseHead)


def test_a_model_whose_head_alone_has_other_bits() -> None:
    model = make("llama", mx.float16, bits=4)
    model.lm_head = nn.Linear(32, VOCAB, bias=False).to_quantized(group_size=32, bits=6)
    head = found(model)
    assert isinstance(head, AffineHead)
    assert head.bits == 6


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gemma2", "cohere"])
def test_models_that_cap_or_scale_their_logits_are_refused(name: str, dtype: mx.Dtype) -> None:
    with pytest.raises(InvalidOptionError, match=r"scales, caps or biases .* run without low_memory_head"):
        found(make(name, dtype))


class Scaled(nn.Linear):
    def __call__(self, x: mx.array) -> mx.array:
        return 1.001 * super().__call__(x)


def with_bias(model: Any) -> None:
    model.lm_head.bias = mx.ones(VOCAB)


def with_another_class(model: Any) -> None:
    model.lm_head.__class__ = Scaled


def with_another_quantisation(model: Any) -> None:
    nn.quantize(model, group_size=32, bits=4, mode="mxfp4", class_predicate=lambda path, _: path == "lm_head")


@pytest.mark.parametrize("change", [with_bias, with_another_class, with_another_quantisation])
def test_layers_that_do_more_or_are_not_known_are_refused(change: Any) -> None:
    model = make("llama")
    change(model)
    with pytest.raises(InvalidOptionError, match=r"a layer of another kind: run without low_memory_head"):
        found(model)


def test_a_model_without_hidden_states_is_refused() -> None:
    with pytest.raises(
        InvalidOptionError, match=r"hidden states .* not found.*: run without low_memory_head"
    ):
        found(ScriptedModel("abc"))


def test_a_damaged_model_is_not_called_one_with_capped_logits() -> None:
    model = make("llama")
    model.model.norm.weight = mx.full((32,), math.nan)
    with pytest.raises(InvalidOptionError, match="the model computes NaN"):
        found(model)


@pytest.mark.parametrize("wrong", [1.0, math.nan])
def test_a_kernel_that_computes_something_else_is_noticed(
    wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = module.linear_logprob

    def off(*arguments: Any, backend: Any = None) -> LogProb:
        result = right(*arguments, backend=backend)
        if backend == "reference":
            return result
        return result._replace(logprob=result.logprob + wrong * (mx.arange(result.logprob.shape[1]) == 3))

    monkeypatch.setattr(module, "linear_logprob", off)
    with pytest.raises(DeviceError, match="please report it"):
        found(make("llama"))
