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

from mlx_eval.errors import InvalidOptionError, ModelError
from mlx_eval.models import huggingface
from mlx_eval.models.checkpoint import new_model
from mlx_eval.models.fit import sanitized, settle_head
from mlx_eval.models.layout import mlx_config, named_arrays, published_names
from mlx_eval.models.load import wrap_tokenizer
from mlx_eval.models.loaded import LoadedModel
from mlx_eval.models.precision import apply_precision, check_precision

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

NameMap = Mapping[str, str | None] | Callable[[str], str | None]
"""From a module's own names to Hugging Face's, `{i}` standing for a number; None leaves a tensor out."""

WRAPPER_PARTS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""What torch.compile, FSDP and activation checkpointing put into names."""
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
    published = published_names(settings["model_type"], list(own_names), named_arrays(new_model(settings)))
    own = {new: own_names[name] for name, new in published.items()}
    weights = {name: _to_array(own_name, tensors[own_name]) for name, own_name in own.items()}
    del tensors
    settle_head(settings, weights)
    model = new_model(settings)
    buffers = _buffer_names(model_or_state_dict)
    arrays = sanitized(model, settings, weights, own, buffers)
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
        raise ModelError(f"a PyTorch module or its state dict is wanted, this is a {type(source).__name__}")
    nested = [key for key, value in found.items() if isinstance(value, Mapping)]
    if nested:
        raise ModelError(
            f"this dictionary is a whole checkpoint, not a state dict: give the part that holds the tensors "
            f"(it has {', '.join(map(repr, nested[:3]))})"
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
            raise InvalidOptionError(f"name_map: {target!r} has {{{unknown.pop()}}}, which {source!r} lacks")

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
