"""The forwards of a plan and nothing else: the model and its head on the plan's shapes, behind plain arrays of KV.

What is left out is all that is ours: planning, forking caches, normalising logits, reading results. Every row is
given the keys and values that stand before it as they are, in arrays of random numbers, so that what is
computed means nothing and takes as long as what does. A prefix that the engine stores once is given to each row here,
as mlx-lm's own attention wants it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from benchmarks.side_by_side.backends import Seconds, stopwatch
from mlx_eval import config
from mlx_eval.engine.batches import Batch, ScoringPlan
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


class GivenCache:
    """Stands in for the KV cache of one layer: whatever is added, it has these arrays to attend to."""

    def __init__(self, shape: ForwardShape, keys: mx.array, values: mx.array) -> None:
        self.offset = shape.num_cached
        self._given = keys, values
        self.added: list[mx.array] = []
        """Computed by the layer; to be evaluated, or they would not be computed at all."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The given arrays [B, H, num_cached + T, D]."""
        self.added += [keys, values]
        self.offset += keys.shape[-2]
        return self._given

    def make_mask(self, num_queries: int, **_: Any) -> str | None:
        """Causal, the given arrays' end lying at the last query."""
        return "causal" if num_queries > 1 else None

    @property
    def state(self) -> list[mx.array]:
        """What the layer added."""
        return self.added


class BareModel:
    """A model whose layers keep plain keys and values."""

    def __init__(self, model: nn.Module) -> None:
        """Ask the model what its caches hold.

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
        length = shape.num_cached + shape.num_tokens
        made: dict[tuple[int, int, int], tuple[mx.array, mx.array]] = {}
        for heads, key_size, value_size in self._sizes:
            if (heads, key_size, value_size) not in made:
                made[heads, key_size, value_size] = (
                    mx.random.normal((shape.num_rows, heads, length, key_size)).astype(self._type),
                    mx.random.normal((shape.num_rows, heads, length, value_size)).astype(self._type),
                )
        tokens = mx.random.randint(0, 1000, (shape.num_rows, shape.num_tokens))
        positions = math.prod(tokens.shape)
        rows = mx.array(np.linspace(0, positions - 1, shape.num_logits).astype(np.int32))
        mx.eval(tokens, rows, list(made.values()))
        return tokens, rows, [GivenCache(shape, *made[size]) for size in self._sizes]

    def _call(self, tokens: mx.array, rows: mx.array, caches: list[GivenCache]) -> None:
        """One forward, with what its layers add to their caches, and the logits block by block."""
        if rows.size == 0:
            self._model(tokens, cache=caches)
            mx.eval([cache.added for cache in caches])
            return
        for block in self._head.logits(tokens, rows, caches):
            mx.eval(block, [cache.added for cache in caches])
