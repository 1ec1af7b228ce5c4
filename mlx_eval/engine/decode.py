"""Continues prompts, in batches that refill as rows end.

mlx-lm's `BatchGenerator` keeps the KV caches and steps the rows; this module decides when a row is done.
Prompts are prefilled one at a time, because padding a prompt changes the answer of models with a
recurrent state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import mlx.core as mx
from mlx import nn

from mlx_eval import config
from mlx_eval.engine.sampling import row_sampler
from mlx_eval.engine.stops import AnswerText, Decode, Thinking
from mlx_eval.records import Generation, GenerationRequest

OnGeneration = Callable[[int, Generation], None]


def generate(
    model: nn.Module,
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
        model: an mlx-lm model.
        requests: prompts with their limits; in any order, the longest are started first.
        batch_size: rows decoded together.
        decode: ids to text, special tokens left out.
        eos_token_ids: every id that ends a sequence.
        on_generation: called once for each request index as its row ends.
        on_tokens: called with the number of tokens just computed, those of a prompt with its first answer token.
        thinking: the model's markers of a thinking section.
    """
    from mlx_lm.generate import BatchGenerator

    if not requests:
        return
    order = sorted(range(len(requests)), key=lambda i: (-len(requests[i].prompt_ids), requests[i].prompt_ids))
    stepped: Any = _Float32Logits(model)
    samplers: list[Any] = [row_sampler(requests[i].sampling) for i in order]  # None: greedy
    generator = BatchGenerator(
        stepped,
        stop_tokens=[[token] for token in sorted(eos_token_ids)] or None,
        completion_batch_size=batch_size,
        prefill_batch_size=1,
        prefill_step_size=config.PREFILL_STEP,
    )
    try:
        uids = generator.insert(
            [list(requests[i].prompt_ids) for i in order],
            max_tokens=[requests[i].max_tokens for i in order],
            samplers=samplers,
        )
        rows = {
            uid: _Row(index, AnswerText(decode, request.stop, thinking, request.in_thinking))
            for uid, index in zip(uids, order, strict=True)
            for request in [requests[index]]
        }
        while rows:
            for response in generator.next_generated():
                row = rows[response.uid]
                on_tokens(1 if row.has_begun else 1 + len(requests[row.index].prompt_ids))
                if reason := row.advance(response.token, response.finish_reason):
                    if response.finish_reason is None:
                        generator.remove([response.uid])
                    del rows[response.uid]
                    on_generation(row.index, row.result(reason))
    finally:
        generator.close()


class _Row:
    """One prompt's answer while it grows."""

    def __init__(self, index: int, answer: AnswerText) -> None:
        self.index = index
        self._answer = answer
        self._num_tokens = 0

    @property
    def has_begun(self) -> bool:
        """Whether any token has come."""
        return self._num_tokens > 0

    def advance(self, token: int, finish_reason: str | None) -> str | None:
        """Take one token; why the row ends with it, None when it goes on."""
        self._num_tokens += 1
        if finish_reason == "stop":  # an end-of-sequence token: no part of the text
            return "stop"
        return "stop" if self._answer.push(token) else finish_reason

    def result(self, reason: str) -> Generation:
        text, unfinished = self._answer.finish()
        return Generation(text, self._num_tokens, reason, unfinished)


class _Float32Logits:
    """The model with its logits as float32: in half types two close ones can turn equal when normalised."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        logits: mx.array = self._model(*args, **kwargs)
        return logits.astype(mx.float32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
