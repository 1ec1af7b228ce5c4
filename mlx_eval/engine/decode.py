"""Continues prompts, in batches that refill as rows end.

mlx-lm's `BatchGenerator` keeps the KV caches and steps the rows; this module decides when a row is done.
Prompts are prefilled one at a time, because padding a prompt changes the answer of models with a
recurrent state. Models that mlx-lm cannot decode in batches are decoded a row at a time.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Generator, Sequence, Set
from typing import Any

import mlx.core as mx
from mlx import nn

from mlx_eval import config
from mlx_eval.engine.sampling import row_sampler
from mlx_eval.engine.stops import AnswerText, Decode, Thinking
from mlx_eval.engine.together import decodes_together
from mlx_eval.records import Generation, GenerationRequest

logger = logging.getLogger(__name__)

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

        Args:
            requests: prompts with their limits; in any order, the longest are started first.
            batch_size: the most rows decoded together.
            decode: ids to text, special tokens left out.
            eos_token_ids: every id that ends a sequence.
            on_generation: called once for each request index as its row ends.
            on_tokens: called with the number of tokens just computed, those of a prompt with its first answer token.
            thinking: the model's markers of a thinking section.
        """
        order = sorted(
            range(len(requests)), key=lambda i: (-len(requests[i].prompt_ids), requests[i].prompt_ids)
        )
        rows = [
            _Row(i, requests[i], AnswerText(decode, requests[i].stop, thinking, requests[i].in_thinking))
            for i in order
        ]
        stepped: Any = _Float32Logits(self._model)
        steps = (
            _steps_together(stepped, rows, batch_size, eos_token_ids)
            if batch_size > 1 and len(rows) > 1 and self._decodes_together
            else _steps_alone(stepped, rows)
        )
        with contextlib.closing(steps):
            for row, token in steps:
                on_tokens(1 if row.num_tokens else 1 + len(row.request.prompt_ids))
                row.advance(token, is_eos=token in eos_token_ids)
                if row.finish_reason:
                    on_generation(row.index, row.result())

    @functools.cached_property
    def _decodes_together(self) -> bool:
        """Whether mlx-lm continues rows of unequal length rightly side by side."""
        together = decodes_together(self._model)
        if not together:
            logger.warning("mlx-lm cannot decode this model in batches: prompts are continued one at a time")
        return together


def _steps_together(
    model: Any, rows: Sequence[_Row], batch_size: int, eos_token_ids: Set[int]
) -> Generator[tuple[_Row, int], None, None]:
    """Yield each new token with its row, until every row has a finish reason."""
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(
        model,
        stop_tokens=[[token] for token in sorted(eos_token_ids)] or None,
        completion_batch_size=batch_size,
        prefill_batch_size=1,
        prefill_step_size=config.PREFILL_STEP,
    )
    samplers: list[Any] = [row_sampler(row.request.sampling) for row in rows]  # None: greedy
    try:
        uids = generator.insert(
            [list(row.request.prompt_ids) for row in rows],
            max_tokens=[row.request.max_tokens for row in rows],
            samplers=samplers,
        )
        waiting = dict(zip(uids, rows, strict=True))
        while waiting:
            for response in generator.next_generated():
                row = waiting[response.uid]
                yield row, response.token
                if row.finish_reason:
                    if response.finish_reason is None:
                        generator.remove([response.uid])
                    del waiting[response.uid]
    finally:
        generator.close()


def _steps_alone(model: Any, rows: Sequence[_Row]) -> Generator[tuple[_Row, int], None, None]:
    """The same, one row after the other."""
    from mlx_lm.generate import generate_step

    for row in rows:
        steps: Any = generate_step(
            mx.array(row.request.prompt_ids),
            model,
            max_tokens=row.request.max_tokens,
            sampler=row_sampler(row.request.sampling),
            prefill_step_size=config.PREFILL_STEP,
        )
        with contextlib.closing(steps):
            for token, _ in steps:
                yield row, token
                if row.finish_reason:
                    break


class _Row:
    """One prompt's answer while it grows."""

    def __init__(self, index: int, request: GenerationRequest, answer: AnswerText) -> None:
        self.index = index
        self.request = request
        self.num_tokens = 0
        self.finish_reason: str | None = None
        """`stop` or `length`; None while the row goes on."""
        self._answer = answer

    def advance(self, token: int, *, is_eos: bool) -> None:
        """Take one token; an end-of-sequence token is no part of the text."""
        self.num_tokens += 1
        if is_eos or self._answer.push(token):
            self.finish_reason = "stop"
        elif self.num_tokens == self.request.max_tokens:
            self.finish_reason = "length"

    def result(self) -> Generation:
        """The answer of a finished row."""
        assert self.finish_reason is not None
        text, unfinished = self._answer.finish()
        return Generation(text, self.num_tokens, self.finish_reason, unfinished)


class _Float32Logits:
    """The model with its logits as float32: in half types two close ones can turn equal when normalised."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        logits: mx.array = self._model(*args, **kwargs)
        return logits.astype(mx.float32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
