"""Has a model's attention read a prefix that is stored once: the seam that mlx-lm does not have.

mlx-lm's model modules import one function by name, `scaled_dot_product_attention`. While a `with` block runs,
that name in the modules of the loaded model stands for a function of ours, which looks at the cache object
that it is given and leaves every other call to the original. Whether the model's attention goes through
that name at all is found by the self-test at load (`sharing.py`).

Only the calls that build the graph need the block, not the evaluation. Another thread that scores waits until it is
left; a block within a block finds the name taken, and leaves it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

import mlx.core as mx
from mlx import nn
from mlx_eval_kernels import prefix_attention, row_attention

from mlx_eval.engine.branch import BranchCache, behind
from mlx_eval.engine.slots import Run, SlotCache

NAME: Final = "scaled_dot_product_attention"
"""Of the function in mlx-lm's modules that is exchanged."""
ONE_AT_A_TIME: Final = threading.RLock()
"""Held by the thread that has put its function in."""


@contextlib.contextmanager
def prefix_attention_in(model: nn.Module) -> Iterator[None]:
    """Let the attention of `model` read the prefixes of `BranchCache` and `SlotCache` while the block runs."""
    from mlx_lm.models import base

    original = getattr(base, NAME)
    attention = _with_prefixes(original)
    with ONE_AT_A_TIME:
        modules = [module for module in _modules_of(model) if getattr(module, NAME, None) is original]
        for module in modules:
            setattr(module, NAME, attention)
        try:
            yield
        finally:
            for module in modules:
                setattr(module, NAME, original)


def _modules_of(model: nn.Module) -> list[types.ModuleType]:
    """The Python modules that define the classes of a model's layers."""
    names = {base.__module__ for layer in model.modules() for base in type(layer).__mro__}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules]


def _with_prefixes(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """mlx-lm's attention function, but for caches whose prefix it does not know."""

    def attention(  # noqa: PLR0917  (the signature is mlx-lm's)
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if isinstance(cache, SlotCache):
            return _over_runs(original, queries, cache, scale=scale, mask=mask, sinks=sinks)
        if not (isinstance(cache, BranchCache) and cache.splits_attention and cache.prefix is not None):
            return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        if isinstance(mask, mx.array) and not any(mask is known for known in cache.layout.masks):
            raise ValueError("the model makes a mask of its own, which knows nothing of the prefix")
        whole = cache.layout.prefix_len + keys.shape[-2]
        has_prefix_columns = isinstance(mask, mx.array) and mask.shape[-1] == whole
        if has_prefix_columns:
            keys, values = cache.with_prefix(keys, values)
            return original(queries, keys, values, cache=None, scale=scale, mask=mask, sinks=sinks)
        return prefix_attention(queries, *cache.prefix, keys, values, scale=scale, mask=mask, sinks=sinks)

    return attention


def _over_runs(
    original: Callable[..., mx.array],
    queries: mx.array,
    cache: SlotCache,
    *,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attention [B, H, T, E] of rows that are decoded together, run by run.

    The mask that the model hands over only says which window it wants; each run has one of its own.
    """
    table = cache.table
    window = table.window_of(mask) if isinstance(mask, mx.array) else cache.window
    parts = [
        _of_run(original, queries[run.begin : run.end], cache, run, window, scale=scale, sinks=sinks)
        for run in table.runs
    ]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _of_run(
    original: Callable[..., mx.array],
    queries: mx.array,
    cache: SlotCache,
    run: Run,
    window: int | None,
    *,
    scale: float,
    sinks: mx.array | None,
) -> mx.array:
    keys, values = cache.of_run(run)
    mask = cache.table.run_mask(run, cache.window, window)
    prefix = cache.prefix_of(run)
    if prefix is not None and cache.table.hides_prefix(run, cache.window, window):
        keys, values = behind(prefix[0], keys), behind(prefix[1], values)
        prefix = None
    if prefix is None:
        if run.num_rows > 1 and mx.default_device() == mx.Device(mx.cpu):
            return row_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        return original(queries, keys, values, cache=None, scale=scale, mask=mask, sinks=sinks)
    return prefix_attention(queries, *prefix, keys, values, scale=scale, mask=mask, sinks=sinks)
