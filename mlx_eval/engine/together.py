"""Whether a model's rows can be decoded together: asked of the model itself, as no class or name tells.

Knows the batches that decoding steps; knows neither requests nor text. Decoding a batch over caches of unequal
length fails for some of mlx-lm's models, loudly or silently (gemma2's grouped heads take the mask of rows for one
of heads; some caches cannot be merged). Such models are decoded a row at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx import nn

from mlx_eval.engine.execute import FAILURES
from mlx_eval.engine.steps import RowBatch, RowStart

PROBE_PROMPTS: Final = ([3, 1, 4, 1, 5, 2, 3], [2, 5, 1, 3], [4, 2])
"""Rows of unequal length, valid ids for any vocabulary of six or more."""
NUM_STEPS: Final = 6
"""Tokens of each row: enough for steps before others join, beside them, and after one has gone."""


def decodes_together(model: nn.Module) -> bool:
    """Whether rows of unequal length give, side by side, the log-probabilities that each gives alone."""
    from mlx_lm.models.cache import make_prompt_cache

    dtype = model(mx.array([[1]]), cache=make_prompt_cache(model)).dtype
    rows = list(enumerate(PROBE_PROMPTS))
    alone = [found for row in rows for found in _decode(RowBatch(model, merges=False), [[row]])]
    try:
        # the first by itself, and then the others: rows are merged, batches are extended and, at the end, thinned
        together = _decode(RowBatch(model, merges=True), [rows[:1], rows[1:]])
    except FAILURES:
        return False
    return _agree(alone, together, dtype)


def _agree(alone: list[np.ndarray[Any, Any]], together: list[np.ndarray[Any, Any]], dtype: mx.Dtype) -> bool:
    """Whether rows are the same but for rounding. A model that gives NaN has other troubles than batches."""
    if any(np.isnan(row).any() for row in alone):
        return True
    # rounding differs with the shape of a batch and grows over the layers: half of the type's digits are
    # asked for; a wrong mask or position changes the first digit
    tolerance = math.sqrt(mx.finfo(dtype).eps)
    for row, other in zip(alone, together, strict=True):
        finite = np.isfinite(row)  # of some models, tokens that never come have a log-probability of -inf
        if not np.array_equal(row[~finite], other[~finite]):
            return False
        difference = row[finite] - other[finite]
        if not float(np.sqrt(np.mean(difference**2))) <= tolerance * float(np.std(row[finite])):
            return False
    return True


class _Watcher:
    """A sampler that keeps the log-probabilities that it is given and takes the same token every time."""

    def __init__(self) -> None:
        self.seen: list[mx.array] = []

    def __call__(self, logprobs: mx.array) -> mx.array:
        self.seen.append(logprobs)
        return mx.ones(1, mx.uint32)


def _decode(
    batch: RowBatch, arrivals: Iterable[Sequence[tuple[int, Sequence[int]]]]
) -> list[np.ndarray[Any, Any]]:
    """Log-probabilities [NUM_STEPS, V] of each row, by index; one more group of rows joins at each step."""
    watchers: dict[int, _Watcher] = {}
    for rows in arrivals:
        watchers |= {index: _Watcher() for index, _ in rows}
        batch.join([RowStart(index, ids, NUM_STEPS, watchers[index]) for index, ids in rows])
        batch.step()
    while len(batch):
        batch.step()
    return [np.array(mx.concatenate(watcher.seen)) for _, watcher in sorted(watchers.items())]
