"""A Hugging Face or MLX directory, or a hub id, through mlx-lm. Knows no other format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.nn as nn

from mlx_eval.errors import ModelError

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper


def find_directory(source: str, revision: str | None) -> Path:
    """The directory that `source` names: itself, or the hub's snapshot of it.

    Raises:
        ModelError: there is no such directory and the hub cannot provide it.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{source} is no model directory: it holds no config.json")
        return path
    if path.exists():
        raise ModelError(f"{source} is neither a model directory nor a .gguf file")
    if source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise ModelError(
            f"{source} does not exist; give a model directory, a .gguf file, a hub id such as owner/name, or demo"
        )
    return _download(source, revision)


def _download(hub_id: str, revision: str | None) -> Path:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
    from mlx_lm.utils import _download as download

    try:
        return Path(download(hub_id, revision=revision))
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

    if not list(directory.glob("model*.safetensors")):
        others = sorted(path.name for path in directory.iterdir() if path.suffix in {".bin", ".pt", ".pth", ".gguf"})
        found = f"; it has {', '.join(others)}" if others else ""
        raise ModelError(f"{directory} holds no model*.safetensors{found}")
    try:
        model, config = load_model(directory, lazy=True, trust_remote_code=trust_remote_code)
    except json.JSONDecodeError as error:
        raise ModelError(f"{directory}/config.json is damaged: {error}") from error
    except (ValueError, RuntimeError, TypeError, KeyError, AttributeError, OSError) as error:
        raise ModelError(f"{directory} cannot be loaded: {_first_line(error)}") from error
    return model, config


def read_tokenizer(
    directory: Path, config: dict[str, Any], *, trust_remote_code: bool
) -> TokenizerWrapper:
    """The tokenizer of a directory, with every end-of-sequence id of the model's configuration.

    Raises:
        ModelError: there is none or it is damaged.
    """
    from mlx_lm.utils import load_tokenizer

    try:
        return load_tokenizer(
            directory, {"trust_remote_code": trust_remote_code}, eos_token_ids=config.get("eos_token_id")
        )
    except (ValueError, OSError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise ModelError(
            f"{directory} has no usable tokenizer ({_first_line(error)}); "
            "a model of raw bytes needs tokenizer='bytes'"
        ) from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
