"""A model without its weights: configuration, tokenizer and the shapes that follow. Knows what `load.py` knows.

Its arrays are random and never evaluated, so it takes no memory; enough to see what a computation would need.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mlx import nn

from mlx_eval.models import huggingface
from mlx_eval.models.checkpoint import new_model
from mlx_eval.models.load import found_by, model_path, names_gguf, other_tokenizer, wrap_tokenizer
from mlx_eval.models.loaded import LoadedModel
from mlx_eval.models.precision import DTYPES, check_precision
from mlx_eval.models.runtime import device

FULL_PRECISION: Final = "float32"


def load_outline(
    source: str | Path,
    *,
    dtype: str | None = None,
    quantize: int | None = None,
    dequantize: bool | None = None,
    tokenizer: str | Path | Any | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """What `load_model` loads, without its weights; of a hub id only the small files are fetched.

    No layer is quantised, whatever the checkpoint has.

    Args:
        source: as for `load_model`, and so are the other arguments.
        dtype: the type of what is computed, and so of the KV.
        quantize: is checked only: `num_bytes` is that of plain weights, and so too much for quantised ones.
        dequantize: likewise.
        tokenizer: a directory, hub id, `bytes` or a transformers tokenizer.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: whether Python files of the model's directory may run.

    Raises:
        ModelError, InvalidOptionError: as `load_model`.
    """
    check_precision(dtype=dtype, quantize=quantize, dequantize=dequantize)
    path = model_path(source)
    generation: Mapping[str, Any]
    if names_gguf(path):
        from mlx_eval.models.gguf import read_gguf_outline

        checkpoint = read_gguf_outline(path)
        config, generation = checkpoint.config, checkpoint.generation_config
        own: Any = wrap_tokenizer(checkpoint.tokenizer, generation.get("eos_token_id"))
    else:
        directory = huggingface.find_description(found_by(source), revision)
        config = huggingface.read_config(directory)
        generation = huggingface.read_generation_config(directory)
        own = None
        if tokenizer is None:
            own = huggingface.read_tokenizer(directory, config, trust_remote_code=trust_remote_code)
    if tokenizer is not None:
        own = other_tokenizer(tokenizer, config, trust_remote_code=trust_remote_code)
    model = new_model(config)
    _set_dtype(model, config, dtype)
    return LoadedModel(model, own, config, str(source), generation)


def _set_dtype(model: nn.Module, config: Mapping[str, Any], asked: str | None) -> None:
    """The type that `load_model` would give the arrays: the checkpoint's own on Metal, float32 on the CPU."""
    name = asked or ("auto" if device().is_metal else FULL_PRECISION)
    if name == "auto":
        text_config = config.get("text_config") or config
        name = str(text_config.get("dtype") or text_config.get("torch_dtype") or FULL_PRECISION)
    target = DTYPES.get(name)
    if target is not None:
        model.set_dtype(target)
