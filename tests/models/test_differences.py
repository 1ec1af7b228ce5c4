"""Each known difference exists as long as it is listed, and is what makes the numbers differ."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_eval.models.differences import DIFFERENCES, known_differences
from mlx_eval.models.torch import convert_torch

ROUNDING = 2e-5
"""Six layers of float32 in two libraries: measured at 5e-6, and the differences at 100 times that."""
SMALL = {
    "vocab_size": 300,
    "hidden_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CASES = {
    "gemma": ("GemmaConfig", {"head_dim": 24, "num_key_value_heads": 2, "intermediate_size": 192}, None),
    "gemma3_text": (
        "Gemma3TextConfig",
        {"head_dim": 24, "num_key_value_heads": 2, "intermediate_size": 192, "query_pre_attn_scalar": 24},
        {"hidden_size": 64, "head_dim": 16, "query_pre_attn_scalar": 16},
    ),
    "gpt_neox": ("GPTNeoXConfig", {"intermediate_size": 384}, {"hidden_act": "gelu_new"}),
    "starcoder2": (
        "Starcoder2Config",
        {"num_key_value_heads": 2, "intermediate_size": 192},
        {"hidden_act": "gelu"},
    ),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 24,
            "num_key_value_heads": 2,
            "intermediate_size": 192,
            "query_pre_attn_scalar": 24,
            "sliding_window": 16,
        },
        {"sliding_window": 8192, "max_position_embeddings": 8192},
    ),
    "mistral": (
        "MistralConfig",
        {"num_key_value_heads": 2, "intermediate_size": 192, "sliding_window": 16},
        {"sliding_window": None},
    ),
}


def worst_difference(config_class: str, settings: dict[str, Any]) -> tuple[float, list[str]]:
    """Largest difference of log-probabilities of a random model in nats, and what is listed for it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, config_class)(**{**SMALL, **settings})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = np.random.default_rng(0).integers(3, SMALL["vocab_size"], (1, 40))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)  # sharper attention and wider logits than a fresh model has
        wanted = torch.log_softmax(model(torch.tensor(ids)).logits.double(), -1).numpy()
    loaded = convert_torch(model, config)
    logits = np.array(loaded.model(mx.array(ids)).astype(mx.float32)).astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    got = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return float(np.abs(got - wanted).max()), known_differences(loaded.config)


@pytest.mark.parametrize("model_type", [entry.model_type for entry in DIFFERENCES])
def test_listed_difference_exists(model_type: str) -> None:
    config_class, settings, _ = CASES[model_type]
    worst, listed = worst_difference(config_class, settings)
    assert len(listed) == 1
    assert worst > 10 * ROUNDING, "mlx-lm computes the same by now: take the entry out"


@pytest.mark.parametrize("model_type", [name for name, case in CASES.items() if case[2] is not None])
def test_nothing_is_listed_where_the_numbers_agree(model_type: str) -> None:
    config_class, settings, changes = CASES[model_type]
    worst, listed = worst_difference(config_class, {**settings, **(changes or {})})
    assert listed == []
    assert worst < ROUNDING
