"""Tiny random transformers models, and their logits, for the tests of conversion and of writing."""

from __future__ import annotations

from typing import Any

import numpy as np

VOCAB = 300
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
HEADS_OF_8 = {**SHAPE, "head_dim": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**SHAPE, "rope_theta": 5000.0, "tie_word_embeddings": False},
    "llama-tied": {**SHAPE, "tie_word_embeddings": True},
    "llama-biased": {**SHAPE, "attention_bias": True, "mlp_bias": True},
    "llama-scaled": {
        **SHAPE,
        "rope_theta": 300.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral": {**HEADS_OF_8, "rope_theta": 700.0},
    "qwen2": {**SHAPE, "rope_theta": 2000.0, "tie_word_embeddings": True},
    "qwen3": {**HEADS_OF_8, "rope_theta": 3000.0},
    "gemma": HEADS_OF_8,
    "gemma2": {**HEADS_OF_8, "query_pre_attn_scalar": 8},
    "gemma3_text": {
        **HEADS_OF_8,
        # mlx-lm rounds the embedding's scale, the root of this, to bfloat16 (transformers does not): a square
        "hidden_size": 64,
        "query_pre_attn_scalar": 16,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 600.0},
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 4000.0},
        },
    },
    "gpt2": {
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 128,
        "bos_token_id": 256,
        "eos_token_id": 257,
    },
    "gpt_neox": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "max_position_embeddings": 128,
        "rotary_pct": 0.5,
        "rotary_emb_base": 3000.0,
        # the form that mlx-lm computes; transformers' default "gelu" is the exact one
        "hidden_act": "gelu_pytorch_tanh",
        "bos_token_id": 256,
        "eos_token_id": 257,
    },
}
TOKENS = np.random.default_rng(7).integers(0, 256, size=(2, 20))
"""Long enough that a sliding window of six and a wrong rotary base show."""


def tiny(name: str, **changes: Any) -> Any:
    """A random transformers model of `CONFIGS[name]`, seeded, in evaluation mode."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name.split("-", maxsplit=1)[0], **{**CONFIGS[name], **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    if name == "gemma":
        for layer in model.model.layers:
            # mlx-lm computes the exact form, transformers the tanh form whatever the configuration says
            layer.mlp.act_fn = torch.nn.GELU()
    with torch.no_grad():
        for parameter in model.parameters():
            # norms of ones and biases of zeros would hide an exchange; a usual initialisation is so small
            # that attention is flat, whatever the rotary embedding does
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def torch_logits(model: Any) -> np.ndarray:
    """Float32 logits of `TOKENS`, [2, 20, V]."""
    import torch

    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor(TOKENS)).logits.float().numpy()
    return logits


def mlx_logits(model: Any) -> np.ndarray:
    """Float32 logits of `TOKENS`, [2, 20, V], over fresh caches."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    logits = model(mx.array(TOKENS), cache=make_prompt_cache(model))
    return np.array(logits.astype(mx.float32))
