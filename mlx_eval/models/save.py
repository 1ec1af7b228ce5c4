"""A loaded model as a directory that mlx-lm reads, and transformers too when nothing is quantised.

Knows file formats and how to leave nothing half-written behind; knows no model type.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_eval.errors import ModelError, OutputError
from mlx_eval.models.layout import WRITABLE, hugging_face_weights, mlx_config, named_arrays
from mlx_eval.models.loaded import LoadedModel
from mlx_eval.models.precision import is_quantized

logger = logging.getLogger(__name__)

SHARD_BYTES = 5 * 10**9
"""A weights file stays below this, as on the hub, unless one tensor alone is larger."""
SPARE_BYTES = 64 * 2**20
"""Room beside the weights for the tokenizer and the configuration."""


def check_destination(destination: Path) -> Path:
    """The absolute path to write to, which does not exist or is an empty directory.

    Raises:
        OutputError: it holds something already, is no directory or cannot be written.
    """
    path = destination.expanduser().absolute()
    try:
        if path.is_dir():
            if next(path.iterdir(), None) is not None:
                raise OutputError(f"{destination} is not empty: give a directory that does not exist yet")
        elif path.exists() or path.is_symlink():
            raise OutputError(f"{destination} is no directory: give one that does not exist yet")
        existing = next(parent for parent in path.parents if parent.exists())
    except OSError as error:
        raise OutputError(f"{destination} cannot be written: {error.strerror or error}") from error
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise OutputError(f"{destination} cannot be written: {existing} is no writable directory")
    return path


def save_directory(loaded: LoadedModel, destination: Path) -> None:
    """Write the model, its configuration and its tokenizer into a new directory.

    mlx-lm reads it; transformers does too, unless the model is quantised or nobody has checked how
    transformers writes its kind, which is said in a warning. Everything goes into a directory beside it
    that is renamed at the end, and removed when anything fails.

    Args:
        loaded: The model.
        destination: A directory that does not exist or is empty; parents are made.

    Raises:
        OutputError: the destination is not empty or cannot be written, or the disk is full.
        ModelError: the model brings Python code of its own.
    """
    path = check_destination(destination)
    plain = not is_quantized(loaded.model) and _transformers_reads(loaded)
    weights = _weights(loaded, for_transformers=plain)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
    except OSError as error:
        raise OutputError(f"{destination} cannot be written: {error.strerror or error}") from error
    try:
        _check_room(temporary, sum(array.nbytes for array in weights.values()))
        _write_weights(temporary, weights, "pt" if plain else "mlx")
        _write_config(temporary, loaded)
        _write_json(
            temporary / "generation_config.json",
            dict(loaded.generation_config) or _generation_config(loaded),
        )
        _write_tokenizer(temporary, loaded.tokenizer)
        temporary.rename(path)
    except OSError as error:
        raise OutputError(f"{destination} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _transformers_reads(loaded: LoadedModel) -> bool:
    """Whether an unquantised model can be written so that transformers reads it; says so when not."""
    kind = str(loaded.config["model_type"])
    if loaded.config.get("rope_traditional"):
        logger.warning(
            "a rotary embedding that turns neighbours: the directory is for mlx-lm, not for transformers"
        )
        return False
    if kind not in WRITABLE:
        logger.warning("how transformers writes a %s is not known: the directory is for mlx-lm alone", kind)
        return False
    return True


def _weights(loaded: LoadedModel, *, for_transformers: bool) -> dict[str, mx.array]:
    """The tensors to write by the names they get."""
    config = loaded.config
    if config.get("model_file"):
        raise ModelError(
            f"{loaded.source} brings its own Python module ({config['model_file']}), which is not copied: "
            "such a model cannot be written"
        )
    if for_transformers:
        return hugging_face_weights(loaded.model, str(config["model_type"]))
    return named_arrays(loaded.model)


# --- weights --------------------------------------------------------------------------------------


def _check_room(directory: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(directory).free
    needed = num_bytes + SPARE_BYTES
    if free < needed:
        raise OutputError(
            f"{directory.parent} has {free / 1e6:,.0f} MB left and {needed / 1e6:,.0f} MB are needed: "
            "make room or write elsewhere"
        )


def _write_weights(directory: Path, weights: dict[str, mx.array], format_name: str) -> None:
    """Safetensors files and, as mlx-lm writes it for one file too, their index."""
    total = sum(array.nbytes for array in weights.values())
    shards = list(_shards({name: array.nbytes for name, array in weights.items()}))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file_name = (
            f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        )
        # taken out, so that transposed copies are freed with their shard
        _write_shard(directory / file_name, {name: weights.pop(name) for name in names}, format_name)
        weight_map |= dict.fromkeys(names, file_name)
    _write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
    )


def _shards(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Names in their order, cut where a file would grow beyond the limit."""
    names: list[str] = []
    num_bytes = 0
    for name, size in sizes.items():
        if names and num_bytes + size > SHARD_BYTES:
            yield names
            names, num_bytes = [], 0
        names.append(name)
        num_bytes += size
    if names:
        yield names


def _write_shard(path: Path, arrays: dict[str, mx.array], format_name: str) -> None:
    num_bytes = sum(array.nbytes for array in arrays.values())
    try:
        mx.save_safetensors(str(path), arrays, metadata={"format": format_name})
    except RuntimeError as error:
        raise OutputError(f"{path.name} cannot be written: {error}") from error
    if path.stat().st_size < num_bytes:
        raise OutputError(f"{path.name} was cut off at {path.stat().st_size} bytes: is the disk full?")


# --- text files -----------------------------------------------------------------------------------


def _write_config(directory: Path, loaded: LoadedModel) -> None:
    from mlx_lm.utils import save_config

    config = mlx_config(loaded.config)
    # names code that is not copied
    config.pop("auto_map", None)
    if not config.get("architectures"):
        config["architectures"] = _architectures(str(config["model_type"]))
    try:
        save_config(config, directory / "config.json", keep_vision_config=True)
    except TypeError as error:
        raise ModelError(f"the configuration cannot be written as JSON: {error}") from error


def _architectures(model_type: str) -> list[str] | None:
    """The name of transformers' class, which serving programs look for."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return [name] if isinstance(name, str) else None


def _write_tokenizer(directory: Path, tokenizer: Any) -> None:
    try:
        tokenizer.save_pretrained(directory)
    except Exception as error:
        # the tokenizers package raises the bare class for whatever the system reports
        if type(error) is not Exception:
            raise
        raise OutputError(f"the tokenizer cannot be written: {error}") from error


def _generation_config(loaded: LoadedModel) -> dict[str, Any]:
    """The special ids: every end-of-sequence id that the tokenizer knows, and the model's others."""
    eos = sorted(loaded.tokenizer.eos_token_ids)
    found = {
        "bos_token_id": loaded.config.get("bos_token_id", loaded.tokenizer.bos_token_id),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": loaded.config.get("pad_token_id", loaded.tokenizer.pad_token_id),
    }
    return {key: value for key, value in found.items() if value is not None}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
