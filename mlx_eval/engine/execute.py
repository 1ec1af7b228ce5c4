"""Runs the batches of a scoring plan, the head on the positions that predict scored tokens only.

Knows token ids, a plan, the model and its caches; decides nothing. A batch is sent as a whole, but for long ones,
which are evaluated step by step. While the device computes a batch, the next one is put together: results are read
one batch late.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx import nn
from mlx_eval_kernels import NO_TARGET, Head, LogProb, linear_logprob, logprob

from mlx_eval.engine import attention, kv
from mlx_eval.engine.batches import Batch, ScoringPlan
from mlx_eval.engine.budget import is_out_of_memory
from mlx_eval.engine.held import Held
from mlx_eval.models.head import RowHead
from mlx_eval.records import Score, ScoringRequest

FAILURES: Final = (ValueError, TypeError, AttributeError, LookupError, RuntimeError, AssertionError)
"""What a model that cannot be run in some way may raise."""

OnScore = Callable[[int, Score], None]
OnTokens = Callable[[int], None]
Int32Array = npt.NDArray[np.int32]


class ModelCallError(Exception):
    """A model refuses a batch; the cause says why."""


class Tally:
    """Adds up the log-probabilities of requests whose tokens come from several batches."""

    def __init__(self, requests: Sequence[ScoringRequest], on_score: OnScore) -> None:
        """Wait for every token of `requests`; `on_score` is told each one's index and score, once."""
        self.missing = np.array([request.continuation_ids.size for request in requests])
        """Tokens that each request still waits for."""
        self._sums = np.zeros(len(requests))
        self._greedy = np.ones(len(requests), dtype=np.bool_)
        self._on_score = on_score

    def add(self, request: int, logprobs: npt.NDArray[np.float64], is_greedy: bool) -> None:
        """Take tokens that one row predicts of a request: [n] in nats, and whether each is the most probable."""
        self._sums[request] += logprobs.sum()
        self._greedy[request] &= is_greedy
        self.missing[request] -= logprobs.size
        if self.missing[request] == 0:
            self._on_score(request, Score(float(self._sums[request]), bool(self._greedy[request])))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The scored positions of a batch, each once."""

    flat: npt.NDArray[np.int64]
    """[R] row * T + position, ascending."""
    targets: Int32Array
    """[R, K] ids predicted there, `NO_TARGET` where a position has fewer than K."""
    answers: list[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]]
    """(request, [n] indices r, [n] indices k) of each stretch of a continuation."""


@dataclass(frozen=True, slots=True)
class _Running:
    """A batch that the device is computing."""

    batch: Batch
    wanted: _Wanted
    order: list[int]
    """Which r each result row is."""
    blocks: list[tuple[mx.array, mx.array]]
    """(log-probabilities [r, K], argmax [r])"""


class Executor:
    """One pass through a plan, with the KV that is held."""

    def __init__(
        self,
        model: nn.Module,
        head: RowHead,
        factory: kv.CacheFactory,
        *,
        plan: ScoringPlan,
        requests: Sequence[ScoringRequest],
        tally: Tally,
        on_tokens: OnTokens = lambda count: None,
        output_layer: Head | None = None,
    ) -> None:
        """Prepare for one run.

        Args:
            model: an mlx-lm model.
            head: of the same model.
            factory: makes its caches, as the plan's `Sharing` says.
            plan: made from `requests`.
            requests: as given to the planner.
            tally: takes the log-probabilities.
            on_tokens: called with the number of tokens of each batch as it is done, padding aside.
            output_layer: of the same model, for scores without logits; None: logits come from `head`, in blocks.
        """
        self._model = model
        self._head = head
        self._splits_attention = factory.splits_attention
        self._held = Held(factory)
        self._plan = plan
        self._requests = requests
        self._tally = tally
        self._on_tokens = on_tokens
        self._output_layer = output_layer

    def run(self) -> None:
        """Run every batch.

        Raises:
            ModelCallError: the model refuses one.
            RuntimeError: memory ran out, among others.
        """
        running: _Running | None = None
        splits = self._splits_attention
        with attention.prefix_attention_in(self._model) if splits else contextlib.nullcontext():
            for index, batch in enumerate(self._plan.batches):
                started = self._start(index, batch)
                if running is not None:
                    self._finish(running)
                running = started
            if running is not None:
                self._finish(running)

    def _start(self, index: int, batch: Batch) -> _Running:
        """Send a batch; what the model raises comes as a `ModelCallError`, but for memory that runs out."""
        try:
            return self._send(index, batch)
        except FAILURES as error:
            if isinstance(error, RuntimeError) and is_out_of_memory(error):
                raise
            raise ModelCallError from error

    def _send(self, index: int, batch: Batch) -> _Running:
        """Send a batch to the device without waiting for it."""
        wanted = _wanted_positions(batch, self._requests)
        state = self._held.start(batch)
        caches = state.caches
        order: list[int] = []
        blocks: list[tuple[mx.array, mx.array]] = []
        tokens = mx.array(self._plan.token_array(batch))  # [B, T]
        rows, positions = np.divmod(wanted.flat, batch.length)
        for begin in range(0, batch.length, self._plan.limits.step):
            piece = tokens[:, begin : begin + self._plan.limits.step]
            end = begin + piece.shape[1]
            here = np.flatnonzero((positions >= begin) & (positions < end))
            if here.size == 0:
                self._model(piece, cache=caches)
            else:
                flat = rows[here] * piece.shape[1] + positions[here] - begin
                blocks += self._score(piece, flat, wanted.targets[here], caches)
                order += here.tolist()
            if end < batch.length:  # what a step needs in between is free again before the next one
                mx.eval(kv.arrays_of(caches))
        kv.finalize(caches)
        self._held.keep(index, batch, state)
        return _Running(batch, wanted, order, blocks)

    def _score(
        self, piece: mx.array, flat: npt.NDArray[np.int64], targets: Int32Array, caches: list[Any]
    ) -> Iterator[tuple[mx.array, mx.array]]:
        """Log-probabilities and argmax for the flattened positions `flat` of `piece` [B, t], in blocks."""
        for result in self._results(piece, mx.array(flat), targets, caches):
            mx.async_eval(result.logprob, result.argmax)
            yield result.logprob, result.argmax

    def _results(
        self, piece: mx.array, rows: mx.array, targets: Int32Array, caches: list[Any]
    ) -> Iterator[LogProb]:
        """One block without logits, or as many as the head makes."""
        if self._output_layer is not None:
            hidden = self._head.hidden(piece, rows, caches)
            yield linear_logprob(hidden, self._output_layer, mx.array(targets))
            return
        done = 0
        for logits in self._head.logits(piece, rows, caches):
            yield logprob(logits, mx.array(targets[done : done + logits.shape[0]]))
            done += logits.shape[0]

    def _finish(self, running: _Running) -> None:
        """Wait for a batch and hand out its scores."""
        wanted = running.wanted
        if running.blocks:
            scores = np.empty(wanted.targets.shape, dtype=np.float64)
            best = np.empty(len(wanted.targets), dtype=np.int64)
            scores[running.order] = np.concatenate([np.array(values) for values, _ in running.blocks])
            best[running.order] = np.concatenate([np.array(argmax) for _, argmax in running.blocks])
            for request, r, k in wanted.answers:
                self._tally.add(request, scores[r, k], bool((best[r] == wanted.targets[r, k]).all()))
        self._on_tokens(running.batch.num_tokens)


def _wanted_positions(batch: Batch, requests: Sequence[ScoringRequest]) -> _Wanted:
    """Which positions of a batch predict scored tokens."""
    targets: dict[int, dict[int, int]] = {}  # flat position -> token -> k
    length = batch.length
    stretches: list[tuple[int, int, list[int], list[int]]] = []
    for row_index, row in enumerate(batch.rows):
        for answer in row.answers:
            request = requests[answer.request]
            ids = request.continuation_ids[answer.first : answer.stop].tolist()
            begin = row_index * length + request.context_ids.size - 1 + answer.first - row.start
            columns = []
            for offset, token in enumerate(ids):
                known = targets.setdefault(begin + offset, {})
                columns.append(known.setdefault(token, len(known)))
            stretches.append((answer.request, begin, ids, columns))
    flat = np.array(sorted(targets), dtype=np.int64)
    width = max((len(known) for known in targets.values()), default=0)
    array = np.full((flat.size, width), NO_TARGET, dtype=np.int32)
    for r, place in enumerate(flat.tolist()):
        array[r, : len(targets[place])] = list(targets[place])
    answers = []
    for request_index, begin, ids, columns in stretches:
        first = int(np.searchsorted(flat, begin))
        answers.append((request_index, np.arange(first, first + len(ids)), np.array(columns, dtype=np.int64)))
    return _Wanted(flat, array, answers)
