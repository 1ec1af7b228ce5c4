"""Builds any architecture of mlx-lm tiny and random. Knows configurations, no weights of anyone and no engine.

`configs.json` has one line for each, named after mlx-lm's module and, where a module computes in more than
one way, what is special behind an `@`. A configuration with a `cannot` is one that does not run here, and why.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_map, tree_map_with_path

VOCAB: Final = 128
"""Ids below this are text in every configuration; some keep images and the like above it."""
WINDOW: Final = 8
"""How far the layers of the tiny configurations see that do not see everything."""
WINDOW_KEYS: Final = {
    "attention_chunk_size",
    "attention_window_size",
    "index_topk",
    "loop_window_size",
    "sliding_window",
    "sliding_window_size",
    "window_size",
}
"""What the configurations call it."""


@functools.cache
def configurations() -> dict[str, dict[str, Any]]:
    """All configurations by name, those that cannot run too."""
    loaded: dict[str, dict[str, Any]] = json.loads(
        Path(__file__).with_name("configs.json").read_text(encoding="utf-8")
    )
    return loaded


def runnable() -> list[str]:
    """Names of the configurations that run."""
    return [name for name, config in configurations().items() if "cannot" not in config]


def build(name: str, window: int = WINDOW) -> nn.Module:
    """A float32 model of a configuration.

    Args:
        name: a key of `configurations()`.
        window: how far sliding and chunked layers see.
    """
    config = _with_window(configurations()[name], window)
    config.pop("cannot", None)
    module = importlib.import_module(f"mlx_lm.models.{name.partition('@')[0]}")
    mx.random.seed(0)
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    model.eval()
    model.update(tree_map_with_path(_sharpened, model.parameters()))
    mx.eval(model.parameters())
    return model


def nudge(model: nn.Module, seed: int) -> None:
    """Move each weight by at most one unit in its last place."""
    rng = np.random.default_rng(seed)
    eps = mx.finfo(mx.float32).eps

    def moved(array: mx.array) -> mx.array:
        if not mx.issubdtype(array.dtype, mx.floating):
            return array
        factors = 1 + rng.uniform(-eps, eps, array.shape)
        return array * mx.array(factors.astype(np.float32))

    model.update(tree_map(moved, model.parameters()))
    mx.eval(model.parameters())


def has_window(name: str) -> bool:
    """Whether some layers see only so many tokens."""
    config = configurations()[name]
    return _with_window(config, WINDOW + 1) != config


def _with_window(config: Any, window: int) -> Any:
    if isinstance(config, dict):
        return {
            key: window if key in WINDOW_KEYS and value == WINDOW else _with_window(value, window)
            for key, value in config.items()
        }
    return copy.deepcopy(config)


def _sharpened(path: str, array: mx.array) -> mx.array:
    """Weights with which attention looks at some tokens and not all alike, so that a wrong mask shows."""
    if array.dtype == mx.uint8:
        return mx.random.randint(0, 255, array.shape).astype(array.dtype)
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    array = array.astype(mx.float32)
    if array.ndim < 2:
        return array + mx.random.uniform(-0.1, 0.1, array.shape)
    if mx.all(array == array.reshape(-1)[0]).item():  # filled by the checkpoint: zeros or ones until then
        return mx.random.normal(array.shape) * array.shape[-1] ** -0.5
    return array * 1.5
