"""Continues prompts, in batches that refill as rows end. Knows requests and batches; computes nothing itself.

`arrivals.py` reads the prompts, `steps.py` computes the tokens, `answers.py` says when a row is done. Models whose
rows cannot be computed side by side are decoded a row at a time.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence, Set

import mlx.core as mx
import numpy as np
from mlx import nn

from mlx_eval import config
from mlx_eval.engine import attention, budget, together
from mlx_eval.engine.answers import UNDEFINED, AnswerRow
from mlx_eval.engine.arrivals import Arrivals
from mlx_eval.engine.counts import DecodeCounts
from mlx_eval.engine.execute import FAILURES
from mlx_eval.engine.prefill import read_alone
from mlx_eval.engine.row_caches import PlainCaches, ReadRows, RowCaches
from mlx_eval.engine.sharing import ModelSharing, find_sharing
from mlx_eval.engine.speculation import Speculation
from mlx_eval.engine.steps import RowBatch, Token
from mlx_eval.engine.stops import Decode, Thinking
from mlx_eval.engine.together import Decoding
from mlx_eval.errors import OutOfMemoryError
from mlx_eval.models.head import RowHead
from mlx_eval.models.loaded import num_positions
from mlx_eval.records import Generation, GenerationRequest

logger = logging.getLogger(__name__)

OnGeneration = Callable[[int, Generation], None]


class Decoder:
    """Continues prompts with one model."""

    def __init__(
        self,
        model: nn.Module,
        sharing: ModelSharing | None = None,
        *,
        speculate: int | None = 0,
        find_decoding: Callable[[], Decoding] | None = None,
        counts: DecodeCounts | None = None,
    ) -> None:
        """Prepare an mlx-lm model for decoding.

        Args:
            model: an mlx-lm model.
            sharing: what it allows, from an earlier self-test; None: it is tested when needed.
            speculate: the most tokens that are drafted of a greedy row from its own text; 0: none; None: as many
                as pay.
            find_decoding: tells whether its rows may be decoded together; None: the self-test does.
            counts: grow as the decoder works; None: counts of its own.
        """
        self._model = model
        self._given_sharing = sharing
        self._find_decoding = find_decoding or (lambda: together.find_decoding(model, self.sharing))
        self._speculation = None if speculate == 0 else Speculation(speculate)
        self._num_going = 0  # the most rows in a step of the last batch
        self.counts = DecodeCounts() if counts is None else counts
        """Of all runs."""

    def run(
        self,
        requests: Sequence[GenerationRequest],
        *,
        batch_size: int | None,
        decode: Decode,
        eos_token_ids: Set[int],
        on_generation: OnGeneration,
        on_tokens: Callable[[int], None] = lambda count: None,
        thinking: Thinking | None = None,
    ) -> None:
        """Continue every prompt until a stop text, an end-of-sequence token or its token limit.

        A row that gives NaN beside others is continued once more by itself. When memory runs out, unfinished rows go
        on from where they are, fewer at a time.

        Args:
            requests: prompts with their limits; in any order, those that may become longest are started first.
            batch_size: the most rows decoded together; None: `config.DECODE_ROWS`, or as many as memory allows.
            decode: ids to text, special tokens left out.
            eos_token_ids: every id that ends a sequence.
            on_generation: called once for each request index as its row ends.
            on_tokens: called with the number of tokens just computed, those of a prompt with its first answer token.
            thinking: the model's markers of a thinking section.

        Raises:
            ModelError: the model computes NaN. Answers that are finished have been handed out by then.
            OutOfMemoryError: there is not enough for one row.
        """
        rows = [
            AnswerRow(index, request, decode, eos_token_ids, thinking)
            for index, request in enumerate(requests)
        ]
        self.counts.prompt_tokens += sum(len(request.prompt_ids) for request in requests)
        num_repeated = 0
        with budget.wired(self._model):
            for row, token, alone in self._tokens(rows, batch_size):
                on_tokens(1 if row.answer_ids else 1 + len(row.request.prompt_ids))
                row.take(token)
                ended = row
                if row.finish_reason == UNDEFINED and not alone:
                    ended = row.again()
                    for other in self._alone(ended):
                        ended.take(other)
                    num_repeated += 1
                if ended.finish_reason:
                    self.counts.generated_tokens += len(ended.answer_ids)
                    on_generation(ended.index, ended.result())
        if num_repeated:
            logger.warning("%d prompts gave NaN beside others and were continued by themselves", num_repeated)

    @functools.cached_property
    def sharing(self) -> ModelSharing:
        """How far the model's rows may share prefixes and batches."""
        if self._given_sharing is not None:
            return self._given_sharing
        return find_sharing(self._model, RowHead(self._model, config.LOGITS_BYTES))

    @functools.cached_property
    def decoding(self) -> Decoding:
        """Whether rows of unequal length are continued rightly side by side."""
        found = self._find_decoding()
        if not found.together:
            logger.warning(
                "this model's rows cannot be decoded in batches: prompts are continued one at a time"
            )
        return found

    def _tokens(
        self, rows: Sequence[AnswerRow], batch_size: int | None
    ) -> Iterator[tuple[AnswerRow, Token, bool]]:
        """Yield each new token with its row and whether that is alone, until every row has a finish reason."""
        max_rows = config.DECODE_ROWS if batch_size is None else batch_size
        left = list(rows)
        while left and max_rows and self.decoding.together:
            left = [row for row in left if not row.finish_reason and self._has_past(row)]
            try:
                for row, token in self._together(left, max_rows):
                    yield row, token, False
            except FAILURES as error:
                if not (isinstance(error, RuntimeError) and budget.is_out_of_memory(error)):
                    logger.warning(
                        "the model refuses a batch (%s): going on with one prompt at a time", error
                    )
                    break
            left = [row for row in left if not row.finish_reason]
            if left:
                max_rows = min(max_rows, self._num_going) // 2
                self.counts.restarted_rows += sum(bool(row.answer_ids) for row in left)
                logger.warning("memory ran out: going on with at most %d rows", max_rows)
                mx.clear_cache()
        for row in rows:
            if not row.finish_reason:
                for token in self._alone(row):
                    yield row, token, True

    def _has_past(self, row: AnswerRow) -> bool:
        """Whether a batch can have the row: a recurrent state that has not begun is not the zeros of a batch."""
        return len(row.ids) > 1 or self.sharing.keys_only

    def _together(self, rows: Sequence[AnswerRow], max_rows: int) -> Iterator[tuple[AnswerRow, Token]]:
        """The same for rows side by side; those that find no memory are left without a finish reason."""
        arrivals = Arrivals(
            self._model, self.sharing, rows, budget.scoring_limits(self.sharing.cache), max_rows
        )
        caches = RowCaches(self.sharing.caches(self._model))
        batch = RowBatch(self._model, caches, num_positions(self._model))
        speculation = self._speculation if self.decoding.drafts else None
        drafted, accepted = (speculation.drafted, speculation.accepted) if speculation else (0, 0)
        if speculation:
            speculation.pause()
        going = _Going(arrivals, caches, batch, speculation)
        splits = self.sharing.way.splits_attention
        try:
            with attention.prefix_attention_in(self._model) if splits else contextlib.nullcontext():
                while going.refill():
                    yield from going.advance()
        finally:
            self._count(arrivals, batch)
            self._num_going = max(going.peak_rows, 1)
            self.counts.peak_rows = max(self.counts.peak_rows, going.peak_rows)
            if speculation:
                self.counts.drafted_tokens += speculation.drafted - drafted
                self.counts.accepted_tokens += speculation.accepted - accepted
                for row in rows:
                    speculation.end(row.index)

    def _count(self, arrivals: Arrivals, batch: RowBatch) -> None:
        counts, prompts = self.counts, arrivals.counts
        counts.unique_tokens += prompts.unique_tokens
        counts.prefill_tokens += prompts.tokens
        counts.prefill_padding += prompts.padding
        counts.prefill_forwards += prompts.forwards
        counts.steps += batch.num_steps
        counts.discarded_tokens += batch.num_discarded

    def _alone(self, row: AnswerRow) -> Iterator[Token]:
        """The tokens of a row with no other beside it, in mlx-lm's own caches.

        Raises:
            OutOfMemoryError: memory does not hold it.
        """
        batch = RowBatch(self._model, PlainCaches())
        try:
            ids = row.ids
            layers = read_alone(self._model, ids[:-1])
            batch.join([row.start()], ReadRows(np.array([len(ids) - 1], np.int32), None, layers))
            self.counts.unique_tokens += len(ids)
            self.counts.prefill_tokens += len(ids)
            self.counts.peak_rows = max(self.counts.peak_rows, 1)
            while not row.finish_reason:
                yield from batch.step()
            batch.leave({row.index})
        except RuntimeError as error:
            if not budget.is_out_of_memory(error):
                raise
            raise OutOfMemoryError(
                f"memory holds the model, but not a prompt of {len(row.request.prompt_ids)} tokens and its answer "
                "beside it: give a smaller --max_length, or quantise the model (--quantize 4)"
            ) from error
        finally:
            self.counts.steps += batch.num_steps
            self.counts.discarded_tokens += batch.num_discarded


class _Going:
    """Rows on their way through a batch."""

    def __init__(
        self, arrivals: Arrivals, caches: RowCaches, batch: RowBatch, speculation: Speculation | None
    ) -> None:
        self.peak_rows = 0
        self._arrivals = arrivals
        self._caches = caches
        self._batch = batch
        self._speculation = speculation
        self._rows: dict[int, AnswerRow] = {}
        self._is_short = False  # of memory: nothing joins any more
        self._last_read = time.perf_counter()

    def refill(self) -> bool:
        """Have rows join; whether any is in the batch."""
        if self._caches.nbytes > self._arrivals.rows_bytes and len(self._rows) > 1:
            self._put_back()
        while not self._is_short and (taken := self._arrivals.take(self._caches)):
            rows, read = taken
            self._batch.join([row.start() for row in rows], read)
            if self._speculation:
                self._speculation.pause()
            for row in rows:
                self._rows[row.index] = row
                if self._speculation and row.is_plain:
                    self._speculation.start(row.index, row.ids)
        return bool(self._rows)

    def advance(self) -> Iterator[tuple[AnswerRow, Token]]:
        """Compute a step and yield the tokens of the one before it; of a step with drafts, its own."""
        speculation = self._speculation
        num_rows = len(self._batch)
        self.peak_rows = max(self.peak_rows, num_rows)
        if speculation is None or not num_rows or not speculation.wants(num_rows):
            yield from self._deliver(self._batch.step())
            if speculation and num_rows:
                speculation.stepped(num_rows, self._seconds())
            return
        if known := self._batch.catch_up():
            yield from self._deliver(known)
            self._seconds()
            speculation.pause()
        num_rows = len(self._batch)
        drafts = self._batch.fitting(speculation.drafts(num_rows)) if num_rows else {}
        if drafts:
            tokens = self._batch.verify(drafts)
            counts = dict.fromkeys(drafts, -1)
            for token in tokens:
                if token.row in counts:
                    counts[token.row] += 1
            lengths = {row: len(draft) for row, draft in drafts.items()}
            speculation.verified(num_rows, counts, lengths, self._seconds())
            yield from self._deliver(tokens)
        elif num_rows:
            yield from self._deliver(self._batch.step())
            speculation.stepped(num_rows, self._seconds())

    def _deliver(self, tokens: Sequence[Token]) -> Iterator[tuple[AnswerRow, Token]]:
        """Yield tokens with their rows; those that are done then leave."""
        ended = set()
        for token in tokens:
            row = self._rows.get(token.row)
            if row is None:  # its answer ended before this one of several tokens
                self._batch.num_discarded += 1
                continue
            yield row, token
            if self._speculation and row.is_plain:
                self._speculation.push(row.index, [token.token_id])
            if row.finish_reason:
                del self._rows[row.index]
                ended.add(row.index)
                if self._speculation:
                    self._speculation.end(row.index)
        self._batch.leave(ended)

    def _put_back(self) -> None:
        """Let the half of the rows go that have the shortest answers."""
        self._is_short = True
        rows = sorted(self._rows.values(), key=lambda row: len(row.answer_ids))
        rows = rows[: (len(rows) + 1) // 2]  # so many that buffers shrink
        for row in rows:
            del self._rows[row.index]
            if self._speculation:
                self._speculation.end(row.index)
        self._batch.leave({row.index for row in rows})

    def _seconds(self) -> float:
        """Since the last time that this was asked."""
        now = time.perf_counter()
        seconds, self._last_read = now - self._last_read, now
        return seconds
