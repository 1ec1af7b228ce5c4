"""Remembers what the self-test found of a model, by its weights. Knows files of the user's cache folder.

The numbers of a self-test depend on the weights and on the programs that compute them, so both are in the key.
Weights are known by their fingerprint; which one a file has is remembered by its path, size and time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from mlx_eval.cache import read_cached, write_cached
from mlx_eval.engine.sharing import ModelSharing, find_sharing
from mlx_eval.models import runtime
from mlx_eval.models.head import RowHead
from mlx_eval.models.load import model_path
from mlx_eval.models.loaded import LoadedModel


def sharing_of(loaded: LoadedModel, head: RowHead) -> ModelSharing:
    """What the model allows: as tested before, else tested now.

    Args:
        loaded: the model.
        head: of the same model.
    """
    fingerprint = loaded.fingerprint()
    known = known_sharing(fingerprint)
    if known is None:
        known = find_sharing(loaded.model, head)
        write_cached(_name(fingerprint), _key(fingerprint), known.as_dict())
    return known


def known_sharing(fingerprint: str) -> ModelSharing | None:
    """What an earlier self-test of these weights found, None when there was none."""
    stored = read_cached(_name(fingerprint), _key(fingerprint))
    if not isinstance(stored, dict):
        return None
    try:
        return ModelSharing.from_dict(stored)
    except (KeyError, TypeError):
        return None


def remember_source(source: str, loading: Mapping[str, Any], fingerprint: str) -> None:
    """Keep the fingerprint that a model has once it is loaded.

    Args:
        source: what `load_model` was given; nothing is kept of what is not on this machine by that name.
        loading: its other arguments.
        fingerprint: of the loaded model.
    """
    digest = _source_digest(source, loading)
    if digest is not None:
        write_cached(f"fingerprint-{digest[:16]}.json", digest, fingerprint)


def fingerprint_of_source(source: str, loading: Mapping[str, Any]) -> str | None:
    """The fingerprint that the model would have once loaded; None when its files are not known or have changed."""
    digest = _source_digest(source, loading)
    stored = None if digest is None else read_cached(f"fingerprint-{digest[:16]}.json", digest)
    return stored if isinstance(stored, str) else None


def _source_digest(source: str, loading: Mapping[str, Any]) -> str | None:
    """Path, size and time of every file of weights, and what is done to them when they are loaded."""
    path = model_path(source)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        return None
    states = [(str(file.resolve()), (state := file.stat()).st_size, state.st_mtime_ns) for file in files]
    device = runtime.device().kind
    return hashlib.sha256(json.dumps([states, dict(loading), device], default=str).encode()).hexdigest()


def _name(fingerprint: str) -> str:
    return f"sharing-{fingerprint}.json"


def _key(fingerprint: str) -> str:
    programs = " ".join(f"{name}={version(name)}" for name in ("mlx", "mlx-lm", "mlx-eval"))
    return f"{fingerprint} {programs} {runtime.device().kind}"
