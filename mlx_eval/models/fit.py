"""Whether tensors make up the model that a configuration describes, and what to do when they do not.

Knows Hugging Face's names, mlx-lm's `sanitize` and usual mistakes; knows neither PyTorch nor files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import mlx.core as mx
from mlx import nn

from mlx_eval.errors import ModelError, nearest_names
from mlx_eval.models.layout import EMBEDDING_NAMES, HEAD_NAMES, hugging_face_name, named_arrays

BUFFERS = re.compile(
    r"(^|\.)(\w*inv_freq|rotary\w*\.\w+|rope\.\w+|\w*freqs?_(cis|cos|sin)|freqs|(cos|sin)(_cached|_cache)?"
    r"|\w*mask|masked_bias|position_ids|_extra_state)$"
)
"""Tensors that modules keep and that are no weights, by name, for a state dict that does not say it."""
NUM_NAMED = 3
"""Tensors that an error message names."""
ADVICE_BY_NAME = {
    r"lora_|\.base_layer\.": "merge the adapter into the model before (merge_and_unload)",
    r"\.(absmax|quant_map|SCB|qweight|qzeros)\b": "load the PyTorch model without quantisation",
    r"qkv|in_proj|c_attn|query_key_value|gate_up|w13": (
        "split fused projections in the state dict before (q_proj, k_proj, v_proj; gate_proj, up_proj)"
    ),
}
"""What to do about tensors without a place, by what their names contain."""


def settle_head(config: dict[str, Any], weights: dict[str, mx.array]) -> None:
    """Make `tie_word_embeddings` say what the tensors say, and leave out a head that is the embedding.

    A mapping without the key means untied to transformers' Llama and tied to mlx-lm's: the tensors decide.
    """
    head = next((name for name in HEAD_NAMES if name in weights), None)
    embedding = next((name for name in weights if name.endswith(EMBEDDING_NAMES)), None)
    tied = config.get("tie_word_embeddings")
    has_own_head = config["model_type"] == "gpt_neox"
    if head is None:
        if tied is None:
            config["tie_word_embeddings"] = tied = True
        if tied and has_own_head and embedding is not None:
            # mlx-lm's module has no tied form: the head is a copy, which is what the configuration then says
            weights["embed_out.weight"] = weights[embedding]
            config["tie_word_embeddings"] = False
        return
    same = embedding is not None and _equal(weights[head], weights[embedding])
    if tied and not same:
        raise ModelError(
            f"the configuration says tie_word_embeddings, but {head} differs from the embedding: "
            "set tie_word_embeddings to False, or leave the head out"
        )
    if has_own_head:
        config["tie_word_embeddings"] = False
    elif tied or (tied is None and same):
        config["tie_word_embeddings"] = True
        del weights[head]
    else:
        config["tie_word_embeddings"] = False


def _equal(first: mx.array, second: mx.array) -> bool:
    return first.shape == second.shape and bool(mx.array_equal(first, second).item())


def sanitized(
    model: nn.Module,
    config: Mapping[str, Any],
    weights: Mapping[str, mx.array],
    own: Mapping[str, str],
    buffers: Collection[str],
) -> dict[str, mx.array]:
    """`weights` under mlx-lm's names, checked against the model's parameters.

    Args:
        own: The caller's name of each weight.
        buffers: The caller's names of tensors that are no parameters.
    """
    arrays = dict(weights)
    if hasattr(model, "sanitize"):
        try:
            arrays = model.sanitize(arrays)
        except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
            raise ModelError(
                f"these tensors do not make up a model of type {config['model_type']}: "
                f"{type(error).__name__} {error}; name_map gives them Hugging Face's names"
            ) from error
    expected = named_arrays(model)
    # sanitize passes most arrays on as they are: the object tells where a renamed one came from
    origin = {id(array): own[name] for name, array in weights.items() if name in own}
    unknown: dict[str, str] = {}
    for name in [name for name in arrays if name not in expected]:
        own_name = origin.get(id(arrays[name]), name)
        array = arrays.pop(name)
        is_weight = mx.issubdtype(array.dtype, mx.floating) and not BUFFERS.search(own_name)
        if is_weight and own_name not in buffers:
            unknown[own_name] = name
    missing = [hugging_face_name(config["model_type"], name) for name in expected if name not in arrays]
    if unknown or missing:
        raise ModelError(_misfit(config, list(unknown), missing))
    _check_shapes(arrays, expected, config)
    return arrays


def _check_shapes(
    arrays: Mapping[str, mx.array], expected: Mapping[str, mx.array], config: Mapping[str, Any]
) -> None:
    model_type = config["model_type"]
    wrong = [name for name, array in arrays.items() if array.shape != expected[name].shape]
    if wrong:
        first = [
            f"{hugging_face_name(model_type, name)} is {arrays[name].shape}, not {expected[name].shape}"
            for name in wrong
        ]
        turned = all(arrays[name].shape == expected[name].shape[::-1] for name in wrong)
        advice = "transpose them: a linear weight is [out, in]" if turned else "correct the configuration"
        raise ModelError(f"tensors do not have the shapes of the configuration: {_some(first)}; {advice}")
    integers = [name for name, array in arrays.items() if not mx.issubdtype(array.dtype, mx.floating)]
    if integers:
        raise ModelError(
            f"tensors hold whole numbers instead of floating-point weights: {_some(integers)}; "
            "load the PyTorch model without quantisation"
        )


def _misfit(config: Mapping[str, Any], unknown: list[str], missing: list[str]) -> str:
    """One line: which tensors have no place, which are missing, what to do."""
    parts = []
    if unknown:
        parts.append(f"no place in a model of type {config['model_type']} for {_some(unknown)}")
    if missing:
        parts.append(f"missing {_some(missing)}")
    return f"the tensors do not fit: {'; '.join(parts)}; {_advice(unknown, missing)}"


def _advice(unknown: list[str], missing: list[str]) -> str:
    text = " ".join(unknown)
    for pattern, advice in ADVICE_BY_NAME.items():
        if re.search(pattern, text, re.IGNORECASE):
            return advice
    if not unknown and all(name.endswith(HEAD_NAMES) for name in missing):
        return "give the model with its head, or set tie_word_embeddings to True in the configuration"
    if not missing:
        return "correct the configuration, or leave them out with None in name_map"
    if not unknown:
        return "correct the configuration (num_hidden_layers, biases) or name_map"
    near = nearest_names(unknown[0], missing, count=1) or missing[:1]
    return f"give name_map={{...}} with Hugging Face's names, such as {unknown[0]!r}: {near[0]!r}"


def _some(names: list[str]) -> str:
    more = len(names) - NUM_NAMED
    return ", ".join(names[:NUM_NAMED]) + (f" and {more} more" if more > 0 else "")
