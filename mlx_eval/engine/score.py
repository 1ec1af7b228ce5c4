"""Runs a scoring plan: one evaluation a batch, the head on the rows that predict scored tokens.

Knows token ids and the model; knows nothing of text, tasks or lm-eval. While the device computes a
batch, the next one is put together: results are read one batch late.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_eval_kernels import NO_TARGET, logprob

from mlx_eval import config
from mlx_eval.engine.plan import Batch, ScoringPlan, first_position
from mlx_eval.engine.together import scores_together
from mlx_eval.models.head import RowHead
from mlx_eval.records import Score, ScoringRequest

logger = logging.getLogger(__name__)

OnScore = Callable[[int, Score], None]
OnTokens = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The scored positions of a batch."""

    rows: np.ndarray[Any, np.dtype[np.int32]]
    """[R] row of each position."""
    positions: np.ndarray[Any, np.dtype[np.int32]]
    """[R]"""
    targets: np.ndarray[Any, np.dtype[np.int32]]
    """[R, K] ids predicted there, `NO_TARGET` where a position has fewer than K."""
    places: dict[int, list[tuple[int, int]]]
    """Request index -> (r, k) of each of its continuation tokens in order."""


@dataclass(frozen=True, slots=True)
class _Running:
    """A batch that the device is computing."""

    batch: Batch
    wanted: _Wanted
    order: list[int]
    """Which r each result row is."""
    blocks: list[tuple[mx.array, mx.array]]
    """(log-probabilities [r, K], argmax [r])"""


class Scorer:
    """Computes log-probabilities with one model."""

    def __init__(
        self,
        model: nn.Module,
        *,
        prefill_step: int = config.PREFILL_STEP,
        logits_bytes: int = config.LOGITS_BYTES,
    ) -> None:
        """Prepare `model` for scoring.

        Args:
            model: an mlx-lm model.
            prefill_step: tokens of a row computed in one forward pass; longer rows take several.
            logits_bytes: the largest block of float32 logits [rows, V] held at once.
        """
        self._model = model
        self._head = RowHead(model, logits_bytes)
        self._prefill_step = prefill_step

    def most_rows(self, batch_size: int) -> int:
        """Rows to be planned together: one where mlx-lm computes padded rows wrongly."""
        return batch_size if batch_size > 1 and self._scores_together else 1

    @functools.cached_property
    def _scores_together(self) -> bool:
        together = scores_together(self._model)
        if not together:
            logger.warning(
                "mlx-lm cannot score this model in padded batches: requests are scored one at a time"
            )
        return together

    def run(
        self,
        plan: ScoringPlan,
        requests: Sequence[ScoringRequest],
        on_score: OnScore,
        on_tokens: OnTokens = lambda count: None,
    ) -> None:
        """Compute `plan` over `requests`.

        Args:
            plan: made from the same requests.
            requests: as given to the planner.
            on_score: called once for each request index, as soon as its batch is done.
            on_tokens: called with the number of tokens just computed, padding aside.
        """
        running: _Running | None = None
        for batch in plan.batches:
            started = self._start(batch, requests)
            if running is not None:
                _finish(running, requests, on_score, on_tokens)
            running = started
        if running is not None:
            _finish(running, requests, on_score, on_tokens)

    def _start(self, batch: Batch, requests: Sequence[ScoringRequest]) -> _Running:
        """Send a batch to the device without waiting for it."""
        from mlx_lm.models.cache import make_prompt_cache

        wanted = _wanted_positions(batch, requests)
        tokens = mx.array(batch.token_array())  # [B, T]
        cache = make_prompt_cache(self._model)
        order: list[int] = []
        blocks: list[tuple[mx.array, mx.array]] = []
        for start in range(0, batch.length, self._prefill_step):
            piece = tokens[:, start : start + self._prefill_step]
            end = start + piece.shape[1]
            here = np.flatnonzero((wanted.positions >= start) & (wanted.positions < end))
            if here.size == 0:
                self._model(piece, cache=cache)
            else:
                flat = wanted.rows[here] * piece.shape[1] + wanted.positions[here] - start
                self._score_piece(piece, flat, wanted.targets[here], cache, blocks)
                order.extend(here.tolist())
            if end < batch.length:
                mx.eval([layer.state for layer in cache])
        return _Running(batch, wanted, order, blocks)

    def _score_piece(
        self,
        piece: mx.array,
        flat: np.ndarray[Any, Any],
        targets: np.ndarray[Any, Any],
        cache: list[Any],
        blocks: list[tuple[mx.array, mx.array]],
    ) -> None:
        """Add the results for the flattened positions `flat` of `piece` [B, t] to `blocks`."""
        done = 0
        for logits in self._head.logits(piece, mx.array(flat), cache):
            result = logprob(logits, mx.array(targets[done : done + logits.shape[0]]))
            done += logits.shape[0]
            mx.async_eval(result.logprob, result.argmax)
            blocks.append((result.logprob, result.argmax))


def _wanted_positions(batch: Batch, requests: Sequence[ScoringRequest]) -> _Wanted:
    """Which positions of a batch predict scored tokens, each position once."""
    targets: dict[tuple[int, int], list[int]] = {}
    pending: dict[int, list[tuple[tuple[int, int], int]]] = {}
    for row_index, row in enumerate(batch.rows):
        for index in row.requests:
            request = requests[index]
            start = first_position(request)
            for offset, token in enumerate(request.continuation_ids):
                place = (row_index, start + offset)
                ids = targets.setdefault(place, [])
                if token not in ids:
                    ids.append(token)
                pending.setdefault(index, []).append((place, ids.index(token)))
    order = {place: r for r, place in enumerate(sorted(targets))}
    width = max(len(ids) for ids in targets.values())
    array = np.full((len(order), width), NO_TARGET, dtype=np.int32)
    for place, r in order.items():
        array[r, : len(targets[place])] = targets[place]
    return _Wanted(
        rows=np.array([row for row, _ in order], dtype=np.int32),
        positions=np.array([position for _, position in order], dtype=np.int32),
        targets=array,
        places={index: [(order[place], k) for place, k in spots] for index, spots in pending.items()},
    )


def _finish(
    running: _Running, requests: Sequence[ScoringRequest], on_score: OnScore, on_tokens: OnTokens
) -> None:
    """Wait for a batch and hand out its scores."""
    wanted = running.wanted
    scores = np.empty(wanted.targets.shape, dtype=np.float64)
    best = np.empty(len(wanted.targets), dtype=np.int64)
    if running.blocks:
        scores[running.order] = np.concatenate([np.array(values) for values, _ in running.blocks])
        best[running.order] = np.concatenate([np.array(argmax) for _, argmax in running.blocks])
    for index, spots in wanted.places.items():
        continuation = requests[index].continuation_ids
        is_greedy = all(best[r] == token for (r, _), token in zip(spots, continuation, strict=True))
        on_score(index, Score(float(sum(scores[r, k] for r, k in spots)), is_greedy))
    on_tokens(running.batch.num_tokens)
