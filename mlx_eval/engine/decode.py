"""Continues prompts, in batches that refill as rows end. Knows requests, stops and texts.

`steps.py` computes the tokens; this module decides which rows are in the batch and when one is done. Models whose
rows mlx-lm cannot compute side by side are decoded a row at a time.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Final

from mlx import nn

from mlx_eval.engine import budget
from mlx_eval.engine.sampling import row_sampler
from mlx_eval.engine.steps import RowBatch, RowStart, Token
from mlx_eval.engine.stops import AnswerText, Decode, Thinking
from mlx_eval.engine.together import decodes_together
from mlx_eval.errors import ModelError
from mlx_eval.records import Generation, GenerationRequest

logger = logging.getLogger(__name__)

UNDEFINED: Final = "undefined"
"""The finish reason of a row whose next token the model gives no distribution for. It never leaves this module."""

OnGeneration = Callable[[int, Generation], None]


class Decoder:
    """Continues prompts with one model."""

    def __init__(self, model: nn.Module) -> None:
        """Prepare an mlx-lm model for decoding."""
        self._model = model

    def run(
        self,
        requests: Sequence[GenerationRequest],
        *,
        batch_size: int,
        decode: Decode,
        eos_token_ids: Set[int],
        on_generation: OnGeneration,
        on_tokens: Callable[[int], None] = lambda count: None,
        thinking: Thinking | None = None,
    ) -> None:
        """Continue every prompt until a stop text, an end-of-sequence token or its token limit.

        A row that gives NaN beside others is continued once more by itself.

        Args:
            requests: prompts with their limits; in any order, the longest are started first.
            batch_size: the most rows decoded together.
            decode: ids to text, special tokens left out.
            eos_token_ids: every id that ends a sequence.
            on_generation: called once for each request index as its row ends.
            on_tokens: called with the number of tokens just computed, those of a prompt with its first answer token.
            thinking: the model's markers of a thinking section.

        Raises:
            ModelError: the model computes NaN. Answers that are finished have been handed out by then.
        """
        order = sorted(
            range(len(requests)), key=lambda i: (-len(requests[i].prompt_ids), requests[i].prompt_ids)
        )
        rows = [_Row(i, requests[i], decode, eos_token_ids, thinking) for i in order]
        num_repeated = 0
        with budget.wired(self._model):
            for row, token, alone in self._steps(rows, batch_size):
                on_tokens(1 if row.num_tokens else 1 + len(row.request.prompt_ids))
                row.take(token)
                ended = row
                if row.finish_reason == UNDEFINED and not alone:
                    ended = self._alone(row)
                    num_repeated += 1
                if ended.finish_reason:
                    on_generation(ended.index, ended.result())
        if num_repeated:
            logger.warning("%d prompts gave NaN beside others and were continued by themselves", num_repeated)

    def _steps(self, rows: Sequence[_Row], batch_size: int) -> Iterator[tuple[_Row, Token, bool]]:
        """Yield each new token with its row and whether that is alone, until every row has a finish reason."""
        rows_with_past = [row for row in rows if len(row.request.prompt_ids) > 1]
        others = [row for row in rows if len(row.request.prompt_ids) == 1]
        together = batch_size > 1 and len(rows_with_past) > 1 and self._decodes_together
        for row, token in _tokens(self._model, rows_with_past, batch_size if together else 1):
            yield row, token, not together
        for row, token in _tokens(self._model, others, max_rows=1):  # `RowStart` says why
            yield row, token, True

    def _alone(self, row: _Row) -> _Row:
        """The answer of a row that gave NaN, from the start and with no other row beside it."""
        again = row.again()
        for _, token in _tokens(self._model, [again], max_rows=1):
            again.take(token)
        return again

    @functools.cached_property
    def _decodes_together(self) -> bool:
        """Whether mlx-lm continues rows of unequal length rightly side by side."""
        together = decodes_together(self._model)
        if not together:
            logger.warning("mlx-lm cannot decode this model in batches: prompts are continued one at a time")
        return together


def _tokens(model: nn.Module, rows: Sequence[_Row], max_rows: int) -> Iterator[tuple[_Row, Token]]:
    """The same, with at most `max_rows` in one batch."""
    batch = RowBatch(model, merges=max_rows > 1)
    waiting = deque(rows)
    going: dict[int, _Row] = {}
    while waiting or going:
        joining = [waiting.popleft() for _ in range(min(len(waiting), max_rows - len(batch)))]
        batch.join([row.start() for row in joining])
        going |= {row.index: row for row in joining}
        ended = set()
        for token in batch.step():
            row = going[token.row]
            yield row, token
            if row.finish_reason:
                del going[token.row]
                ended.add(token.row)
        batch.leave(ended)


class _Row:
    """One prompt's answer while it grows."""

    def __init__(
        self,
        index: int,
        request: GenerationRequest,
        decode: Decode,
        eos_token_ids: Set[int],
        thinking: Thinking | None,
    ) -> None:
        self.index = index
        self.request = request
        self.num_tokens = 0
        self.finish_reason: str | None = None
        """`stop`, `length` or `UNDEFINED`; None while the row goes on."""
        self._decode = decode
        self._eos_token_ids = eos_token_ids
        self._thinking = thinking
        self._answer = AnswerText(decode, request.stop, thinking, request.in_thinking)

    def again(self) -> _Row:
        """The same row before its first token."""
        return _Row(self.index, self.request, self._decode, self._eos_token_ids, self._thinking)

    def start(self) -> RowStart:
        """What the row is to a batch."""
        request = self.request
        return RowStart(self.index, request.prompt_ids, request.max_tokens, row_sampler(request.sampling))

    def take(self, token: Token) -> None:
        """Add one token; an end-of-sequence token is no part of the text."""
        if not math.isfinite(token.logprob):
            self.finish_reason = UNDEFINED
            return
        self.num_tokens += 1
        if token.token_id in self._eos_token_ids or self._answer.push(token.token_id):
            self.finish_reason = "stop"
        elif self.num_tokens == self.request.max_tokens:
            self.finish_reason = "length"

    def result(self) -> Generation:
        """The answer of a row that has a finish reason.

        Raises:
            ModelError: it is that the model gives no next token.
        """
        assert self.finish_reason is not None
        if self.finish_reason == UNDEFINED:
            raise ModelError(
                f"the model computes NaN or infinite logits after a prompt of {len(self.request.prompt_ids)} tokens "
                f"and {self.num_tokens} of its answer: its weights are damaged, or overflow in half precision "
                "(try --dtype float32)"
            )
        text, unfinished = self._answer.finish()
        return Generation(text, self.num_tokens, self.finish_reason, unfinished)
