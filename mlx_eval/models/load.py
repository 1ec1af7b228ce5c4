"""`load_model`: from whatever names a model to one that is ready to run. Knows which reader takes which source."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_eval import config as defaults
from mlx_eval.errors import ModelError
from mlx_eval.models import huggingface, runtime
from mlx_eval.models.checkpoint import Checkpoint, build_model
from mlx_eval.models.differences import known_differences
from mlx_eval.models.loaded import LoadedModel
from mlx_eval.models.precision import apply_precision, check_precision, keeps_quantized

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
        dtype: float32, bfloat16, float16 or auto, which is what the checkpoint has. None: auto on Metal,
            float32 on the CPU, because MLX's half-precision products there are 10 to 35 times slower and
            quantised ones more.
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
    check_precision(dtype=dtype, quantize=quantize, dequantize=dequantize)
    _warn_about_blas()
    name, path = str(source), model_path(source)
    if names_gguf(path):
        checkpoint = _read_gguf(path, keep_quantized=keeps_quantized(dequantize))
        generation = checkpoint.generation_config
        eos = generation.get("eos_token_id", checkpoint.config.get("eos_token_id"))
        config = {**checkpoint.config, "eos_token_id": eos}
        model = build_model(config, checkpoint.weights)
        own_tokenizer = wrap_tokenizer(checkpoint.tokenizer, eos)
    else:
        directory = huggingface.find_directory(found_by(source), revision)
        model, config = huggingface.read_model(directory, trust_remote_code=trust_remote_code)
        if quantize is None:
            mx.async_eval(model.parameters())  # the disk is read while the tokenizer is
        generation = huggingface.read_generation_config(directory)
        own_tokenizer = None
        if tokenizer is None:
            own_tokenizer = huggingface.read_tokenizer(directory, config, trust_remote_code=trust_remote_code)
    try:
        config = apply_precision(model, config, dtype=dtype, quantize=quantize, dequantize=dequantize)
    except RuntimeError as error:  # arrays come into memory here; a file cut short shows itself
        raise ModelError(f"{name} cannot be read: {error}") from error
    if tokenizer is not None:
        own_tokenizer = other_tokenizer(tokenizer, config, trust_remote_code=trust_remote_code)
    assert own_tokenizer is not None
    for text in known_differences(config):
        logger.warning("%s: %s", config["model_type"], text)
    return LoadedModel(model, own_tokenizer, config, name, generation)


def check_source(source: str) -> None:
    """Refuse what cannot name a model, without reading or fetching anything.

    Raises:
        ModelError: a path where there is no model, and no hub id.
    """
    path = Path(source).expanduser()
    if source != defaults.DEMO_SOURCE and not (path.suffix == ".gguf" and path.is_file()):
        huggingface.local_directory(source)


def model_path(source: str | Path) -> Path:
    """The place on this machine that `source` names, if it names one."""
    return DEMO_DIRECTORY if str(source) == defaults.DEMO_SOURCE else Path(source).expanduser()


def found_by(source: str | Path) -> str:
    """What `huggingface` looks for: `source` as it was given, since `./a/b` is no hub id and `a/b` may be one."""
    return str(DEMO_DIRECTORY) if str(source) == defaults.DEMO_SOURCE else str(source)


def names_gguf(path: Path) -> bool:
    """Whether a path is, or would be, that of a GGUF file."""
    return path.suffix == ".gguf" and not path.is_dir()


def wrap_tokenizer(tokenizer: Any, eos_token_ids: Any) -> TokenizerWrapper:
    """mlx-lm's wrapper around a transformers tokenizer, unless it is one already."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    if isinstance(tokenizer, TokenizerWrapper):
        return tokenizer
    ids = [eos_token_ids] if isinstance(eos_token_ids, int) else eos_token_ids
    return TokenizerWrapper(tokenizer, eos_token_ids=ids)


def _read_gguf(path: Path, *, keep_quantized: bool) -> Checkpoint:
    from mlx_eval.models.gguf import read_gguf

    if not path.is_file():
        raise ModelError(f"{path} does not exist")
    return read_gguf(path, keep_quantized=keep_quantized)


def other_tokenizer(
    tokenizer: Any, config: Mapping[str, Any], *, trust_remote_code: bool
) -> TokenizerWrapper:
    """The tokenizer that the user asked for instead of the model's own."""
    if not isinstance(tokenizer, str | Path):
        return wrap_tokenizer(tokenizer, config.get("eos_token_id"))
    if str(tokenizer) == BYTES:
        from mlx_eval.models.bytes import byte_tokenizer_for

        return wrap_tokenizer(byte_tokenizer_for(config), config.get("eos_token_id"))
    path = Path(tokenizer).expanduser()
    directory = path if path.is_dir() else huggingface.find_directory(str(tokenizer), None)
    return huggingface.read_tokenizer(directory, dict(config), trust_remote_code=trust_remote_code)


def _warn_about_blas() -> None:
    problem = runtime.blas_problem()
    if problem is not None:
        logger.warning(problem)
