"""Where mlx-lm's modules compute something else than transformers', so that scores differ a little.

Knows configurations only. Each entry was measured (tests/models/test_differences.py) and is taken out when
mlx-lm computes the same: the test then fails. The figures are of random models of 6 layers, float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from mlx_eval.models.layout import TANH_GELU

NO_WINDOW: Final = (
    "mlx-lm lets every token see all before it, transformers only the last sliding_window: "
    "texts longer than that score otherwise"
)


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that mlx-lm computes otherwise for models of one type."""

    model_type: str
    applies: Callable[[Mapping[str, Any]], bool]
    """Whether a configuration is concerned."""
    text: str
    """What differs, and by how much."""


def _root_is_rounded(config: Mapping[str, Any]) -> bool:
    """Whether the square root of the hidden size has more digits than bfloat16 holds (8 bits)."""
    root = float(config.get("hidden_size", 0)) ** 0.5
    mantissa = root.hex().split("p")[0].split(".")[-1]
    return root > 0 and int(mantissa.ljust(13, "0"), 16) % (1 << 45) != 0


def _window_matters(config: Mapping[str, Any]) -> bool:
    window = config.get("sliding_window")
    return window is not None and window < config.get("max_position_embeddings", 0)


DIFFERENCES: Final = (
    Difference(
        "gemma",
        lambda config: True,
        "mlx-lm computes the exact GELU, transformers its tanh form: up to 1e-3 nats a token",
    ),
    Difference(
        "gemma3_text",
        _root_is_rounded,
        "mlx-lm rounds the embedding's scale to bfloat16 in every type, transformers only in bfloat16: "
        "up to 6e-3 nats a token in float32",
    ),
    Difference(
        "gpt_neox",
        lambda config: config.get("hidden_act", "gelu") not in TANH_GELU,
        "mlx-lm computes the tanh form of GELU, transformers the exact one: up to 1e-3 nats a token",
    ),
    Difference(
        "starcoder2",
        lambda config: config.get("hidden_act", "gelu_pytorch_tanh") in TANH_GELU,
        "mlx-lm computes the exact GELU, transformers its tanh form: up to 1e-3 nats a token",
    ),
    Difference("gemma2", _window_matters, NO_WINDOW),
    Difference("mistral", _window_matters, NO_WINDOW),
)


def known_differences(config: Mapping[str, Any]) -> list[str]:
    """What mlx-lm computes otherwise than transformers for a model of this configuration."""
    return [
        entry.text
        for entry in DIFFERENCES
        if entry.model_type == config.get("model_type") and entry.applies(config)
    ]
