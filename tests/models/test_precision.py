from __future__ import annotations

import contextlib
import io
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx import nn

from mlx_eval.errors import InvalidOptionError, ModelError, UnknownNameError
from mlx_eval.models import precision, runtime
from mlx_eval.models.layout import named_arrays
from mlx_eval.models.precision import (
    apply_precision,
    check_precision,
    is_quantized,
    keeps_quantized,
)

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 96,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
TOKENS = mx.array([[5, 17, 80, 2, 9, 33]])


def llama(dtype: mx.Dtype = mx.bfloat16, **changes: Any) -> Any:
    from mlx_lm.models.llama import Model, ModelArgs

    mx.random.seed(3)
    model = Model(ModelArgs.from_dict(CONFIG | changes))
    model.set_dtype(dtype)
    model.eval()
    mx.eval(model.parameters())
    return model


def quantized_llama(bits: int = 4, group_size: int = 32, dtype: mx.Dtype = mx.bfloat16) -> Any:
    model = llama(dtype)
    nn.quantize(model, group_size, bits)
    mx.eval(model.parameters())
    return model


def quantized_config(bits: int = 4, group_size: int = 32) -> dict[str, Any]:
    quantization = {"group_size": group_size, "bits": bits, "mode": "affine"}
    return {**CONFIG, "quantization": quantization, "quantization_config": dict(quantization)}


def dtypes(model: Any) -> set[str]:
    found = {str(array.dtype) for array in named_arrays(model).values()}
    return {name.removeprefix("mlx.core.") for name in found}


@pytest.fixture(params=["metal", "cpu"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    set_device(monkeypatch, request.param)
    return str(request.param)


def set_device(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(precision, "device", lambda: runtime.Device("chip", kind, 1, "os", "blas"))


# --- what is done when nothing is asked for --------------------------------------------------------


def test_default_for_plain_weights(kind: str) -> None:
    model = llama()
    config = apply_precision(model, CONFIG)
    expected = "bfloat16" if kind == "metal" else "float32"
    assert dtypes(model) == {expected}
    assert config == {**CONFIG, "torch_dtype": expected}
    assert CONFIG["torch_dtype"] == "bfloat16"  # the caller's own is not touched


def test_default_for_quantised_weights(kind: str) -> None:
    model = quantized_llama()
    config = apply_precision(model, quantized_config())
    if kind == "metal":
        assert is_quantized(model)
        assert dtypes(model) == {"uint32", "bfloat16"}
        assert config == quantized_config()
    else:
        assert not is_quantized(model)
        assert dtypes(model) == {"float32"}
        assert config == {**CONFIG, "torch_dtype": "float32"}


@pytest.mark.parametrize(
    ("asked", "kept_on_metal", "kept_on_cpu"),
    [(None, True, False), (False, True, True), (True, False, False)],
)
def test_keeps_quantized(asked: bool | None, kept_on_metal: bool, kept_on_cpu: bool, kind: str) -> None:
    assert keeps_quantized(asked) is (kept_on_metal if kind == "metal" else kept_on_cpu)


# --- type ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_parameter_gets_the_type(dtype: str, kind: str) -> None:
    model = llama()
    before = {name: np.array(array.astype(mx.float32)) for name, array in named_arrays(model).items()}
    config = apply_precision(model, {**CONFIG, "dtype": "bfloat16"}, dtype=dtype)
    assert dtypes(model) == {dtype}
    assert config["torch_dtype"] == config["dtype"] == dtype
    for name, array in named_arrays(model).items():
        expected = mx.array(before[name]).astype(precision.DTYPES[dtype])
        assert mx.array_equal(array, expected), name


def test_auto_keeps_the_type_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    set_device(monkeypatch, "cpu")
    model = llama(mx.float16)
    assert apply_precision(model, CONFIG, dtype="auto")["torch_dtype"] == "float16"
    assert dtypes(model) == {"float16"}


def test_kept_quantised_layers_compute_in_the_type(kind: str) -> None:
    model = quantized_llama()
    expected = quantized_llama()
    expected.apply(lambda array: array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)
    config = apply_precision(model, quantized_config(), dtype="float32", dequantize=False)
    assert dtypes(model) == {"uint32", "float32"}
    assert config == {**quantized_config(), "torch_dtype": "float32"}
    assert model(TOKENS).dtype == mx.float32
    assert mx.array_equal(model(TOKENS), expected(TOKENS))


def test_parameters_that_the_model_keeps_wide() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(32, 32)
            self.bias = mx.zeros(3)
            self.tables = [mx.ones(2), {"deep": mx.ones(2)}]
            self._hidden = mx.ones(2)

        @property
        def cast_predicate(self) -> Any:
            return lambda name: name != "bias"

    model = Model()
    apply_precision(model, {}, dtype="float16")
    assert model.bias.dtype == mx.float32
    assert model.head.weight.dtype == model.head.bias.dtype == mx.float16
    assert model.tables[0].dtype == model.tables[1]["deep"].dtype == mx.float16
    assert model._hidden.dtype == mx.float32


# --- quantised to plain ----------------------------------------------------------------------------


def unpacked(weight: mx.array, scales: mx.array, biases: mx.array, bits: int, group_size: int) -> np.ndarray:
    """Affine weights written out in float64, one bit field after the other."""
    words = np.array(weight)
    wide = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    fields = wide.reshape(*words.shape[:-1], -1, bits).astype(np.float64)
    values = (fields * 2.0 ** np.arange(bits)).sum(-1)
    scale, bias = (np.array(array.astype(mx.float32), np.float64) for array in (scales, biases))
    return values * scale.repeat(group_size, -1) + bias.repeat(group_size, -1)


@pytest.mark.parametrize("bits", precision.BITS)
def test_dequantised_weights_are_exact_in_float32(bits: int) -> None:
    model = quantized_llama(bits)
    before = dict(named_arrays(model))
    apply_precision(model, quantized_config(bits), dtype="float32", dequantize=True)
    after = named_arrays(model)
    assert after.keys() == named_arrays(llama()).keys()
    for name, array in after.items():
        if f"{name.removesuffix('.weight')}.scales" not in before:
            continue
        part = name.removesuffix("weight")
        expected = unpacked(before[name], before[part + "scales"], before[part + "biases"], bits, 32)
        # one float32 multiply-add; rounding the scale product to bfloat16 would be wrong by 4e-3 of it
        np.testing.assert_allclose(np.array(array), expected, rtol=0, atol=2e-7 * np.abs(expected).max())


def test_dequantised_type_follows_the_scales_with_auto() -> None:
    model = quantized_llama(dtype=mx.float16)
    config = apply_precision(model, quantized_config(), dtype="auto", dequantize=True)
    assert dtypes(model) == {"float16"}
    assert config == {**CONFIG, "torch_dtype": "float16"}


@pytest.mark.parametrize(
    ("mode", "bits", "group_size"), [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
)
def test_other_modes_of_quantisation(mode: str, bits: int, group_size: int) -> None:
    model = llama(mx.float32)
    nn.quantize(model, group_size, bits, mode=mode)
    expected = model(TOKENS)
    config = apply_precision(model, CONFIG, dtype="float32", dequantize=True)
    assert not is_quantized(model)
    assert "quantization" not in config
    # the same numbers, multiplied by another routine
    np.testing.assert_allclose(np.array(model(TOKENS)), np.array(expected), rtol=0, atol=1e-5)


def test_layer_kinds_of_mlx_lm() -> None:
    from mlx_lm.models.mla import MultiLinear
    from mlx_lm.models.switch_layers import SwitchLinear

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [
                nn.Linear(64, 32),
                nn.Embedding(10, 64),
                SwitchLinear(64, 32, 3),
                MultiLinear(64, 32, 3),
            ]

    model = Model()
    shapes = {name: array.shape for name, array in named_arrays(model).items()}
    kinds = [type(layer) for layer in model.layers]
    apply_precision(model, {}, quantize=8, dtype="float32")
    assert len(list(precision._quantized_layers(model))) == 4
    apply_precision(model, {}, dequantize=True, dtype="float32")
    assert [type(layer) for layer in model.layers] == kinds
    assert {name: array.shape for name, array in named_arrays(model).items()} == shapes


def test_unknown_quantised_layer_is_named() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bits, self.group_size, self.mode = 4, 32, "affine"
            self.weight, self.scales, self.biases = mx.quantize(mx.ones((4, 64)), 32, 4)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Packed()

    with pytest.raises(ModelError, match=r"inner is a Packed"):
        apply_precision(Model(), {}, dequantize=True)


# --- plain to quantised ----------------------------------------------------------------------------


@pytest.mark.parametrize("bits", precision.BITS)
def test_quantised_as_mlx_lm_does_it(bits: int, kind: str) -> None:
    from mlx_lm.utils import quantize_model

    model = llama()
    config = apply_precision(model, CONFIG, dtype="bfloat16", quantize=bits)
    with contextlib.redirect_stdout(io.StringIO()):
        peer, peer_config = quantize_model(llama(), CONFIG, 64, bits)
    assert config == peer_config
    ours, theirs = named_arrays(model), named_arrays(peer)
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[name], theirs[name]) for name in theirs)


def test_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    apply_precision(llama(), CONFIG, quantize=4)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_default_type_when_quantising(kind: str) -> None:
    model = llama()
    apply_precision(model, CONFIG, quantize=4)
    assert is_quantized(model)
    assert dtypes(model) == {"uint32", "bfloat16" if kind == "metal" else "float32"}


def test_rows_of_96_get_groups_of_32() -> None:
    changes = {"hidden_size": 96, "head_dim": 16, "num_attention_heads": 4}
    model = llama(**changes)
    config = apply_precision(model, CONFIG | changes, quantize=4)
    layer = model.model.layers[0]
    assert (layer.self_attn.q_proj.group_size, layer.mlp.down_proj.group_size) == (32, 64)
    assert config["quantization"]["group_size"] == 32  # what most layers have
    assert config["quantization"]["model.layers.0.mlp.down_proj"] == {
        "group_size": 64,
        "bits": 4,
        "mode": "affine",
    }
    assert config["quantization_config"] == config["quantization"]


def test_layers_that_fit_no_group_stay_plain() -> None:
    changes = {"intermediate_size": 100}
    model = llama(**changes)
    apply_precision(model, CONFIG | changes, quantize=4)
    assert isinstance(model.model.layers[0].mlp.down_proj, nn.Linear)
    assert isinstance(model.model.layers[0].mlp.up_proj, nn.QuantizedLinear)


def test_nothing_to_quantise() -> None:
    changes = {"hidden_size": 20, "intermediate_size": 36, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = llama(**changes)
    with pytest.raises(InvalidOptionError, match=r"--quantize 4 finds nothing to quantise"):
        apply_precision(model, CONFIG | changes, quantize=4)
    assert dtypes(model) == {"bfloat16"}


def test_the_models_own_choice_is_followed() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.skip = (nn.Linear(64, 32) for _ in range(3))

        @property
        def quant_predicate(self) -> Any:
            choices = {"gate": {"group_size": 32, "bits": 8}, "up": True, "skip": False}
            return lambda path, _: choices[path]

    model = Model()
    config = apply_precision(model, {}, quantize=4)
    assert (model.gate.bits, model.up.bits) == (8, 4)
    assert isinstance(model.skip, nn.Linear)
    kinds = [{"group_size": 32, "bits": 8, "mode": "affine"}, {"group_size": 64, "bits": 4, "mode": "affine"}]
    quantization = config["quantization"]
    # one of each: which is called usual is of no matter, the other has to be named
    usual = {key: quantization[key] for key in ("group_size", "bits", "mode")}
    assert [quantization.get("gate", usual), quantization.get("up", usual)] == kinds


def test_quantised_again_to_fewer_bits() -> None:
    model = quantized_llama(8)
    exact = quantized_llama(8)
    config = apply_precision(model, quantized_config(8), dtype="float32", quantize=4)
    apply_precision(exact, quantized_config(8), dtype="float32", dequantize=True)
    apply_precision(exact, CONFIG, dtype="float32", quantize=4)
    assert config["quantization"] == {"group_size": 64, "bits": 4, "mode": "affine"}
    assert all(
        mx.array_equal(array, named_arrays(exact)[name]) for name, array in named_arrays(model).items()
    )


def test_quantised_already_is_left_alone() -> None:
    model = quantized_llama(4)
    before = dict(named_arrays(model))
    config = apply_precision(model, quantized_config(4), dtype="auto", quantize=4)
    assert all(mx.array_equal(array, before[name]) for name, array in named_arrays(model).items())
    assert config == quantized_config(4)


def test_configuration_without_the_key_is_completed() -> None:
    config = apply_precision(quantized_llama(4), CONFIG, dtype="auto", dequantize=False)
    assert config == quantized_config(4)


@settings(max_examples=25, deadline=None)
@given(
    bits=st.sampled_from(precision.BITS),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    then=st.sampled_from(["keep", "dequantize", *precision.BITS]),
)
def test_configuration_describes_the_model(bits: int, dtype: str, then: Any) -> None:
    """What is written in the configuration is what mlx-lm needs to load the arrays again."""
    from mlx_lm.utils import quantize_model

    model = llama(mx.float32)
    config = apply_precision(model, CONFIG, dtype=dtype, quantize=bits)
    if then == "keep":
        config = apply_precision(model, config, dtype="auto", dequantize=False)
    elif then == "dequantize":
        config = apply_precision(model, config, dtype=dtype, dequantize=True)
    else:
        config = apply_precision(model, config, dtype=dtype, quantize=then)
    assert config["torch_dtype"] == dtype
    expected = llama(precision.DTYPES[dtype])
    if "quantization" in config:
        with contextlib.redirect_stdout(io.StringIO()):
            params = config["quantization"]
            expected, _ = quantize_model(expected, CONFIG, params["group_size"], params["bits"])
    shapes = {name: (array.shape, array.dtype) for name, array in named_arrays(expected).items()}
    assert {name: (array.shape, array.dtype) for name, array in named_arrays(model).items()} == shapes


# --- memory ----------------------------------------------------------------------------------------


class Tower(nn.Module):
    """24 equal layers of 1 MB in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(512, 512, bias=False) for _ in range(24)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"dtype": "bfloat16"}, {"dtype": "float32"}),
        ({"dtype": "float32"}, {"dtype": "float32", "quantize": 8}),
        ({"dtype": "float32", "quantize": 8}, {"dtype": "float32", "dequantize": True}),
    ],
    ids=["cast", "quantise", "de-quantise"],
)
def test_the_model_is_never_held_twice(first: dict[str, Any], second: dict[str, Any]) -> None:
    model = Tower()
    config = apply_precision(model, {}, **first)
    mx.clear_cache()
    start = mx.get_active_memory()
    mx.reset_peak_memory()
    apply_precision(model, config, **second)
    end = mx.get_active_memory()
    layer = 2**20
    # each step holds one layer in both forms, and MLX a temporary or two of its size
    assert mx.get_peak_memory() <= max(start, end) + 4 * layer
    assert min(start, end) > 6 * layer  # both whole models at once would be well over the bound


# --- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [0, 1, 7, 16, -4, True])
def test_widths_that_do_not_exist(bits: int) -> None:
    with pytest.raises(InvalidOptionError, match=r"2, 3, 4, 5, 6, 8 bits"):
        check_precision(dtype=None, quantize=bits, dequantize=None)


def test_contradiction() -> None:
    with pytest.raises(InvalidOptionError, match="contradict"):
        apply_precision(llama(), CONFIG, quantize=4, dequantize=True)


def test_unknown_type() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown dtype 'float23'; did you mean float32"):
        apply_precision(llama(), CONFIG, dtype="float23")
