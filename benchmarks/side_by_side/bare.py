"""The forwards of a plan and nothing else: the model and its head on the plan's shapes, behind plain arrays of KV.

What is left out: planning, forking caches, normalising logits, reading results. Every row is given the keys and
values that stand before it as they are, in arrays of random numbers, so that what is computed means nothing and takes
as long as what does. Where the engine has a model read a prefix that is stored once, so it is here: mlx-lm's own
attention, which wants a copy for each row, takes up to twice as long behind long prefixes and would be no limit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx import nn

from benchmarks.side_by_side.backends import Seconds, stopwatch
from mlx_eval import config
from mlx_eval.engine.attention import prefix_attention_in
from mlx_eval.engine.batches import Batch, ScoringPlan
from mlx_eval.engine.branch import BranchCache, Layout
from mlx_eval.models.head import RowHead
from mlx_eval.records import ScoringRequest


@dataclass(frozen=True, slots=True)
class ForwardShape:
    """One call of the model."""

    num_rows: int
    num_tokens: int
    """Of each row, padding included."""
    num_cached: int
    """Before them, of the row that has most."""
    num_logits: int
    """Positions that the head is needed for, of all rows."""
    num_shared: int = 0
    """Of `num_cached`, those of a prefix that is stored once for all rows."""


def forward_shapes(plan: ScoringPlan, requests: Sequence[ScoringRequest]) -> Iterator[ForwardShape]:
    """The calls that a plan makes, in its order."""
    for batch in plan.batches:
        wanted = wanted_positions(batch, requests)
        before = max(row.start for row in batch.rows)
        for begin in range(0, batch.length, plan.limits.step):
            end = min(begin + plan.limits.step, batch.length)
            inside = sum(begin <= position < end for _, position in wanted)
            yield ForwardShape(len(batch.rows), end - begin, before + begin, inside, batch.prefix_len)


def wanted_positions(batch: Batch, requests: Sequence[ScoringRequest]) -> set[tuple[int, int]]:
    """(row, position in the batch) of everything that predicts a scored token."""
    return {
        (index, requests[answer.request].context_ids.size - 1 + place - row.start)
        for index, row in enumerate(batch.rows)
        for answer in row.answers
        for place in range(answer.first, answer.stop)
    }


class GivenCache(BranchCache):
    """Stands in for the KV cache of one layer: whatever is added, it has these arrays to attend to."""

    def __init__(
        self, shape: ForwardShape, own: tuple[mx.array, mx.array], prefix: tuple[mx.array, mx.array] | None
    ) -> None:
        """Give arrays.

        Args:
            shape: of the call.
            own: keys and values [B, H, S + T, D] of each row itself.
            prefix: keys and values [1, H, P, D] that are stored once; None: there are none.
        """
        shared = 0 if prefix is None else shape.num_shared
        before = np.arange(shared, shape.num_cached, dtype=np.int32)
        layout = Layout(
            prefix_len=shared,
            positions=np.tile(before, (shape.num_rows, 1)),
            starts=np.full(shape.num_rows, shape.num_cached, np.int32),
            lengths=np.full(shape.num_rows, shape.num_tokens, np.int32),
        )
        super().__init__(layout, prefix=prefix, splits_attention=True)
        self._given = own
        self.added: list[mx.array] = []
        """Computed by the layer; to be evaluated, or they would not be computed at all."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The given arrays."""
        self.added += [keys, values]
        self._num_new += keys.shape[-2]
        return self._given


class BareModel:
    """A model whose layers keep plain keys and values."""

    def __init__(self, model: nn.Module, prefix_once: bool) -> None:
        """Ask the model what its caches hold.

        Args:
            model: an mlx-lm model.
            prefix_once: whether its attention reads a prefix that is stored once.

        Raises:
            SystemExit: a layer keeps something else.
        """
        from mlx_lm.models.cache import KVCache, make_prompt_cache

        caches = make_prompt_cache(model)
        if any(type(cache) is not KVCache for cache in caches):
            raise SystemExit("bare forwards need a model whose layers keep plain keys and values")
        mx.eval(model(mx.array([[1, 2]]), cache=caches))
        self._sizes = [
            (cache.keys.shape[1], cache.keys.shape[-1], cache.values.shape[-1]) for cache in caches
        ]
        self._type = caches[0].keys.dtype
        self._model = model
        self._head = RowHead(model, config.LOGITS_BYTES)
        self._prefix_once = prefix_once

    def run(self, shapes: Sequence[ForwardShape]) -> Seconds:
        """Compute all calls, one after the other; arrays are made between the times that count."""
        wall = cpu = 0.0
        for shape in shapes:
            tokens, rows, caches = self._arrays(shape)
            with stopwatch() as taken:
                self._call(tokens, rows, caches)
            wall += taken().wall
            cpu += taken().cpu
        return Seconds(wall, cpu)

    def _arrays(self, shape: ForwardShape) -> tuple[mx.array, mx.array, list[GivenCache]]:
        """Random inputs; layers of one size share their arrays, as only the time matters."""
        shared = shape.num_shared if self._prefix_once else 0
        length = shape.num_cached - shared + shape.num_tokens

        def pair(size: tuple[int, int, int], num_rows: int, length: int) -> tuple[mx.array, mx.array]:
            heads, *widths = size
            keys, values = (mx.random.normal((num_rows, heads, length, width)) for width in widths)
            return keys.astype(self._type), values.astype(self._type)

        own = {size: pair(size, shape.num_rows, length) for size in set(self._sizes)}
        prefixes = {size: pair(size, 1, shared) if shared else None for size in set(self._sizes)}
        tokens = mx.random.randint(0, 1000, (shape.num_rows, shape.num_tokens))
        positions = shape.num_rows * shape.num_tokens
        rows = mx.array(np.linspace(0, positions - 1, shape.num_logits).astype(np.int32))
        mx.eval(tokens, rows, list(own.values()), [one for one in prefixes.values() if one is not None])
        return tokens, rows, [GivenCache(shape, own[size], prefixes[size]) for size in self._sizes]

    def _call(self, tokens: mx.array, rows: mx.array, caches: list[GivenCache]) -> None:
        """One forward, with what its layers add to their caches, and the logits block by block."""
        with prefix_attention_in(self._model) if self._prefix_once else contextlib.nullcontext():
            if rows.size == 0:
                self._model(tokens, cache=caches)
                mx.eval([cache.added for cache in caches])
                return
            for block in self._head.logits(tokens, rows, caches):
                mx.eval(block, [cache.added for cache in caches])
