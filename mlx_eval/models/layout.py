"""Where Hugging Face and mlx-lm write the same model differently: configuration keys, names, axes.

Knows model types and names; knows neither files nor PyTorch.

mlx-lm reads the configurations and tensor names that were published on the hub when each of its modules
was written. transformers 5 nests the rotary keys (`rope_parameters`) and keeps other names in memory
than on disk; without a translation mlx-lm falls back to its own defaults and no error is seen.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from mlx_eval.errors import ModelError

HEAD_NAMES = ("lm_head.weight", "embed_out.weight")
EMBEDDING_NAMES = ("embed_tokens.weight", "wte.weight", "embed_in.weight")

BASE_PREFIXES = {"gpt2": "transformer.", "gpt_neox": "gpt_neox."}
"""What transformers puts before the names below the head, where mlx-lm's module says otherwise."""

SAME_LAYOUT = frozenset(
    {
        "cohere",
        "cohere2",
        "ernie4_5",
        "gemma",
        "gemma2",
        "gemma3_text",
        "granite",
        "helium",
        "llama",
        "mistral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen3",
        "smollm3",
        "stablelm",
        "starcoder2",
    }
)
"""Model types whose parameters have transformers' names, axes and values in mlx-lm (tested one by one)."""

WRITABLE = SAME_LAYOUT | set(BASE_PREFIXES)
"""Model types that can be written so that transformers reads them."""

_GPT2_TRANSPOSED = re.compile(r"h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight")
_SILU = {"hidden_act": ("silu", "swish")}
TANH_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
_FIXED_IN_MLX: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": _SILU,
    "mistral": _SILU,
    "qwen2": {**_SILU, "use_sliding_window": (False,)},
    "qwen3": {**_SILU, "use_sliding_window": (False,), "attention_bias": (False,)},
    "gemma3_text": {"hidden_activation": TANH_GELU, "use_bidirectional_attention": (False,)},
    "gpt2": {
        "activation_function": TANH_GELU,
        "scale_attn_by_inverse_layer_idx": (False,),
        "scale_attn_weights": (True,),
    },
    # mlx-lm takes the tanh form for the exact GELU that transformers names "gelu"
    "gpt_neox": {"hidden_act": ("gelu", *TANH_GELU)},
}
"""Configuration values that mlx-lm's module does not read: it computes these whatever is written."""


def named_arrays(model: Any) -> dict[str, mx.array]:
    """The parameters of an mlx-lm model by their dotted names."""
    return dict(tree_flatten(model.parameters()))


def mlx_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a Hugging Face configuration with the keys that mlx-lm's modules read.

    Nothing is removed, so that transformers reads the result as it read the original.

    Raises:
        ModelError: the configuration asks for something that mlx-lm would leave out without a word.
    """
    config = dict(config)
    _flatten_rope(config)
    if config.get("model_type") == "gemma3_text":
        _name_sliding_pattern(config)
    if config.get("model_type") == "gpt2":
        # transformers 5 no longer writes the second name of the same number
        _set_unless_given(config, "n_ctx", config.get("n_positions"))
    for key, allowed in _FIXED_IN_MLX.get(str(config.get("model_type")), {}).items():
        value = config.get(key)
        if value is not None and value not in allowed:
            raise ModelError(
                f"mlx-lm cannot compute a {config['model_type']} with {key}={value!r}: "
                f"its module is written for {key}={allowed[0]!r}"
            )
    return config


def _flatten_rope(config: dict[str, Any]) -> None:
    """Write `rope_theta`, `rope_scaling` and their kin from transformers 5's `rope_parameters`."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return
    if isinstance(rope.get("full_attention"), Mapping):
        local = rope.get("sliding_attention") or {}
        if local.get("rope_theta") is not None:
            _set_unless_given(config, "rope_local_base_freq", local["rope_theta"])
        rope = rope["full_attention"]
    if rope.get("rope_theta") is not None:
        _set_unless_given(config, "rope_theta", rope["rope_theta"])
    if rope.get("partial_rotary_factor") is not None:
        _set_unless_given(config, "partial_rotary_factor", rope["partial_rotary_factor"])
    if rope.get("rope_type", "default") != "default":
        _set_unless_given(
            config, "rope_scaling", {key: value for key, value in rope.items() if key != "rope_theta"}
        )
    if config.get("model_type") == "gpt_neox":
        _set_unless_given(config, "rotary_emb_base", rope.get("rope_theta", 10000.0))
        _set_unless_given(config, "rotary_pct", rope.get("partial_rotary_factor", 0.25))


def _set_unless_given(config: dict[str, Any], key: str, value: Any) -> None:
    if config.get(key) is None:
        config[key] = value


def _name_sliding_pattern(config: dict[str, Any]) -> None:
    """Write `sliding_window_pattern` from a list of layer types: every n-th layer sees everything."""
    kinds = config.get("layer_types")
    if config.get("sliding_window_pattern") is not None or not kinds:
        return
    full = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
    pattern = full[0] + 1 if full else len(kinds) + 1
    if full != [index for index in range(len(kinds)) if (index + 1) % pattern == 0]:
        raise ModelError(
            "mlx-lm's gemma3_text wants full attention in every n-th layer; "
            f"this configuration has it in layers {', '.join(map(str, full))} of {len(kinds)}"
        )
    config["sliding_window_pattern"] = pattern


def published_names(model_type: str, names: Collection[str], parameters: Iterable[str]) -> dict[str, str]:
    """Each name with the one that mlx-lm's `sanitize` takes, which is the one on the hub.

    Args:
        model_type: Hugging Face's `model_type`.
        names: Hugging Face's names, with or without the base model's prefix (`model.`), or with one more
            prefix before it where the model is a part of another module. Those of mlx-lm's model stay.
        parameters: The names in mlx-lm's model.
    """
    parameters = set(parameters)
    if any(name in parameters for name in names if name not in HEAD_NAMES):
        return {name: name for name in names}
    base = BASE_PREFIXES.get(model_type) or _common_prefix(parameters)
    current = {name: name for name in names}
    while prefix := _outer_prefix(current.values(), base):
        current = {name: now.removeprefix(prefix) for name, now in current.items()}
    if base and not any(now.startswith(base) for now in current.values()):
        current = {
            name: now if now in HEAD_NAMES or now.startswith("lm_head.") else base + now
            for name, now in current.items()
        }
    if model_type == "gpt2":
        return {name: now.removeprefix(base) for name, now in current.items()}
    if model_type == "gpt_neox":
        return {name: now.replace("lm_head.", "embed_out.", 1) for name, now in current.items()}
    return current


def _common_prefix(parameters: Iterable[str]) -> str:
    """The first part, with its dot, that most of the names have."""
    counts = Counter(name.split(".", 1)[0] for name in parameters)
    return f"{counts.most_common(1)[0][0]}." if counts else ""


def _outer_prefix(names: Iterable[str], base: str) -> str:
    """A part that stands before every name, the base model's prefix following it somewhere, else ""."""
    first = {name.split(".", 1)[0] for name in names}
    if len(first) != 1:
        return ""
    prefix = f"{first.pop()}."
    return prefix if any(name.startswith(prefix + base) for name in names) else ""


def hugging_face_name(model_type: str, parameter: str) -> str:
    """The name on the hub of a parameter of mlx-lm's model."""
    if model_type == "gpt2":
        return parameter.removeprefix("model.")
    if model_type == "gpt_neox":
        name = parameter.removeprefix("model.")
        if name.startswith("embed_out."):
            return name
        return "gpt_neox." + re.sub(r"^h\.", "layers.", name)
    return parameter


def hugging_face_weights(model: nn.Module, model_type: str) -> dict[str, mx.array]:
    """The parameters of an mlx-lm model in transformers' names and axes.

    Args:
        model: not quantised.
        model_type: one of `WRITABLE`.
    """
    weights = {}
    for parameter, array in named_arrays(model).items():
        name = hugging_face_name(model_type, parameter)
        transposed = model_type == "gpt2" and _GPT2_TRANSPOSED.fullmatch(name) is not None
        weights[name] = array.T if transposed else array
    return weights
