"""The number type and the quantisation that a model computes in. Knows no file and no model type.

One layer is changed and evaluated at a time, so that beside the model there is never more than one
layer twice, as long as nobody else holds the old arrays.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from mlx_eval.config import QUANTIZATION_GROUP_SIZE
from mlx_eval.errors import InvalidOptionError, ModelError, unknown_name
from mlx_eval.models.layout import named_arrays
from mlx_eval.models.runtime import device

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
DTYPE_NAMES = (*DTYPES, "auto")
"""Values of `--dtype`; `auto` is what the checkpoint has."""
BITS = (2, 3, 4, 5, 6, 8)
"""Values of `--quantize`: the widths of MLX's affine mode."""
SMALL_GROUP_SIZE = 32
"""Where a row is no multiple of the usual group size; MLX has no smaller one."""


def apply_precision(
    model: nn.Module,
    config: Mapping[str, Any],
    *,
    dtype: str | None = None,
    quantize: int | None = None,
    dequantize: bool | None = None,
) -> dict[str, Any]:
    """Bring `model` to the asked type and quantisation, in place and evaluated.

    Args:
        model: An mlx-lm model; its arrays may be lazy.
        config: Its Hugging Face configuration.
        dtype: `float32`, `float16`, `bfloat16` or `auto` (what the weights have). None: `auto` on Metal,
            float32 on the CPU device, whose half-precision products are 10 to 35 times slower, quantised ones more.
        quantize: Bits a weight, affine. None: leave as it is.
        dequantize: Whether quantised layers become plain ones. None: no on Metal, yes on the CPU device,
            unless `quantize` is given.

    Returns:
        A copy of `config` that says what the model now is.

    Raises:
        UnknownNameError: there is no such `dtype`.
        InvalidOptionError: `quantize` has no such width, contradicts `dequantize` or finds nothing to do.
        ModelError: a quantised layer of a kind that cannot be turned back.
    """
    check_precision(dtype=dtype, quantize=quantize, dequantize=dequantize)
    on_metal = device().is_metal
    if dtype is None:
        dtype = "auto" if on_metal else "float32"
    target = DTYPES.get(dtype)
    if dequantize is None:
        dequantize = quantize is None and not keeps_quantized(None)
    was_quantized = is_quantized(model)
    if quantize is not None:
        dequantize = was_quantized and not _is_quantized_to(model, quantize)
        if not was_quantized and not any(_quantizable(model, quantize)):
            raise InvalidOptionError(
                f"--quantize {quantize} finds nothing to quantise: no layer's rows are a multiple of "
                f"{SMALL_GROUP_SIZE} weights long; load the model without it"
            )
    if dequantize:
        _dequantize(model, target)
    if target is not None:
        _cast(model, target)
    if quantize is not None and (dequantize or not was_quantized):
        _quantize(model, quantize)
    mx.eval(named_arrays(model))
    return _describe(model, config, changed=dequantize or quantize is not None)


def check_precision(*, dtype: str | None, quantize: int | None, dequantize: bool | None) -> None:
    """Refuse values that no model can have, before any is loaded.

    Raises:
        UnknownNameError: there is no such `dtype`.
        InvalidOptionError: `quantize` has no such width or contradicts `dequantize`.
    """
    if dtype is not None and dtype not in DTYPE_NAMES:
        raise unknown_name("dtype", dtype, DTYPE_NAMES)
    if quantize is None:
        return
    if isinstance(quantize, bool) or quantize not in BITS:
        raise InvalidOptionError(f"--quantize {quantize}: MLX quantises to {', '.join(map(str, BITS))} bits")
    if dequantize:
        raise InvalidOptionError("--quantize and --dequantize contradict each other: give one of them")


def keeps_quantized(dequantize: bool | None) -> bool:
    """Whether quantised weights stay as they are, the device deciding where nothing is asked for."""
    return device().is_metal if dequantize is None else not dequantize


def is_quantized(model: nn.Module) -> bool:
    """Whether any layer holds quantised weights."""
    return any(True for _ in _quantized_layers(model))


def _quantized_layers(model: Any) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        if isinstance(getattr(module, "bits", None), int) and "scales" in module:
            yield path, module


def _is_quantized_to(model: Any, bits: int) -> bool:
    """Whether each layer that could be quantised is, to `bits` or to what its model asks for instead."""
    return not any(_quantizable(model, bits)) and any(
        layer.bits == bits for _, layer in _quantized_layers(model)
    )


# --- quantised to plain ---------------------------------------------------------------------------


def _dequantize(model: Any, target: mx.Dtype | None) -> None:
    for path in [path for path, _ in _quantized_layers(model)]:
        plain = _plain_layer(path, _module_at(model, path), target)
        mx.eval(plain.parameters())
        model.update_modules(tree_unflatten([(path, plain)]))


def _module_at(model: Any, path: str) -> Any:
    """The layer at a dotted path. Asked for one at a time: a list of all would keep the old arrays alive."""
    found: Any = model
    for part in path.split("."):
        found = found[int(part)] if isinstance(found, list | tuple) else found[part]
    return found


def _plain_layer(path: str, layer: Any, target: mx.Dtype | None) -> Any:
    """The layer with its weights written out, in `target` or the type of its scales.

    For float32 the scales are float32 before the product: half-precision scales would round each weight.
    """
    floating = mx.issubdtype(layer.scales.dtype, mx.floating)
    result = target or (layer.scales.dtype if floating else mx.bfloat16)
    wide = result == mx.float32 and floating
    biases = layer.get("biases")
    weight = mx.dequantize(
        layer.weight,
        layer.scales.astype(mx.float32) if wide else layer.scales,
        biases.astype(mx.float32) if wide and biases is not None else biases,
        layer.group_size,
        layer.bits,
        layer.mode,
        dtype=result,
        global_scale=_tensor_scale(layer),
    )
    plain = _empty_plain_layer(path, layer, weight)
    plain["weight"] = weight
    if "bias" in layer:
        plain["bias"] = layer["bias"]
    plain.train(layer.training)
    return plain


def _tensor_scale(layer: Any) -> mx.array | None:
    """The further scale of an nvfp4 tensor, where there is one."""
    scale: mx.array | None = layer.get("global_scale")
    if scale is not None and scale.size > 1:
        raise ModelError("a layer with one nvfp4 scale an expert cannot be de-quantised: keep it quantised")
    return scale


def _empty_plain_layer(path: str, layer: Any, weight: mx.array) -> Any:
    """A layer of the class that `layer` was quantised from; its random weights are never evaluated."""
    from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    *num_experts, num_out, num_in = weight.shape
    bias = "bias" in layer
    if isinstance(layer, nn.QuantizedLinear):
        return nn.Linear(num_in, num_out, bias=bias)
    if isinstance(layer, nn.QuantizedEmbedding):
        return nn.Embedding(num_out, num_in)
    if isinstance(layer, QuantizedSwitchLinear):
        return SwitchLinear(num_in, num_out, num_experts[0], bias=bias)
    if isinstance(layer, QuantizedMultiLinear):
        return MultiLinear(num_in, num_out, num_experts[0])
    raise ModelError(
        f"{path} is a {type(layer).__name__}, which cannot be de-quantised: keep the model quantised"
    )


# --- type -----------------------------------------------------------------------------------------


def _cast(model: Any, target: mx.Dtype) -> None:
    """Bring the floating-point parameters to `target`, but those that the model wants to keep."""
    wanted: Callable[[str], bool] = getattr(model, "cast_predicate", lambda _: True)
    for path, module in model.named_modules():
        for key in list(module):
            if key.startswith("_") or isinstance(module[key], nn.Module):
                continue
            name = f"{path}.{key}" if path else key
            if target != mx.float32 and not wanted(name):
                continue
            module[key] = tree_map(
                lambda value: _cast_array(value, target),
                module[key],
                is_leaf=lambda value: isinstance(value, nn.Module),
            )


def _cast_array(value: Any, target: mx.Dtype) -> Any:
    if not isinstance(value, mx.array) or not mx.issubdtype(value.dtype, mx.floating):
        return value
    value = value.astype(target)
    mx.eval(value)
    return value


# --- plain to quantised ---------------------------------------------------------------------------


def _quantizable(model: Any, bits: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Paths of the layers to quantise, with what `to_quantized` is to be told. Its default mode is affine."""
    choose = getattr(model, "quant_predicate", None)
    leaves: dict[str, Any] = dict(
        tree_flatten(model.leaf_modules(), is_leaf=lambda value: isinstance(value, nn.Module))
    )
    for path, layer in leaves.items():
        if not hasattr(layer, "to_quantized") or not mx.issubdtype(layer.weight.dtype, mx.floating):
            continue
        row = layer.weight.shape[-1]
        if row % SMALL_GROUP_SIZE:
            continue
        choice = choose(path, layer) if choose is not None else True
        if not choice:
            continue
        group_size = QUANTIZATION_GROUP_SIZE if row % QUANTIZATION_GROUP_SIZE == 0 else SMALL_GROUP_SIZE
        params = {"group_size": group_size, "bits": bits}
        if isinstance(choice, dict):
            params |= choice
        if row % params["group_size"] == 0:
            yield path, params


def _quantize(model: Any, bits: int) -> None:
    for path, params in list(_quantizable(model, bits)):
        quantized = _module_at(model, path).to_quantized(**params)
        mx.eval(quantized.parameters())
        model.update_modules(tree_unflatten([(path, quantized)]))


# --- configuration --------------------------------------------------------------------------------


def _describe(model: Any, config: Mapping[str, Any], *, changed: bool) -> dict[str, Any]:
    """`config` with the keys for type and quantisation as the model now has them."""
    described: dict[str, Any] = copy.deepcopy(dict(config))
    if changed or ("quantization" not in described and is_quantized(model)):
        for part in (described, described.get("text_config")):
            if isinstance(part, dict):
                part.pop("quantization", None)
                part.pop("quantization_config", None)
        if quantization := _quantization_config(model):
            described["quantization"] = quantization
            described["quantization_config"] = copy.deepcopy(quantization)
    dtype = _most_common_dtype(model)
    if dtype is not None:
        described["torch_dtype"] = dtype
        if "dtype" in described:
            described["dtype"] = dtype
    return described


def _quantization_config(model: Any) -> dict[str, Any]:
    """What most quantised layers have, then those that differ by their path, as mlx-lm writes it."""
    kinds = {path: (layer.group_size, layer.bits, layer.mode) for path, layer in _quantized_layers(model)}
    if not kinds:
        return {}
    usual = Counter(kinds.values()).most_common(1)[0][0]
    names = ("group_size", "bits", "mode")
    described: dict[str, Any] = dict(zip(names, usual, strict=True))
    for path, kind in kinds.items():
        if kind != usual:
            described[path] = dict(zip(names, kind, strict=True))
    return described


def _most_common_dtype(model: Any) -> str | None:
    sizes: Counter[str] = Counter()
    for array in named_arrays(model).values():
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[str(array.dtype).removeprefix("mlx.core.")] += array.size
    return sizes.most_common(1)[0][0] if sizes else None
