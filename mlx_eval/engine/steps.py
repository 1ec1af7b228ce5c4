"""Computes the next token of many rows at once, step after step. Knows token ids, caches and samplers, no text.

A step is sent before the tokens of the step before it are read: the device computes while the caller looks at
them. So a row that the caller ends has one token more on its way, which is thrown away; a row that reaches its
limit has none.

    call of `step`     1       2       3       4
    sent               a b     a b     a b c   b c
    read                       a b     a b     a b c     c joins before the third, a has a limit of three

Prompts are computed one at a time, because padding a prompt changes the answer of models with a recurrent state.
The last token of a prompt is left to the row's first step, which it shares with the other rows.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_eval_kernels import LogProb, logprob

from mlx_eval import config
from mlx_eval.engine.sampling import Sampler

CLEAR_STEPS: Final = 256
"""Steps after which buffers that MLX keeps are given back: sizes grow with the rows, and old ones pile up."""


class RowStart(NamedTuple):
    """A row that is about to join a batch."""

    row: int
    """The caller's number of it."""
    prompt_ids: Sequence[int]
    """At least one id. A prompt of one leaves no past: only rows of its kind may be in the batch then, because a
    recurrent state that has not begun is something else than the zeros that a batch has for it."""
    max_tokens: int
    """At least one."""
    sampler: Sampler | None = None
    """Draws its tokens; None: the most probable one."""


class Token(NamedTuple):
    """What a step gives for one row."""

    row: int
    token_id: int
    logprob: float
    """In nats, as the model gives it, whatever the sampling; not finite where it gives no distribution."""


@dataclass(slots=True)
class _Row:
    """A row in the batch."""

    number: int
    sampler: Sampler | None
    num_left: int
    """Tokens up to its limit that no step was sent for."""
    has_left: bool = False


class _Sent(NamedTuple):
    """A step that the device is computing."""

    rows: list[_Row]
    tokens: mx.array
    """[B] uint32"""
    logprobs: mx.array
    """[B] float32"""


class RowBatch:
    """The rows that are computed together, with their caches."""

    def __init__(self, model: nn.Module, *, merges: bool) -> None:
        """Start with no rows.

        Args:
            model: an mlx-lm model.
            merges: whether rows share a batch; else there is one row at a time, in mlx-lm's plain caches.
        """
        self._model = model
        self._merges = merges
        self._rows: list[_Row] = []
        self._caches: list[Any] = []
        self._inputs = mx.zeros(0, mx.uint32)  # [B] each row's newest token, which no step has read
        self._sent: _Sent | None = None
        self._num_steps = 0

    def __len__(self) -> int:
        """How many rows the next step has."""
        return len(self._rows)

    def join(self, starts: Sequence[RowStart]) -> None:
        """Compute the prompts of rows and take them into the batch."""
        if not starts:
            return
        if not self._merges and len(starts) + len(self._rows) > 1:
            raise ValueError("rows whose caches are not merged are computed one at a time")
        rows = [_prefilled(self._model, start.prompt_ids[:-1]) for start in starts]
        joined = _merged(rows) if self._merges else rows[0]
        if self._caches:
            for cache, other in zip(self._caches, joined, strict=True):
                cache.extend(other)
        else:
            self._caches = joined
        last = mx.array([start.prompt_ids[-1] for start in starts], mx.uint32)
        self._inputs = mx.concatenate([self._inputs, last])
        new = [_Row(start.row, start.sampler, start.max_tokens) for start in starts]
        self._rows = [*self._rows, *new]

    def step(self) -> list[Token]:
        """Send a step for all rows and give the tokens of the one before it.

        Returns:
            A token for each row of the step before that has not left, in the order that the rows joined.
        """
        before = self._sent
        self._sent = self._send() if self._rows else None
        self._keep([place for place, row in enumerate(self._rows) if row.num_left])
        if before is None:
            return []
        tokens, logprobs = np.array(before.tokens).tolist(), np.array(before.logprobs).tolist()
        found = zip(before.rows, tokens, logprobs, strict=True)
        return [Token(row.number, token, score) for row, token, score in found if not row.has_left]

    def leave(self, numbers: Container[int]) -> None:
        """Drop rows, and what was sent for them."""
        for row in [*self._rows, *(self._sent.rows if self._sent else ())]:
            row.has_left |= row.number in numbers
        self._keep([place for place, row in enumerate(self._rows) if not row.has_left])

    def _send(self) -> _Sent:
        """Have the device compute the next token of every row."""
        logits = self._model(self._inputs[:, None], cache=self._caches)[:, -1]  # [B, V]
        found = logprob(logits, mx.zeros((len(self._rows), 0), mx.int32))
        tokens, logprobs = found.argmax, found.argmax_logprob
        if any(row.sampler for row in self._rows):
            tokens, logprobs = _drawn(logits, found, [row.sampler for row in self._rows])
        mx.async_eval(tokens, logprobs)
        self._inputs = tokens
        for row in self._rows:
            row.num_left -= 1
        self._num_steps += 1
        if self._num_steps % CLEAR_STEPS == 0:
            mx.clear_cache()
        return _Sent(self._rows, tokens, logprobs)

    def _keep(self, places: list[int]) -> None:
        """Go on with the rows at `places`."""
        if len(places) == len(self._rows):
            return
        self._rows = [self._rows[place] for place in places]
        self._inputs = self._inputs[mx.array(places, mx.uint32)]
        if not places:
            self._caches = []
        for cache in self._caches:
            cache.filter(places)


def _prefilled(model: nn.Module, ids: Sequence[int]) -> list[Any]:
    """Caches of one row after `ids`."""
    from mlx_lm.models.cache import make_prompt_cache

    caches: list[Any] = make_prompt_cache(model)
    for begin in range(0, len(ids), config.PREFILL_STEP):
        model(mx.array([ids[begin : begin + config.PREFILL_STEP]]), cache=caches)
        # only what the caches hold: the head is never computed
        mx.eval([cache.state for cache in caches])
        mx.clear_cache()
    return caches


def _merged(rows: Sequence[list[Any]]) -> list[Any]:
    """One batch cache a layer of the caches of single rows."""
    return [layer[0].merge(list(layer)) for layer in zip(*rows, strict=True)]


def _drawn(logits: mx.array, found: LogProb, samplers: Sequence[Sampler | None]) -> tuple[mx.array, mx.array]:
    """Tokens [B] and their log-probabilities [B] where some rows sample: those alone get all of theirs, [1, V]."""
    tokens, logprobs = [], []
    for place, sampler in enumerate(samplers):
        row = slice(place, place + 1)
        if sampler is None:
            tokens.append(found.argmax[row])
            logprobs.append(found.argmax_logprob[row])
        else:
            scores = logits[row].astype(mx.float32) - found.logsumexp[row]  # [1, V]
            token = sampler(scores).astype(mx.uint32)  # [1]
            tokens.append(token)
            logprobs.append(mx.take_along_axis(scores, token[:, None], axis=-1)[:, 0])
    return mx.concatenate(tokens), mx.concatenate(logprobs)
