"""Remembers what the self-test found of a model, by its identity. Knows documents of the user's cache folder.

The numbers of a self-test depend on the weights, on the configuration, of which windows and heads leave no trace in
the weights, and on the programs that compute them. The first two are the model's identity; which one the files of a
model have is remembered by their paths, sizes and times.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any, Final

from mlx_eval.cache import read_cached, write_cached
from mlx_eval.engine.sharing import ModelSharing, find_sharing
from mlx_eval.engine.together import Decoding, find_decoding
from mlx_eval.models import runtime
from mlx_eval.models.head import RowHead
from mlx_eval.models.load import model_path
from mlx_eval.models.loaded import LoadedModel

FORMAT: Final = 2
"""Of the self-test and the ways that it tries; another number makes what older ones found unreadable."""


def model_identity(loaded: LoadedModel, fingerprint: str) -> str:
    """Names a model's weights and configuration together: 33 characters, fit for a file's name.

    Args:
        loaded: the model.
        fingerprint: its own, which takes a pass over all weights.
    """
    kind = type(loaded.model)
    settings = json.dumps(
        [kind.__module__, kind.__qualname__, dict(loaded.config)], sort_keys=True, default=str
    )
    return f"{fingerprint}-{hashlib.sha256(settings.encode()).hexdigest()[:16]}"


def sharing_of(loaded: LoadedModel, head: RowHead) -> ModelSharing:
    """What the model allows: as tested before, else tested now.

    Args:
        loaded: the model.
        head: of the same model.
    """
    identity = model_identity(loaded, loaded.fingerprint())
    known = known_sharing(identity)
    if known is None:
        known = find_sharing(loaded.model, head)
        write_cached(_name(identity), _key(identity), known.as_dict())
    return known


def decoding_of(loaded: LoadedModel, sharing: ModelSharing) -> Decoding:
    """Whether the model's rows can be decoded together: as tested before, else tested now.

    Args:
        loaded: the model.
        sharing: what it allows.
    """
    identity = model_identity(loaded, loaded.fingerprint())
    name, key = f"decoding-{identity}.json", f"{_key(identity)} {sharing.way}"
    stored = read_cached(name, key)
    if isinstance(stored, dict) and stored.keys() == {"together", "drafts"}:
        return Decoding(bool(stored["together"]), bool(stored["drafts"]))
    found = find_decoding(loaded.model, sharing)
    write_cached(name, key, asdict(found))
    return found


def known_sharing(identity: str) -> ModelSharing | None:
    """What an earlier self-test of this model found, None when there was none."""
    stored = read_cached(_name(identity), _key(identity))
    if not isinstance(stored, dict):
        return None
    try:
        return ModelSharing.from_dict(stored)
    except (KeyError, TypeError, AttributeError):
        return None


def remember_source(source: str, loading: Mapping[str, Any], identity: str) -> None:
    """Keep the identity that a model has once it is loaded.

    Args:
        source: what `load_model` was given; nothing is kept of what is not on this machine by that name.
        loading: its other arguments.
        identity: of the loaded model.
    """
    digest = _source_digest(source, loading)
    if digest is not None:
        write_cached(f"identity-{digest[:16]}.json", digest, identity)


def identity_of_source(source: str, loading: Mapping[str, Any]) -> str | None:
    """The identity that the model would have once loaded; None when its files are not known or have changed."""
    digest = _source_digest(source, loading)
    stored = None if digest is None else read_cached(f"identity-{digest[:16]}.json", digest)
    return stored if isinstance(stored, str) else None


def _source_digest(source: str, loading: Mapping[str, Any]) -> str | None:
    """Path, size and time of each file that says what the model computes, and what is done to it when loaded."""
    path = model_path(source)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        return None
    files += [config] if (config := path / "config.json").is_file() else []
    try:
        states = [(str(file.resolve()), (state := file.stat()).st_size, state.st_mtime_ns) for file in files]
    except OSError:  # gone since it was loaded, say: no reason to lose what was computed
        return None
    device = runtime.device().kind
    return hashlib.sha256(json.dumps([states, dict(loading), device], default=str).encode()).hexdigest()


def _name(identity: str) -> str:
    return f"sharing-{identity}.json"


def _key(identity: str) -> str:
    programs = " ".join(f"{name}={version(name)}" for name in ("mlx", "mlx-lm", "mlx-eval"))
    return f"{FORMAT} {identity} {programs} {runtime.device().kind} {runtime.kernel_backend()}"
