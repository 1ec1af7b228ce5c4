"""Rotary position scaling: what a GGUF file says of it, as Hugging Face's `rope_scaling`.

Knows the keys and the one tensor about it, and no architecture. Llama 3's scaling is in no key: the
converter writes what it divides each frequency by, as the tensor `rope_freqs.weight`.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from mlx_eval.errors import ModelError
from mlx_eval.models.gguf_file import GGUFFile

LLAMA3_CONTEXT: Final = 8192
LLAMA3_LOW: Final = 1.0
LLAMA3_HIGH: Final = 4.0
"""The values of every published Llama 3.1, 3.2 and 3.3 (their config.json)."""
FACTOR_TOLERANCE: Final = 1e-4
"""The tensor's factors are float32 results of a short formula; another setting is off by far more."""


def rope_config(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any] | None:
    """`rope_scaling` of the configuration, None where positions are not scaled.

    Raises:
        ModelError: the scaling is of a type that is not known.
    """
    if "rope_freqs.weight" in file.tensors:
        return _from_factors(file, theta, head_dim)
    prefix = f"{file.architecture}.rope."
    if f"{prefix}scale_linear" in file.metadata:  # before the scaling keys were introduced
        factor = file.number(f"{prefix}scale_linear")
        return {"rope_type": "linear", "factor": factor} if factor != 1 else None
    kind = file.text(f"{prefix}scaling.type", "none")
    if kind == "none":
        return None
    factor = file.number(f"{prefix}scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(file, f"{prefix}scaling.", factor)
    raise file.wrong_value(f"{prefix}scaling.type", "none, linear or yarn")


def _yarn(file: GGUFFile, prefix: str, factor: float) -> dict[str, Any]:
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if file.number(prefix + key, 1.0) != 1.0:
            raise file.wrong_value(prefix + key, "1: mlx-lm has no other YaRN")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": file.integer(f"{prefix}original_context_length"),
        "beta_fast": file.number(f"{prefix}yarn_beta_fast", 32.0),
        "beta_slow": file.number(f"{prefix}yarn_beta_slow", 1.0),
    }


def _from_factors(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Llama 3's setting that gives the factors; where none does, the factors themselves.

    Hugging Face's `longrope` takes any factors, and scales nothing else where its two context lengths
    are equal.
    """
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.type_name != "F32" or tensor.shape != (head_dim // 2,):
        raise ModelError(
            f"{file.path}: tensor rope_freqs.weight is {tensor.type_name} of shape {tensor.shape}, expected "
            f"F32 of shape {(head_dim // 2,)}"
        )
    factors = tensor.data.view(np.float32)
    if (factors == 1).all():
        return None
    factor = float(str(factors.max()))
    if np.allclose(factors, _llama3_factors(theta, head_dim, factor), rtol=FACTOR_TOLERANCE, atol=0):
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": LLAMA3_LOW,
            "high_freq_factor": LLAMA3_HIGH,
            "original_max_position_embeddings": LLAMA3_CONTEXT,
        }
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": file.integer(f"{file.architecture}.context_length"),
        "short_factor": [float(each) for each in factors],
        "long_factor": [float(each) for each in factors],
    }


def _llama3_factors(theta: float, head_dim: int, factor: float) -> np.ndarray[Any, Any]:
    """What Llama 3.1 divides each frequency by: 1 for short waves, `factor` for long ones."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (LLAMA3_CONTEXT / wavelengths - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
    smooth = np.clip(smooth, 0.0, 1.0)
    return 1 / ((1 - smooth) / factor + smooth)
