"""A PyTorch decoder in memory to an mlx-lm model. Never imports PyTorch: a module is what has
`state_dict()`, a tensor what has `detach()`.

    own names ──unwrap──> ──name_map──> Hugging Face's names ──layout──> hub's names ──sanitize──> mlx-lm's
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_eval.errors import InvalidOptionError, ModelError, nearest_names
from mlx_eval.models import huggingface
from mlx_eval.models.layout import (
    EMBEDDING_NAMES,
    HEAD_NAMES,
    hugging_face_name,
    mlx_config,
    published_names,
)
from mlx_eval.models.load import wrap_tokenizer
from mlx_eval.models.loaded import LoadedModel
from mlx_eval.models.precision import apply_precision, check_precision

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

NameMap = Mapping[str, str | None] | Callable[[str], str | None]
"""From a module's own names to Hugging Face's, `{i}` standing for a number; None leaves a tensor out."""

WRAPPER_PARTS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""What torch.compile, FSDP and activation checkpointing put into names."""
BUFFERS = re.compile(
    r"(^|\.)(\w*inv_freq|rotary\w*\.\w+|rope\.\w+|\w*freqs?_(cis|cos|sin)|freqs|(cos|sin)(_cached|_cache)?"
    r"|\w*mask|masked_bias|position_ids|_extra_state)$"
)
"""Tensors that modules keep and that are no weights, by name, for a state dict that does not say it."""
NUM_NAMED = 3
"""Tensors that an error message names."""
SCALARS = (str, int, float, bool, list, tuple, dict)


def convert_torch(
    model_or_state_dict: Any,
    config: Any,
    *,
    name_map: NameMap | None = None,
    tokenizer: Any = None,
    dtype: str | None = None,
) -> LoadedModel:
    """Copy a PyTorch decoder in memory into an mlx-lm model.

    Args:
        model_or_state_dict: An `nn.Module`, on any device, or its state dict. A linear weight is
            [out, in]. The rotary embedding turns halves of a head against each other, as Hugging Face's
            does; for one that turns neighbours, as Meta's first Llama did, set `rope_traditional` to True in
            `config`.
        config: Hugging Face's configuration: a mapping, a transformers configuration, or a dataclass or
            namespace with the same names (`hidden_size`, `num_hidden_layers`, ...). Without `model_type`
            the model is a `llama`.
        name_map: Own names to Hugging Face's, such as
            `{"blocks.{i}.attn.wq.weight": "model.layers.{i}.self_attn.q_proj.weight"}`, or a function of a
            name. A name that the mapping does not hold is taken for Hugging Face's; None leaves a tensor out.
            Prefixes of DataParallel (`module.`) and torch.compile (`_orig_mod.`) are taken off before.
        tokenizer: A transformers tokenizer or a directory that holds one. None: ids are bytes.
        dtype: As `apply_precision` takes it; None is float32 on the CPU device, the tensors' own on Metal.

    Returns:
        The model, evaluated, its `source` being `torch`. The tensors are copied: later changes to the
        PyTorch model do not reach it.

    Raises:
        ModelError: the tensors do not make up the model that `config` describes, or there is no tokenizer.
        InvalidOptionError: `name_map` has a target with a placeholder that its source lacks.
        UnknownNameError: there is no such `dtype`.
    """
    check_precision(dtype=dtype, quantize=None, dequantize=None)
    settings = mlx_config(_configuration(config))
    tensors = _state_dict(model_or_state_dict)
    own_names = _hugging_face_names(tensors, name_map)
    published = published_names(
        settings["model_type"], list(own_names), _parameters(_new_model(settings))
    )
    own = {new: own_names[name] for name, new in published.items()}
    weights = {name: _to_array(own_name, tensors[own_name]) for name, own_name in own.items()}
    del tensors
    _settle_head(settings, weights)
    model = _new_model(settings)
    buffers = _buffer_names(model_or_state_dict)
    arrays = _sanitized(model, settings, weights, own, buffers)
    model.load_weights(list(arrays.items()), strict=True)
    model.eval()
    del weights, arrays
    settings = apply_precision(model, settings, dtype=dtype)
    return LoadedModel(model, _tokenizer(tokenizer, settings), settings, "torch")


# --- configuration and tokenizer ------------------------------------------------------------------


def _configuration(config: Any) -> dict[str, Any]:
    """`config` as Hugging Face's dictionary; what has no place in a JSON file is left out."""
    if isinstance(config, Mapping):
        found = dict(config)
    elif hasattr(config, "to_dict"):
        found = dict(config.to_dict())
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        found = dataclasses.asdict(config)
    elif hasattr(config, "__dict__") and not isinstance(config, type):
        found = dict(vars(config))
    else:
        raise ModelError(
            f"config is a {type(config).__name__}; give a Hugging Face configuration, a dictionary "
            "or an object with the same names (hidden_size, num_hidden_layers, ...)"
        )
    found = {key: value for key, value in found.items() if value is None or isinstance(value, SCALARS)}
    found["model_type"] = found.get("model_type") or "llama"
    return found


def _new_model(config: dict[str, Any]) -> nn.Module:
    """An mlx-lm model with random weights that nobody has evaluated."""
    from mlx_lm.utils import _get_classes

    try:
        model_class, args_class = _get_classes(config)
        model: nn.Module = model_class(args_class.from_dict(config))
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError, ZeroDivisionError) as error:
        raise ModelError(
            f"mlx-lm cannot build a model of type {config['model_type']!r} from this configuration: {error}"
        ) from error
    return model


def _parameters(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def _tokenizer(tokenizer: Any, config: Mapping[str, Any]) -> TokenizerWrapper:
    if tokenizer is None:
        from mlx_eval.models.bytes import byte_tokenizer_for

        tokenizer = byte_tokenizer_for(config)
    elif isinstance(tokenizer, str | Path):
        directory = Path(tokenizer).expanduser()
        if not directory.is_dir():
            raise ModelError(f"tokenizer={str(tokenizer)!r}: there is no such directory")
        return huggingface.read_tokenizer(directory, dict(config), trust_remote_code=False)
    return wrap_tokenizer(tokenizer, config.get("eos_token_id"))


# --- tensors --------------------------------------------------------------------------------------


def _state_dict(source: Any) -> dict[str, Any]:
    """The tensors of a module or state dict by their own names."""
    found = source.state_dict() if hasattr(source, "state_dict") else source
    if not isinstance(found, Mapping):
        raise ModelError(
            f"a PyTorch module or its state dict is wanted, this is a {type(source).__name__}"
        )
    nested = [key for key, value in found.items() if isinstance(value, Mapping)]
    if nested:
        raise ModelError(
            f"this dictionary is a whole checkpoint, not a state dict: give the part that holds the tensors "
            f"(it has {', '.join(map(repr, nested[:NUM_NAMED]))})"
        )
    tensors = {str(name): value for name, value in found.items() if hasattr(value, "detach")}
    if not tensors:
        raise ModelError("the PyTorch model holds no tensors")
    return tensors


def _buffer_names(source: Any) -> frozenset[str]:
    """What a module itself declares to be no parameter; nothing for a state dict."""
    if not hasattr(source, "named_buffers"):
        return frozenset()
    return frozenset(name for name, _ in source.named_buffers())


def _to_array(name: str, tensor: Any) -> mx.array:
    """Copy a tensor, bit by bit; float64, which Metal lacks, becomes float32."""
    if getattr(tensor, "is_meta", False):
        raise ModelError(f"{name} is on PyTorch's meta device and has no values: load the weights first")
    try:
        array = mx.array(tensor.detach().cpu())
    except (ValueError, TypeError, RuntimeError, BufferError) as error:
        raise ModelError(
            f"{name} is a {getattr(tensor, 'dtype', type(tensor).__name__)} tensor that MLX cannot take; "
            "convert it to float32, float16 or bfloat16 before"
        ) from error
    return array


# --- names ----------------------------------------------------------------------------------------


def _hugging_face_names(names: Iterable[str], name_map: NameMap | None) -> dict[str, str]:
    """Hugging Face's name of each tensor that is to be used, with its own name."""
    names = list(names)
    lookup = name_map if callable(name_map) else _lookup(name_map or {})
    in_module = all(name.startswith("module.") for name in names)
    renamed: dict[str, str] = {}
    for name in names:
        inner = ".".join(part for part in name.split(".") if part not in WRAPPER_PARTS)
        if in_module:
            inner = inner.removeprefix("module.")
        target = lookup(inner)
        if target is None:
            continue
        if target in renamed:
            raise ModelError(f"{renamed[target]} and {name} would both become {target}: correct name_map")
        renamed[target] = name
    return renamed


def _lookup(name_map: Mapping[str, str | None]) -> Callable[[str], str | None]:
    """A function that renames by a mapping with placeholders; unknown names stay."""
    patterns = [(_pattern(source), source, target) for source, target in name_map.items()]
    for pattern, source, target in patterns:
        unknown = set(re.findall(r"\{(\w+)\}", target or "")) - set(pattern.groupindex)
        if unknown:
            raise InvalidOptionError(
                f"name_map: {target!r} has {{{unknown.pop()}}}, which {source!r} lacks"
            )

    def rename(name: str) -> str | None:
        if name in name_map:
            return name_map[name]
        for pattern, _, target in patterns:
            if found := pattern.fullmatch(name):
                return None if target is None else target.format(**found.groupdict())
        return name

    return rename


def _pattern(source: str) -> re.Pattern[str]:
    """`blocks.{i}.wq` as a regular expression; a placeholder is a number, the same one when repeated."""
    parts = re.split(r"\{(\w+)\}", source)
    text = ""
    for index, part in enumerate(parts):
        if index % 2 == 0:
            text += re.escape(part)
        elif not part.isidentifier():
            raise InvalidOptionError(f"name_map: {{{part}}} in {source!r} is no name, write {{i}}")
        else:
            text += f"(?P={part})" if f"(?P<{part}>" in text else rf"(?P<{part}>\d+)"
    return re.compile(text)


# --- tied embeddings ------------------------------------------------------------------------------


def _settle_head(config: dict[str, Any], weights: dict[str, mx.array]) -> None:
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


# --- what fits and what does not ------------------------------------------------------------------


def _sanitized(
    model: nn.Module,
    config: Mapping[str, Any],
    weights: Mapping[str, mx.array],
    own: Mapping[str, str],
    buffers: frozenset[str],
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
    expected = _parameters(model)
    # sanitize passes most arrays on as they are: the object tells where a renamed one came from
    origin = {id(array): own[name] for name, array in weights.items() if name in own}
    unknown: dict[str, str] = {}
    for name in [name for name in arrays if name not in expected]:
        own_name = origin.get(id(arrays[name]), name)
        array = arrays.pop(name)
        is_weight = mx.issubdtype(array.dtype, mx.floating) and not BUFFERS.search(own_name)
        if is_weight and own_name not in buffers:
            unknown[own_name] = name
    missing = [
        hugging_face_name(config["model_type"], name) for name in expected if name not in arrays
    ]
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
    if re.search(r"lora_|\.base_layer\.", text):
        return "merge the adapter into the model before (merge_and_unload)"
    if re.search(r"\.(absmax|quant_map|SCB|qweight|qzeros)\b", text):
        return "load the PyTorch model without quantisation"
    if re.search(r"qkv|in_proj|c_attn|query_key_value|gate_up|w13", text, re.IGNORECASE):
        return "split fused projections before (q_proj, k_proj, v_proj; gate_proj, up_proj) in a state dict"
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
