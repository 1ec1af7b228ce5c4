"""The head only where it is needed: picks rows inside a model's own call, before its output layer.

A model's last step multiplies every position with the whole vocabulary, though only the positions that
predict a scored token matter. Which module hands its result to that last step differs from model to
model, so it is found by watching one call: the last module to return [B, T, hidden]. A shallow copy of
the model whose module at that place returns the chosen rows leaves everything after it (soft-capping,
logit scaling, tied embeddings) to the model itself. The split is compared with a full call when it is
made; where it does not hold, full logits are computed and picked from.

Only copies are changed for good. While the one call is watched, the classes of the model's modules are exchanged
for watching ones, so no other thread may use the model while a `RowHead` is made.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
from mlx import nn

PROBE_IDS = ((1, 2, 3, 4, 5), (3, 1, 4, 1, 5))
"""Two rows of valid ids for any vocabulary of six or more."""

HiddenHook = Callable[[mx.array], mx.array]


class RowHead:
    """Computes logits of chosen positions only."""

    def __init__(self, model: nn.Module, logits_bytes: int) -> None:
        """Find the place to pick rows in `model` and check it.

        Args:
            model: an mlx-lm model, ready to run.
            logits_bytes: the largest float32 block [rows, V] to be computed at once.
        """
        self._model = model
        self._hook: HiddenHook | None = None
        probe = mx.array(PROBE_IDS)
        try:
            full = _call(model, probe)
            path = _last_hidden_module(model, probe)
        except (ValueError, TypeError, AttributeError, LookupError):  # it takes one row at a time
            full = _call(model, probe[:1])
            path = None
        self.vocab_size: int = full.shape[-1]
        """V, the width of the logits."""
        self.dtype: mx.Dtype = full.dtype
        """Type of the logits."""
        self.max_rows = max(1, logits_bytes // (4 * full.shape[-1]))
        """Rows [V] of logits computed at once."""
        self._split = None if path is None else replace_module(model, path, self._apply_hook)
        self.is_split = self._split is not None and self._agrees(probe, full)
        """Whether the head runs on chosen rows only. False: on every row, because the model resisted."""

    def logits(self, tokens: mx.array, rows: mx.array, cache: list[Any]) -> Iterator[mx.array]:
        """Run the model on `tokens` and give the logits of the chosen positions, a block at a time.

        Args:
            tokens: [B, T] ids.
            rows: [R] indices into the flattened [B * T] positions, R at least one.
            cache: mlx-lm's cache objects, one a layer; they are advanced by T.

        Yields:
            [r, V] blocks in the order of `rows`, r at most `max_rows`, not yet evaluated.
        """
        blocks = [rows[start : start + self.max_rows] for start in range(0, rows.size, self.max_rows)]
        if not self.is_split:
            full = _call(self._model, tokens, cache)
            full = full.reshape(-1, full.shape[-1])  # [B * T, V]
            yield from (full[block] for block in blocks)
            return
        hidden: list[mx.array] = []

        def pick_first(states: mx.array) -> mx.array:
            hidden.append(states.reshape(-1, states.shape[-1]))  # [B * T, H]
            return hidden[0][blocks[0]][None]

        yield self._run(pick_first, tokens, cache)[0]
        for block in blocks[1:]:
            yield self.logits_of(hidden[0][block])

    def hidden(self, tokens: mx.array, rows: mx.array, cache: list[Any]) -> mx.array:
        """Run the model on `tokens` up to its last steps; only where `is_split`.

        Arguments as for `logits`.

        Returns:
            [R, H] hidden states of the chosen positions.
        """
        picked: list[mx.array] = []

        def pick(states: mx.array) -> mx.array:
            picked.append(states.reshape(-1, states.shape[-1])[rows])
            return states[:1, :1]  # what the last steps make of it is never evaluated

        self._run(pick, tokens, cache)
        return picked[0]

    def logits_of(self, states: mx.array) -> mx.array:
        """The model's last steps on hidden states [r, H], giving [r, V]; only where `is_split`."""
        # the body of this call is never evaluated: its result is replaced by the states at hand
        return self._run(lambda _: states[None], mx.array([[PROBE_IDS[0][0]]]), None)[0]

    def _run(self, hook: HiddenHook, tokens: mx.array, cache: list[Any] | None) -> mx.array:
        self._hook = hook
        try:
            assert self._split is not None
            return _call(self._split, tokens, cache)
        finally:
            self._hook = None

    def _apply_hook(self, states: mx.array) -> mx.array:
        assert self._hook is not None
        return self._hook(states)

    def _agrees(self, probe: mx.array, full: mx.array) -> bool:
        """Whether picked rows are those of a full call, but for the rounding of the model's type."""
        rows = mx.array([1, 4, 5, 8])
        try:
            picked = self._run(lambda states: states.reshape(-1, states.shape[-1])[rows][None], probe, None)
        except (ValueError, TypeError, AttributeError, IndexError):
            return False
        if picked.shape != (1, rows.size, full.shape[-1]):
            return False
        wanted = full.reshape(-1, full.shape[-1])[rows].astype(mx.float32)
        error = mx.max(mx.abs(picked[0].astype(mx.float32) - wanted))
        # a product over fewer rows may round differently, by a few units of the last place of the
        # largest logit; a wrong place to pick is off by whole logits
        tolerance = 64 * mx.finfo(full.dtype).eps * mx.max(mx.abs(wanted))
        return bool((error <= tolerance).item())


def _call(model: nn.Module, tokens: mx.array, cache: list[Any] | None = None) -> mx.array:
    """Logits [B, T, V]. Always with a cache: some models compute something else without one."""
    from mlx_lm.models.cache import make_prompt_cache

    logits: mx.array = model(tokens, cache=make_prompt_cache(model) if cache is None else cache)
    return logits


def _last_hidden_module(model: nn.Module, tokens: mx.array) -> str | None:
    """Path of the module whose call ends last among those that return [B, T, hidden]."""
    returned: list[tuple[nn.Module, Any]] = []
    watched: dict[type, type] = {}

    def watch(cls: type) -> type:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = cls.__call__(self, *args, **kwargs)
            returned.append((self, result))
            return result

        return type(cls.__name__, (cls,), {"__call__": call})

    names = {id(module): name for name, module in model.named_modules() if name}
    changed: list[tuple[Any, type]] = []
    try:
        for name, module in model.named_modules():
            if name and not isinstance(module, nn.Embedding):
                cls = type(module)
                changed.append((module, cls))
                module.__class__ = watched.setdefault(cls, watch(cls))
        vocabulary = _call(model, tokens).shape[-1]
    finally:
        for module, cls in changed:
            module.__class__ = cls
    for module, result in reversed(returned):
        if not isinstance(result, mx.array) or result.ndim != 3:
            continue
        if result.shape[:2] == tokens.shape and result.shape[2] != vocabulary:
            return names.get(id(module))
    return None


def replace_module(model: Any, path: str, hook: HiddenHook) -> Any:
    """A shallow copy of `model` that passes the result of its module at `path` through `hook`."""
    name, _, rest = path.partition(".")
    if not name:
        cls = type(model)
        replaced = copy.copy(model)
        replaced.__class__ = type(
            cls.__name__,
            (cls,),
            {"__call__": lambda self, *args, **kwargs: hook(cls.__call__(self, *args, **kwargs))},
        )
        return replaced
    if isinstance(model, list | tuple):
        items = list(model)
        items[int(name)] = replace_module(items[int(name)], rest, hook)
        return items
    replaced = copy.copy(model)
    setattr(replaced, name, replace_module(getattr(model, name), rest, hook))
    return replaced
