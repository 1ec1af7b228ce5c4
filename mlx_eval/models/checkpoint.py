"""A model on its way in: configuration, weights and tokenizer, and how they become an mlx-lm model.

Knows Hugging Face's names and mlx-lm's classes; knows neither files nor PyTorch nor GGUF.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn

from mlx_eval.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a model file holds, whatever its format was."""

    config: dict[str, Any]
    """Hugging Face's config.json. `config["quantization"]` is there when weights are quantised."""
    weights: dict[str, mx.array]
    """By Hugging Face's names. A quantised matrix is three arrays, `.weight`, `.scales` and `.biases`."""
    tokenizer: PreTrainedTokenizerBase
    generation_config: dict[str, Any] = field(default_factory=dict)
    """Hugging Face's generation_config.json."""


def new_model(config: Mapping[str, Any]) -> nn.Module:
    """The mlx-lm model that `config` describes, with random weights that nobody has evaluated.

    Raises:
        ModelError: mlx-lm does not know the architecture, or the configuration makes no sense to it.
    """
    from mlx_lm.utils import _get_classes

    settings = copy.deepcopy(dict(config))
    try:
        model_class, args_class = _get_classes(settings)
        model: nn.Module = model_class(args_class.from_dict(settings))
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError, ArithmeticError) as error:
        raise ModelError(
            f"mlx-lm cannot build a model of type {config.get('model_type')!r} from this configuration: {error}"
        ) from error
    return model


def build_model(config: Mapping[str, Any], weights: Mapping[str, mx.array]) -> nn.Module:
    """Make the mlx-lm model that `config` describes and give it `weights`.

    Quantised layers are those that have `.scales` among the weights. Nothing is evaluated yet.

    Raises:
        ModelError: mlx-lm does not know the architecture, or names and shapes do not fit.
    """
    from mlx_lm.utils import infer_quant_config

    model = new_model(config)
    arrays = dict(weights)
    if hasattr(model, "sanitize"):
        arrays = model.sanitize(arrays)
    if any(name.endswith(".scales") for name in arrays):

        def quantization_of(path: str, module: nn.Module) -> bool | dict[str, Any]:
            if not hasattr(module, "to_quantized") or f"{path}.scales" not in arrays:
                return False
            params: dict[str, Any] = infer_quant_config(path, module, arrays)
            return params

        nn.quantize(model, class_predicate=quantization_of)
    model.eval()
    try:
        model.load_weights(list(arrays.items()), strict=True)
    except ValueError as error:
        first = str(error).strip().splitlines()[0]
        raise ModelError(
            f"the weights do not fit a model of type {config.get('model_type')!r}: {first}"
        ) from error
    return model
