"""`load_model`: from whatever names a model to one that is ready to run. Knows which reader takes which source."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from mlx_eval import config as defaults
from mlx_eval.errors import ModelError
from mlx_eval.models import huggingface, runtime
from mlx_eval.models.checkpoint import build_model
from mlx_eval.models.loaded import LoadedModel
from mlx_eval.models.precision import apply_precision

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

logger = logging.getLogger(__name__)

DEMO_DIRECTORY = Path(__file__).parent / "demo"
BYTES = "bytes"


def load_model(
    source: str | Path,
    *,
    dtype: str | None = None,
    quantize: int | None = None,
    dequantize: bool | None = None,
    tokenizer: str | Path | Any | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a model as MLX arrays in an mlx-lm model.

    Args:
        source: a Hugging Face or MLX directory, a `.gguf` file, a hub id, or `demo` for the embedded model.
        dtype: float32, bfloat16 or float16. None: on Metal what the checkpoint has, on the CPU float32,
            because MLX's half-precision products on the CPU are some 25 times slower.
        quantize: bits a weight to quantise to.
        dequantize: whether to turn quantised weights into `dtype`. None: on the CPU only.
        tokenizer: a directory or hub id to take it from, `bytes` for a model of raw bytes, or a
            transformers tokenizer. None: the model's own.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: whether Python files of the model's directory may run.

    Returns:
        The model, its parameters evaluated.

    Raises:
        ModelError: `source` is no model, is damaged, or mlx-lm does not know its architecture.
        InvalidOptionError: options that contradict each other.
    """
    _warn_about_blas()
    name = str(source)
    path = DEMO_DIRECTORY if name == defaults.DEMO_SOURCE else Path(name).expanduser()
    if path.suffix == ".gguf" and (path.is_file() or not path.exists()):
        model, config, own_tokenizer = _read_gguf(path, keep_quantized=_keeps_quantized(dequantize))
    else:
        directory = huggingface.find_directory(str(path) if name == defaults.DEMO_SOURCE else name, revision)
        model, config = huggingface.read_model(directory, trust_remote_code=trust_remote_code)
        own_tokenizer = None
        if tokenizer is None:
            own_tokenizer = huggingface.read_tokenizer(directory, config, trust_remote_code=trust_remote_code)
    config = apply_precision(model, config, dtype=dtype, quantize=quantize, dequantize=dequantize)
    _evaluate(model, name)
    if tokenizer is not None:
        own_tokenizer = _other_tokenizer(tokenizer, config, trust_remote_code=trust_remote_code)
    assert own_tokenizer is not None
    return LoadedModel(model, own_tokenizer, config, name)


def wrap_tokenizer(tokenizer: Any, eos_token_ids: Any) -> TokenizerWrapper:
    """mlx-lm's wrapper around a transformers tokenizer, unless it is one already."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    if isinstance(tokenizer, TokenizerWrapper):
        return tokenizer
    ids = [eos_token_ids] if isinstance(eos_token_ids, int) else eos_token_ids
    return TokenizerWrapper(tokenizer, eos_token_ids=ids)


def _read_gguf(path: Path, *, keep_quantized: bool) -> tuple[nn.Module, dict[str, Any], TokenizerWrapper]:
    from mlx_eval.models.gguf import read_gguf

    if not path.is_file():
        raise ModelError(f"{path} does not exist")
    checkpoint = read_gguf(path, keep_quantized=keep_quantized)
    eos = checkpoint.generation_config.get("eos_token_id", checkpoint.config.get("eos_token_id"))
    config = {**checkpoint.config, "eos_token_id": eos}
    return build_model(config, checkpoint.weights), config, wrap_tokenizer(checkpoint.tokenizer, eos)


def _other_tokenizer(tokenizer: Any, config: Mapping[str, Any], *, trust_remote_code: bool) -> TokenizerWrapper:
    """The tokenizer that the user asked for instead of the model's own."""
    if not isinstance(tokenizer, str | Path):
        return wrap_tokenizer(tokenizer, config.get("eos_token_id"))
    if str(tokenizer) == BYTES:
        return wrap_tokenizer(_byte_tokenizer(config), config.get("eos_token_id"))
    path = Path(tokenizer).expanduser()
    directory = path if path.is_dir() else huggingface.find_directory(str(tokenizer), None)
    return huggingface.read_tokenizer(directory, dict(config), trust_remote_code=trust_remote_code)


def _byte_tokenizer(config: Mapping[str, Any]) -> Any:
    """The tokenizer of a model whose first 256 ids are bytes."""
    from mlx_eval.models.bytes import NUM_BYTES, byte_tokenizer

    ids: dict[str, int] = {}
    for role in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(role)
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, int) and first >= NUM_BYTES:
            ids[role] = first
    return byte_tokenizer(vocab_size=config.get("vocab_size"), **ids)


def _keeps_quantized(dequantize: bool | None) -> bool:
    """Whether quantised weights stay so: as asked, else on Metal only."""
    return runtime.device().is_metal if dequantize is None else not dequantize


def _evaluate(model: nn.Module, name: str) -> None:
    """Bring the parameters into memory; a damaged file shows itself only here."""
    try:
        mx.eval(model.parameters())
    except RuntimeError as error:
        raise ModelError(f"{name} cannot be read: {error}") from error


def _warn_about_blas() -> None:
    device = runtime.device()
    if device.kind == "cpu" and device.blas == runtime.BUILT_IN_BLAS:
        logger.warning(runtime.BLAS_HINT)
