"""Remembers what the self-test found of a model, by its weights. Knows files of the user's cache folder.

The numbers of a self-test depend on the weights and on the programs that compute them, so both are in the key.
"""

from __future__ import annotations

from importlib.metadata import version

from mlx_eval.cache import read_cached, write_cached
from mlx_eval.engine.sharing import ModelSharing, find_sharing
from mlx_eval.models import runtime
from mlx_eval.models.head import RowHead
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


def _name(fingerprint: str) -> str:
    return f"sharing-{fingerprint}.json"


def _key(fingerprint: str) -> str:
    programs = " ".join(f"{name}={version(name)}" for name in ("mlx", "mlx-lm", "mlx-eval"))
    return f"{fingerprint} {programs} {runtime.device().kind}"
