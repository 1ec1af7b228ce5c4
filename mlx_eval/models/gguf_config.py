"""Metadata to a Hugging Face configuration, and GGUF's tensor names to Hugging Face's.

Knows the architectures; decodes no weight and no token. What a GGUF file does not say is what llama.cpp
assumes (its llama-model.cpp; the converters are in its conversion/ folder). To add an architecture, add
an entry to `ARCHITECTURES`, with a function for the keys that only it has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from mlx_eval.errors import ModelError
from mlx_eval.models.gguf_file import GGUFFile, Tensor
from mlx_eval.models.gguf_rope import rope_config

BLOCK_NAMES: Final[dict[str, str]] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QK_NORM_NAMES: Final[dict[str, str]] = {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
SANDWICH_NAMES: Final[dict[str, str]] = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
MODEL_NAMES: Final[Mapping[str, str]] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
SKIPPED = re.compile(r"rope_freqs\.weight|(blk\.\d+\.)?attn_rot_embd\.weight")
"""Tables of rotary frequencies: `rope_freqs` goes into the configuration, the other is computed."""
TENSOR_NAME = re.compile(r"(?:blk\.(?P<block>\d+)\.)?(?P<base>\w+)\.(?P<kind>weight|bias)")

GEMMA2_27B_LAYERS = 46
GEMMA3_27B_LAYERS = 62
GEMMA3_PATTERN = 6
"""Every sixth layer of Gemma 3 attends to everything, the others to a window."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one value of `general.architecture` becomes a Hugging Face model."""

    model_type: str
    class_name: str
    """Hugging Face's model class, for config.json."""
    block_names: Mapping[str, str] = field(default_factory=lambda: BLOCK_NAMES)
    """Names of a layer's tensors: GGUF's to Hugging Face's."""
    keys: Callable[[GGUFFile], dict[str, Any]] = lambda _: {}
    """Configuration entries that only this architecture has."""
    rotates_pairs: bool = False
    """Whether GGUF has the rows of q and k in the order in which llama.cpp rotates them: neighbours
    (2i, 2i + 1) where Hugging Face has halves (i, i + head_dim / 2)."""
    norm_offset: float = 0.0
    """What the converter added to norm weights: Gemma multiplies by 1 + weight, GGUF holds the sum."""
    theta: float | None = None
    """Rotary base where the file names none; None: it has to."""


def _gemma(_: GGUFFile) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(file: GGUFFile) -> dict[str, Any]:
    return {
        **_gemma(file),
        "query_pre_attn_scalar": _query_scalar(file, GEMMA2_27B_LAYERS),
        "attn_logit_softcapping": file.number("gemma2.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.number("gemma2.final_logit_softcapping", 30.0),
        "sliding_window": file.integer("gemma2.attention.sliding_window", 4096),
    }


def _gemma3(file: GGUFFile) -> dict[str, Any]:
    for key in ("gemma3.attn_logit_softcapping", "gemma3.final_logit_softcapping"):
        if file.number(key, 0.0):
            raise ModelError(f"{file.path}: {key} is set, but mlx-lm's Gemma 3 caps no logits")
    window = file.integer("gemma3.attention.sliding_window", 0)
    pattern = file.integer("gemma3.attention.sliding_window_pattern", GEMMA3_PATTERN) if window else 1
    num_layers = file.integer("gemma3.block_count")
    if num_layers < pattern:
        raise ModelError(
            f"{file.path}: {num_layers} layers are fewer than one round of {pattern} of Gemma 3's attention, "
            "which mlx-lm needs"
        )
    kinds = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(num_layers)]
    return {
        **_gemma(file),
        "query_pre_attn_scalar": _query_scalar(file, GEMMA3_27B_LAYERS),
        "rope_local_base_freq": file.number("gemma3.rope.freq_base_swa", 10_000.0),
        "sliding_window": window or file.integer("gemma3.context_length"),
        "sliding_window_pattern": pattern,
        "layer_types": kinds,
    }


def _query_scalar(file: GGUFFile, layers_of_27b: int) -> int:
    """Gemma divides attention scores by the root of this: the head's size, but for the 27B models."""
    if file.integer(f"{file.architecture}.block_count") == layers_of_27b:
        return _own(file, "embedding_length") // _own(file, "attention.head_count")
    return head_dim(file)


def _qwen2(file: GGUFFile) -> dict[str, Any]:
    usual = _own(file, "embedding_length") // _own(file, "attention.head_count")
    if head_dim(file) != usual:
        raise ModelError(
            f"{file.path}: attention heads of {head_dim(file)}, but mlx-lm's Qwen 2 has them of {usual}"
        )
    return {}


def _llama(file: GGUFFile) -> dict[str, Any]:
    if file.integer("llama.expert_count", 0):
        raise ModelError(f"{file.path} is a mixture of experts (llama.expert_count), which is not supported")
    return {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture("llama", "LlamaForCausalLM", keys=_llama, rotates_pairs=True, theta=10_000.0),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", keys=_qwen2),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", BLOCK_NAMES | QK_NORM_NAMES),
    "gemma": Architecture("gemma", "GemmaForCausalLM", keys=_gemma, norm_offset=1.0, theta=10_000.0),
    "gemma2": Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        BLOCK_NAMES | SANDWICH_NAMES,
        keys=_gemma2,
        norm_offset=1.0,
        theta=10_000.0,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        BLOCK_NAMES | QK_NORM_NAMES | SANDWICH_NAMES,
        keys=_gemma3,
        norm_offset=1.0,
    ),
}


def architecture_of(file: GGUFFile) -> Architecture:
    """The entry for the file's architecture.

    Raises:
        ModelError: there is none; the message lists those there are.
    """
    name = file.architecture
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{file.path} holds the architecture {name!r}, which is not supported; GGUF files of "
            f"{', '.join(sorted(ARCHITECTURES))} can be read"
        )
    return ARCHITECTURES[name]


def model_config(file: GGUFFile) -> dict[str, Any]:
    """Hugging Face's config.json for the model, without what only its tokenizer says.

    Raises:
        ModelError: the architecture is not known, or a key is missing or makes no sense.
    """
    architecture = architecture_of(file)
    heads = _own(file, "attention.head_count")
    _check_blocks(file)
    theta = file.number(f"{file.architecture}.rope.freq_base", architecture.theta)
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "hidden_size": _own(file, "embedding_length"),
        "intermediate_size": _own(file, "feed_forward_length"),
        "num_hidden_layers": _own(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.integer(f"{file.architecture}.attention.head_count_kv", heads),
        "head_dim": head_dim(file),
        "rms_norm_eps": file.number(f"{file.architecture}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": _own(file, "context_length"),
        "vocab_size": _vocab_size(file),
        "rope_theta": theta,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_act": "silu",
    }
    scaling = rope_config(file, theta, head_dim(file))
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config | architecture.keys(file)


def head_dim(file: GGUFFile) -> int:
    """The size of an attention head.

    Raises:
        ModelError: keys and values, or the rotated part, have another size.
    """
    heads = _own(file, "attention.head_count")
    if heads < 1:
        raise file.wrong_value(f"{file.architecture}.attention.head_count", "at least 1")
    size = _own(file, "attention.key_length", _own(file, "embedding_length") // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if _own(file, key, size) != size:
            raise file.wrong_value(f"{file.architecture}.{key}", f"{size}, the size of an attention head")
    return size


def hugging_face_name(file: GGUFFile, name: str) -> str | None:
    """Hugging Face's name for the tensor that GGUF calls `name`, None for one that is no weight.

    Raises:
        ModelError: the architecture has no such tensor.
    """
    if SKIPPED.fullmatch(name):
        return None
    match = TENSOR_NAME.fullmatch(name)
    if match is not None:
        block, base, kind = match["block"], match["base"], match["kind"]
        if block is None and base in MODEL_NAMES:
            return f"{MODEL_NAMES[base]}.{kind}"
        names = architecture_of(file).block_names
        if block is not None and base in names:
            return f"model.layers.{block}.{names[base]}.{kind}"
    raise ModelError(f"{file.path}: tensor {name} does not belong to the architecture {file.architecture!r}")


def row_order(file: GGUFFile, tensor: Tensor) -> np.ndarray[Any, Any] | None:
    """Where Hugging Face's rows of `tensor` are among its own, None where they are in place."""
    if not architecture_of(file).rotates_pairs:
        return None
    match = TENSOR_NAME.fullmatch(tensor.name)
    if match is None or match["base"] not in ("attn_q", "attn_k"):
        return None
    size = head_dim(file)
    rows = np.arange(tensor.shape[0])
    if rows.size % size:
        raise ModelError(f"{file.path}: tensor {tensor.name} has {rows.size} rows, no multiple of {size}")
    return rows.reshape(-1, size // 2, 2).swapaxes(1, 2).reshape(-1)


def _own(file: GGUFFile, key: str, default: int | None = None) -> int:
    """A whole number under one of the architecture's own keys."""
    return file.integer(f"{file.architecture}.{key}", default)


def _check_blocks(file: GGUFFile) -> None:
    matches = (TENSOR_NAME.fullmatch(name) for name in file.tensors)
    blocks = {int(match["block"]) for match in matches if match is not None and match["block"]}
    expected = _own(file, "block_count")
    if len(blocks) != expected:
        raise file.wrong_value(f"{file.architecture}.block_count", f"the {len(blocks)} of the tensors")


def _vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} has no tensor token_embd.weight: it holds no whole model")
    return embedding.shape[0]
