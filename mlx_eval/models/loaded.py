"""A model that is ready to run, and what can be asked of it. Knows no file format."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx import nn

from mlx_eval import config as defaults
from mlx_eval.models.layout import named_arrays

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

LENGTH_ATTRIBUTES = ("n_positions", "max_position_embeddings", "n_ctx")
"""Configuration keys that name the context window, in the order lm-eval's `hf` backend asks them."""
POSITION_TABLES = ("wpe", "embed_positions", "position_embeddings", "position_embedding")
"""Names of modules that hold a learned vector for each position."""
UNSET_LENGTH = 10**29
"""transformers writes 10^30 where a tokenizer names no length."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """An mlx-lm model with its tokenizer and its Hugging Face configuration."""

    model: nn.Module
    tokenizer: TokenizerWrapper
    """mlx-lm's wrapper of a transformers tokenizer; knows every end-of-sequence id of the model."""
    config: Mapping[str, Any]
    source: str
    """What was asked to be loaded: a path, a hub id, `demo` or a name for a model in memory."""
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    """Hugging Face's generation_config.json, empty where there is none."""

    @property
    def max_length(self) -> int:
        """Context window in tokens, found the way lm-eval's `hf` backend finds it."""
        return context_window(self.config, self.tokenizer)

    @property
    def vocab_size(self) -> int | None:
        """Ids that the model's embedding has rows for; None where the configuration does not say."""
        text_config = self.config.get("text_config") or self.config
        size = text_config.get("vocab_size", self.config.get("vocab_size"))
        return None if size is None else int(size)

    @property
    def num_positions(self) -> int | None:
        """Rows of the learned position table; None for models that compute positions (rotary, ALiBi)."""
        return num_positions(self.model)

    @property
    def dtype(self) -> str:
        """Name of the type that most of the floating-point parameters have, such as `bfloat16`."""
        sizes: dict[str, int] = {}
        for array in named_arrays(self.model).values():
            if mx.issubdtype(array.dtype, mx.floating):
                name = str(array.dtype).removeprefix("mlx.core.")
                sizes[name] = sizes.get(name, 0) + array.size
        return max(sizes, key=lambda name: sizes[name]) if sizes else "none"

    @property
    def quantization(self) -> str | None:
        """Bits and group size of the quantised layers, such as `4-bit, groups of 64`; None for none."""
        kinds = sorted(
            {
                (module.bits, module.group_size)
                for _, module in self.model.named_modules()
                if isinstance(getattr(module, "bits", None), int) and hasattr(module, "group_size")
            }
        )
        return "; ".join(f"{bits}-bit, groups of {size}" for bits, size in kinds) or None

    @property
    def num_parameters(self) -> int:
        """Number of weights, those of quantised layers counted once each."""
        from mlx_lm.utils import get_total_parameters

        return int(get_total_parameters(self.model))

    @property
    def num_bytes(self) -> int:
        """Memory that the parameters take."""
        return sum(array.nbytes for array in named_arrays(self.model).values())

    def fingerprint(self) -> str:
        """A name for the weights as they are loaded: 16 hexadecimal digits.

        Equal for equal parameters (names, shapes, types, bits), wherever they came from. Two 32-bit
        sums per array, weighted by position so that no exchange of values goes unseen, hashed with
        SHA-256: meant to tell models apart, not to resist an attacker.
        """
        digest = hashlib.sha256()
        for name, array in sorted(named_arrays(self.model).items()):
            digest.update(f"{name} {array.shape} {array.dtype} {_checksum(array)}\n".encode())
        return digest.hexdigest()[:16]


def num_positions(model: nn.Module) -> int | None:
    """Rows of a model's learned position table; None for models that compute positions (rotary, ALiBi)."""
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in POSITION_TABLES and "weight" in module:
            return int(module.weight.shape[0])
    return None


def context_window(config: Mapping[str, Any], tokenizer: Any) -> int:
    """Tokens that fit in the model's window, from its configuration, else its tokenizer, else 2,048."""
    text_config = config.get("text_config") or config
    for name in LENGTH_ATTRIBUTES:
        if text_config.get(name) is not None:
            return int(text_config[name])
    length = getattr(tokenizer, "model_max_length", None)
    if length is not None and 0 < length < UNSET_LENGTH:
        return int(length)
    return defaults.MAX_LENGTH


def _checksum(array: mx.array) -> tuple[int, int]:
    """Two sums of the array's 32-bit words (mod 2^32), each weighted by another odd function of position."""
    flat = mx.contiguous(array.reshape(-1)).view(mx.uint8)
    if flat.size % 4:
        flat = mx.concatenate([flat, mx.zeros(4 - flat.size % 4, dtype=mx.uint8)])
    words = flat.view(mx.uint32)
    position = mx.arange(words.size, dtype=mx.uint32)
    first = mx.sum(words * ((2 * position + 1) * 2654435761))
    mixed = (words ^ (words >> 15)) * ((2 * position + 1) * 2246822519)
    second = mx.sum(mixed)
    sums = np.array(mx.stack([first, second]))
    return int(sums[0]), int(sums[1])
