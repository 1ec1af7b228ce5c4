"""One prompt's answer while it grows: its tokens, its text, and whether it is done. Knows no model and no batch."""

from __future__ import annotations

import math
from collections.abc import Set
from typing import Final

from mlx_eval.engine.sampling import row_sampler
from mlx_eval.engine.steps import RowStart, Token
from mlx_eval.engine.stops import AnswerText, Decode, Thinking
from mlx_eval.errors import ModelError
from mlx_eval.records import Generation, GenerationRequest

UNDEFINED: Final = "undefined"
"""The finish reason of a row whose next token the model gives no distribution for; no `Generation` has it."""


class AnswerRow:
    """A row of a batch, before, while and after it is decoded."""

    def __init__(
        self,
        index: int,
        request: GenerationRequest,
        decode: Decode,
        eos_token_ids: Set[int],
        thinking: Thinking | None,
    ) -> None:
        """Begin with an empty answer.

        Args:
            index: the row's number, that of its request.
            request: the prompt and its limits.
            decode: ids to text, special tokens left out.
            eos_token_ids: every id that ends a sequence.
            thinking: the model's markers of a thinking section.
        """
        self.index = index
        self.request = request
        self.answer_ids: list[int] = []
        """Every token of the answer, one that ends the sequence included."""
        self.finish_reason: str | None = None
        """`stop`, `length` or `UNDEFINED`; None while the row goes on."""
        self._decode = decode
        self._eos_token_ids = eos_token_ids
        self._thinking = thinking
        self._text = AnswerText(decode, request.stop, thinking, request.in_thinking)

    @property
    def ids(self) -> tuple[int, ...]:
        """The prompt and the answer so far: what the row goes on from."""
        return (*self.request.prompt_ids, *self.answer_ids)

    @property
    def num_left(self) -> int:
        """Tokens that the answer may still have."""
        return self.request.max_tokens - len(self.answer_ids)

    @property
    def is_plain(self) -> bool:
        """Whether the next token is the model's most probable one and nothing else."""
        return self.request.sampling.takes_largest

    def again(self) -> AnswerRow:
        """The same row before its first token."""
        return AnswerRow(self.index, self.request, self._decode, self._eos_token_ids, self._thinking)

    def start(self) -> RowStart:
        """What the row is to a batch that it joins now."""
        ids = self.ids
        sampler = row_sampler(self.request.sampling, ids, num_drawn=len(self.answer_ids))
        return RowStart(self.index, ids[-1], self.num_left, sampler)

    def take(self, token: Token) -> None:
        """Add one token; an end-of-sequence token is no part of the text."""
        if not math.isfinite(token.logprob):
            self.finish_reason = UNDEFINED
            return
        self.answer_ids.append(token.token_id)
        if token.token_id in self._eos_token_ids or self._text.push(token.token_id):
            self.finish_reason = "stop"
        elif not self.num_left:
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
                f"and {len(self.answer_ids)} of its answer: its weights are damaged, or overflow in half precision "
                "(try --dtype float32)"
            )
        text, unfinished = self._text.finish()
        return Generation(text, len(self.answer_ids), self.finish_reason, unfinished)
