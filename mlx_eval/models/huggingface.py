"""A Hugging Face or MLX directory, or a hub id, through mlx-lm. Knows no other format."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
from mlx import nn

from mlx_eval.errors import ModelError
from mlx_eval.models.checkpoint import build_model, new_model
from mlx_eval.models.layout import BASE_PREFIXES, mlx_config, named_arrays, published_names

DESCRIPTION: Final = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py"]
"""Files of a hub repository that are not weights."""
HUB_ID: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper


def find_directory(source: str, revision: str | None) -> Path:
    """The directory that `source` names: itself, or the hub's snapshot of it.

    Raises:
        ModelError: there is no such directory and the hub cannot provide it.
    """
    return local_directory(source) or _download(source, revision)


def find_description(source: str, revision: str | None) -> Path:
    """The same with the files that describe a model, but not necessarily its weights.

    Raises:
        ModelError: as `find_directory`.
    """
    return local_directory(source) or _download(source, revision, DESCRIPTION)


def local_directory(source: str) -> Path | None:
    """The directory that `source` names on this machine; None when it can only be a hub id.

    Raises:
        ModelError: it is neither.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            files = sorted(file.name for file in path.glob("*.gguf"))
            instead = f"; name the file in it: {path / files[0]}" if files else ""
            raise ModelError(f"{source} is no model directory: it holds no config.json{instead}")
        return path
    if path.exists():
        raise ModelError(f"{source} is neither a model directory nor a .gguf file")
    if source.startswith((".", "/", "~")) or source.count("/") > 1 or not HUB_ID.fullmatch(source):
        raise ModelError(
            f"{source} does not exist; give a model directory, a .gguf file, a hub id such as owner/name, or demo"
        )
    return None


def _download(hub_id: str, revision: str | None, patterns: list[str] | None = None) -> Path:
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )
    from mlx_lm.utils import _download as download

    try:
        return Path(download(hub_id, revision=revision, allow_patterns=patterns))
    except HFValidationError as error:
        raise ModelError(f"{hub_id} is neither a path that exists nor a valid hub id: {error}") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{hub_id} is no path here and could not be fetched from the Hugging Face hub: {reason}"
        ) from error


def read_model(directory: Path, *, trust_remote_code: bool) -> tuple[nn.Module, dict[str, Any]]:
    """The model and configuration of a directory, weights not yet evaluated.

    Raises:
        ModelError: files are missing, damaged or of an architecture that mlx-lm does not know.
    """
    from mlx_lm.utils import load_model

    files = sorted(directory.glob("model*.safetensors"))
    if not files:
        others = sorted(
            path.name for path in directory.iterdir() if path.suffix in {".bin", ".pt", ".pth", ".gguf"}
        )
        found = f"; it has {', '.join(others)}" if others else ""
        raise ModelError(f"{directory} holds no model*.safetensors{found}")
    weights = _read_weights(files)
    config = _read_raw_config(directory)
    if "tie_word_embeddings" not in config and "lm_head.weight" in weights:
        config["tie_word_embeddings"] = False  # transformers' default for most; mlx-lm's is often the other
    config = mlx_config(config)
    if config.get("model_type") in BASE_PREFIXES and "quantization" not in config:
        names = published_names(config["model_type"], list(weights), named_arrays(new_model(config)))
        return build_model(config, {names[name]: array for name, array in weights.items()}), config
    try:
        return load_model(directory, lazy=True, model_config=config, trust_remote_code=trust_remote_code)
    except Exception as error:  # a damaged configuration fails wherever mlx-lm first uses it
        raise ModelError(f"{directory} cannot be loaded: {_first_line(error)}") from error


def read_generation_config(directory: Path) -> dict[str, Any]:
    """The directory's generation_config.json; empty without one or when it cannot be read."""
    try:
        found = json.loads((directory / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_config(directory: Path) -> dict[str, Any]:
    """The configuration of a directory, as mlx-lm reads it.

    Raises:
        ModelError: there is none, or it is damaged.
    """
    return mlx_config(_read_raw_config(directory))


def _read_raw_config(directory: Path) -> dict[str, Any]:
    from mlx_lm.utils import load_config

    try:
        config: dict[str, Any] = load_config(directory)
    except (ValueError, OSError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"config.json or generation_config.json of {directory} cannot be read: {_first_line(error)}"
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{directory / 'config.json'} names no model_type: it is no model's configuration")
    return config


def _read_weights(files: list[Path]) -> dict[str, mx.array]:
    """All tensors by name, not yet in memory.

    Raises:
        ModelError: a file is damaged.
    """
    weights: dict[str, mx.array] = {}
    for path in files:
        try:
            found = mx.load(str(path))
            assert isinstance(found, dict)
            weights.update(found)
        except (RuntimeError, ValueError) as error:
            raise ModelError(f"{path} is damaged or no safetensors file: {_first_line(error)}") from error
    return weights


def read_tokenizer(directory: Path, config: dict[str, Any], *, trust_remote_code: bool) -> TokenizerWrapper:
    """The tokenizer of a directory, with every end-of-sequence id of the model's configuration.

    Raises:
        ModelError: there is none or it is damaged.
    """
    from mlx_lm.utils import load_tokenizer

    try:
        tokenizer: TokenizerWrapper = load_tokenizer(
            directory, {"trust_remote_code": trust_remote_code}, eos_token_ids=config.get("eos_token_id")
        )
    except Exception as error:  # transformers raises classes of its own for damaged files
        raise ModelError(
            f"{directory} has no usable tokenizer ({_first_line(error)}); "
            "a model of raw bytes needs tokenizer='bytes'"
        ) from error
    return tokenizer


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
