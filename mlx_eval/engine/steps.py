"""Computes the next tokens of many rows at once, step after step. Knows token ids, caches and samplers, no text.

A step is sent before the tokens of the step before it are read: the device computes while the caller looks at
them. So a row that the caller ends has one token more on its way, which is thrown away; a row that reaches its
limit has none.

    call of `step`     1       2       3       4
    sent               a b     a b     a b c   b c
    read                       a b     a b     a b c     c joins before the third, a has a limit of three

Drafts are tokens that a row may go on with. To verify them all tokens must be known, so a step with drafts waits.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_eval_kernels import LogProb, logprob

from mlx_eval.engine.batches import PAD_ID
from mlx_eval.engine.row_caches import PlainCaches, ReadRows, RowCaches
from mlx_eval.engine.sampling import Sampler, draw

CLEAR_STEPS: Final = 256
"""Steps after which buffers that MLX keeps are given back: sizes grow with the rows, and old ones pile up."""


class RowStart(NamedTuple):
    """A row that is about to join a batch, its prompt read but for the last token."""

    row: int
    """The caller's number of it."""
    last_id: int
    """The last token of its prompt."""
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


@dataclass(slots=True, eq=False)
class _Row:
    """A row in the batch."""

    number: int
    sampler: Sampler | None
    num_left: int
    """Tokens up to its limit that no step was sent for."""
    newest_id: int
    """The last token of it that was read."""
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

    def __init__(
        self, model: nn.Module, caches: RowCaches | PlainCaches, num_positions: int | None = None
    ) -> None:
        """Start with no rows.

        Args:
            model: an mlx-lm model.
            caches: of the same model, without rows.
            num_positions: of a model with a learned table of them, which no draft may go beyond.
        """
        self._model = model
        self._caches = caches
        self._num_positions = num_positions
        self._places: list[_Row | None] = []
        self._inputs = mx.zeros(0, mx.uint32)  # [B] each place's newest token, which no step has read
        self._sent: _Sent | None = None
        self.num_steps = 0
        """Forward passes."""
        self.num_discarded = 0
        """Tokens that were computed for rows that had ended."""

    def __len__(self) -> int:
        """How many rows the next step has."""
        return self._caches.num_rows

    @property
    def nbytes(self) -> int:
        """Memory of what the rows remember."""
        return self._caches.nbytes

    def join(self, starts: Sequence[RowStart], rows: ReadRows) -> None:
        """Take rows into the batch.

        Args:
            starts: k of them.
            rows: what the model remembers of their prompts but for the last token, in the same order.
        """
        places = self._caches.join(rows)
        size = max(len(self._places), max(places) + 1)
        self._places += [None] * (size - len(self._places))
        is_new = np.zeros(size, np.bool_)
        last = np.zeros(size, np.uint32)
        for place, start in zip(places, starts, strict=True):
            self._places[place] = _Row(start.row, start.sampler, start.max_tokens, start.last_id)
            is_new[place], last[place] = True, start.last_id
        known = mx.pad(self._inputs, (0, size - self._inputs.size))
        self._inputs = mx.where(mx.array(is_new), mx.array(last), known)

    def step(self) -> list[Token]:
        """Send a step for all rows and give the tokens of the one before it.

        Returns:
            A token for each row of the step before that has not left.
        """
        before = self._sent
        self._sent = self._send() if len(self) else None
        return [] if before is None else _read(before)

    def catch_up(self) -> list[Token]:
        """Give the tokens of the step that was sent and send none."""
        before, self._sent = self._sent, None
        return [] if before is None else _read(before)

    def fitting(self, drafts: Mapping[int, Sequence[int]]) -> dict[int, Sequence[int]]:
        """Drafts by row, cut where the row's limit comes before, or a position that the model has not; none empty."""
        room = None
        if self._num_positions is not None:
            room = max(0, self._num_positions - self._caches.longest - 1)
        cut = {
            row.number: drafts[row.number][: min(row.num_left - 1, row.num_left if room is None else room)]
            for row in self._places
            if row is not None and row.number in drafts
        }
        return {number: draft for number, draft in cut.items() if len(draft)}

    def verify(self, drafts: Mapping[int, Sequence[int]]) -> list[Token]:
        """Compute a step in which rows go on with as many of their drafted tokens as are the model's own.

        No step may be on its way.

        Args:
            drafts: by row, as `fitting` has cut them; of greedy rows only.

        Returns:
            One token or more for each row, those of a row in order.
        """
        if self._sent is not None:
            raise ValueError("a step is on its way: its tokens must be read first")
        rows = self._compacted()
        length = 1 + max(map(len, drafts.values()), default=0)
        inputs = np.full((len(rows), length), PAD_ID, np.uint32)
        for place, row in enumerate(rows):
            ids = (row.newest_id, *drafts.get(row.number, ()))
            inputs[place, : len(ids)] = ids
        logits = self._forward(mx.array(inputs))  # [B, T, V]
        found = logprob(logits.reshape(-1, logits.shape[-1]), mx.zeros((inputs.size, 0), mx.int32))
        best, scores = found.argmax.reshape(inputs.shape), found.argmax_logprob.reshape(inputs.shape)
        if any(row.sampler for row in rows):
            first = LogProb(*(part.reshape(*inputs.shape, *part.shape[1:])[:, 0] for part in found))
            drawn, drawn_scores = _drawn(logits[:, 0], first, [row.sampler for row in rows])
            best = mx.concatenate([drawn[:, None], best[:, 1:]], axis=1)
            scores = mx.concatenate([drawn_scores[:, None], scores[:, 1:]], axis=1)
        tokens: list[Token] = []
        read = np.zeros(len(rows), np.int32)
        best_ids, best_scores = np.array(best), np.array(scores)
        for place, row in enumerate(rows):
            draft = np.array(drafts.get(row.number, ()), np.int64)
            wrong = np.flatnonzero(best_ids[place, : draft.size] != draft)
            count = 1 + (int(wrong[0]) if wrong.size else draft.size)
            read[place] = count
            row.num_left -= count
            row.newest_id = int(best_ids[place, count - 1])
            tokens += [
                Token(row.number, int(best_ids[place, index]), float(best_scores[place, index]))
                for index in range(count)
            ]
        self._caches.advance(read)
        self._inputs = mx.array(np.array([row.newest_id for row in rows], np.uint32))
        self._leave_at_limit()
        return tokens

    def leave(self, numbers: Container[int]) -> None:
        """Drop rows, and what was sent for them."""
        for row in self._sent.rows if self._sent else ():
            if row.number in numbers and not row.has_left:
                row.has_left = True
                self.num_discarded += 1
        self._let_go([place for place, row in enumerate(self._places) if row and row.number in numbers])

    def _send(self) -> _Sent:
        """Have the device compute the next token of every row."""
        rows = self._compacted()
        logits = self._forward(self._inputs[:, None])[:, -1]  # [B, V]
        found = logprob(logits, mx.zeros((len(rows), 0), mx.int32))
        tokens, logprobs = found.argmax, found.argmax_logprob
        if any(row.sampler for row in rows):
            tokens, logprobs = _drawn(logits, found, [row.sampler for row in rows])
        mx.async_eval(tokens, logprobs)
        self._inputs = tokens
        self._caches.advance(1)
        for row in rows:
            row.num_left -= 1
        self._leave_at_limit()
        return _Sent(rows, tokens, logprobs)

    def _forward(self, inputs: mx.array) -> mx.array:
        """Logits [B, T, V] after tokens [B, T]."""
        self._caches.begin_step(inputs.shape[1])
        self.num_steps += 1
        if self.num_steps % CLEAR_STEPS == 0:
            mx.clear_cache()
        logits: mx.array = self._model(inputs, cache=self._caches.objects)
        return logits

    def _compacted(self) -> list[_Row]:
        """The rows of the next step; places are closed that nobody has taken."""
        order = self._caches.compact()
        if order is not None:
            self._places = [self._places[place] for place in order]
            self._inputs = self._inputs[mx.array(order)]
        return [row for row in self._places if row is not None]

    def _leave_at_limit(self) -> None:
        self._let_go([place for place, row in enumerate(self._places) if row and not row.num_left])

    def _let_go(self, places: Sequence[int]) -> None:
        for place in places:
            self._places[place] = None
        self._caches.leave(places)


def _read(sent: _Sent) -> list[Token]:
    """Wait for a step; its tokens but for those of rows that have left."""
    tokens, logprobs = np.array(sent.tokens).tolist(), np.array(sent.logprobs).tolist()
    found = []
    for row, token, score in zip(sent.rows, tokens, logprobs, strict=True):
        row.newest_id = token
        if not row.has_left:
            found.append(Token(row.number, token, score))
    return found


def _drawn(logits: mx.array, found: LogProb, samplers: Sequence[Sampler | None]) -> tuple[mx.array, mx.array]:
    """Tokens [B] and their log-probabilities [B] where some rows sample: those alone are drawn from logits [B, V]."""
    places = [place for place, sampler in enumerate(samplers) if sampler is not None]
    index = mx.array(np.array(places, np.int32))
    chosen = logits[index]  # [n, V]
    tokens = draw(chosen, [sampler for sampler in samplers if sampler is not None])
    scores = mx.take_along_axis(chosen, tokens[:, None], axis=-1)[:, 0].astype(mx.float32)
    scores = scores - found.logsumexp[index]
    if len(places) == len(samplers):
        return tokens, scores
    # positions of the drawn ones among all, the others as they are
    drawn = np.full(len(samplers), -1, np.int32)
    drawn[places] = np.arange(len(places))
    is_drawn, source = mx.array(drawn >= 0), mx.array(np.maximum(drawn, 0))
    return (
        mx.where(is_drawn, tokens[source], found.argmax.astype(tokens.dtype)),
        mx.where(is_drawn, scores[source], found.argmax_logprob),
    )
