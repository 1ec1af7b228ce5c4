"""Whether a model's rows can be decoded together: asked of the model itself, as no class or name tells.

Knows the caches that decoding steps over; knows neither requests nor text. Five short rows that join and leave at
different times are fed ids that are fixed before, and what the model says of them is compared with each row alone in
mlx-lm's own caches. Models that differ are decoded a row at a time (gemma2's grouped heads take the mask of rows
for one of heads, for example).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx import nn

from mlx_eval.engine import attention
from mlx_eval.engine.batches import Level, Limits
from mlx_eval.engine.execute import FAILURES
from mlx_eval.engine.plan import plan_prompts
from mlx_eval.engine.prefill import Prefill, read_alone
from mlx_eval.engine.row_caches import PlainCaches, ReadRows, RowCaches
from mlx_eval.engine.sharing import ModelSharing, in_float32, tolerance

logger = logging.getLogger(__name__)

FloatArray = npt.NDArray[np.float64]

PROMPTS: Final = ((17, 5), (17, 3), (0, 4), (0, 7), (17, 2))
"""Tokens of each row that it shares with the others behind the same stem, and tokens of its own."""
NUM_TOKENS: Final = 8
"""Tokens that each row is fed after its prompt."""
MAX_ID: Final = 6
"""Ids are below it: valid for any vocabulary of so many or more."""


class _Step(NamedTuple):
    """One call of the model."""

    join: tuple[int, ...] = ()
    leave: tuple[int, ...] = ()
    num_new: int = 1
    """Tokens of each row."""
    read: tuple[int, ...] = ()
    """How many of them each row of the batch is taken to have read, in turn; empty: all."""


PLAIN_STEPS: Final = (
    _Step(join=(0, 1)),
    _Step(join=(2,)),
    _Step(join=(3,), leave=(0,)),
    _Step(join=(4,)),
    _Step(leave=(2,)),
)
"""Rows begin, join others behind the same prefix and behind none, leave holes that are filled and closed."""
DRAFT_STEPS: Final = (
    _Step(join=(0, 1, 2)),
    _Step(num_new=3, read=(3, 1, 2)),
    _Step(leave=(1,)),
    _Step(join=(3, 4), num_new=2, read=(1, 2)),
    _Step(),
)
"""Rows take several tokens at once and forget some of them."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """What a model allows."""

    together: bool
    """Whether rows may be decoded side by side."""
    drafts: bool
    """Whether a row may be given several tokens in a step, some of which it forgets."""


ALONE: Final = Decoding(together=False, drafts=False)


def find_decoding(model: nn.Module, sharing: ModelSharing) -> Decoding:
    """Compare rows side by side with each alone.

    Args:
        model: an mlx-lm model.
        sharing: what the self-test of scoring found of it.

    Raises:
        Exception: whatever the model raises for a single row.
    """
    if sharing.way.level < Level.EQUAL:
        return ALONE
    wide = in_float32(model)
    alone = [_logits_alone(wide, row) for row in range(len(PROMPTS))]
    if not _agree(wide, sharing, alone, PLAIN_STEPS):
        return ALONE
    return Decoding(together=True, drafts=sharing.keys_only and _agree(wide, sharing, alone, DRAFT_STEPS))


def _agree(
    model: nn.Module, sharing: ModelSharing, alone: Sequence[FloatArray], steps: Sequence[_Step]
) -> bool:
    """Whether rows are the same but for rounding. A model that gives NaN has other troubles than batches."""
    try:
        together = _logits_together(model, sharing, steps)
    except FAILURES as error:
        logger.debug("rows side by side: %s", error)
        return False
    errors, wanted = [], []
    for row, place, logits in together:
        finite = np.isfinite(alone[row][place])  # of some models, tokens that never come are -inf
        errors.append(np.abs(logits[finite] - alone[row][place][finite]))
        wanted.append(alone[row][place][finite])
    found = np.concatenate(errors)
    if not found.size:
        return True
    if not np.isfinite(found).all():
        return False
    # in a mixture of experts rounding may send a token to another expert: a hundredth of the logits may be far off
    return float(np.quantile(found, 0.99)) <= tolerance(mx.float32) * float(np.std(np.concatenate(wanted)))


def _ids(row: int) -> list[int]:
    """The prompt of a row and the ids that it is fed."""
    shared, own = PROMPTS[row]
    stem = np.random.default_rng(0).integers(1, MAX_ID, shared)
    rest = np.random.default_rng(1 + row).integers(1, MAX_ID, own + NUM_TOKENS)
    rest[0] = 1 + row  # rows differ from their first own token on
    return [*stem.tolist(), *rest.tolist()]


def _length(row: int) -> int:
    """Tokens of a row's prompt."""
    return sum(PROMPTS[row])


def _logits_alone(model: nn.Module, row: int) -> FloatArray:
    """Logits [NUM_TOKENS, V] of one row, step by step."""
    ids, length = _ids(row), _length(row)
    caches = PlainCaches()
    caches.join(ReadRows(np.array([length], np.int32), None, read_alone(model, ids[:length])))
    logits = [model(mx.array([[token]]), cache=caches.objects)[0, -1] for token in ids[length:]]
    return np.array(mx.stack(logits).astype(mx.float32)).astype(np.float64)


def _logits_together(
    model: nn.Module, sharing: ModelSharing, steps: Sequence[_Step]
) -> list[tuple[int, int, FloatArray]]:
    """(row, index of the token after its prompt, logits [V]) of everything that the rows read."""
    factory = sharing.caches(model)
    caches = RowCaches(factory)
    found: list[tuple[int, int, FloatArray]] = []
    places: list[int | None] = []
    done = dict.fromkeys(range(len(PROMPTS)), 0)
    with attention.prefix_attention_in(model) if factory.splits_attention else contextlib.nullcontext():
        waiting = _read_prompts(model, sharing)
        for step in steps:
            caches.leave([place for place, row in enumerate(places) if row in step.leave])
            places = [None if row in step.leave else row for row in places]
            for row in step.join:
                (place,) = caches.join(waiting[row])
                places += [None] * (place + 1 - len(places))
                places[place] = row
            order = caches.compact()
            if order is not None:
                places = [places[place] for place in order]
            rows = [row for row in places if row is not None]
            inputs = []
            for row in rows:
                begin = _length(row) + done[row]
                inputs.append(_ids(row)[begin : begin + step.num_new])
            caches.begin_step(step.num_new)
            logits = model(mx.array(inputs), cache=caches.objects)  # [B, T, V]
            values = np.array(logits.astype(mx.float32)).astype(np.float64)
            read = [
                step.read[index % len(step.read)] if step.read else step.num_new for index in range(len(rows))
            ]
            for index, row in enumerate(rows):
                found += [(row, done[row] + token, values[index, token]) for token in range(read[index])]
                done[row] += read[index]
            caches.advance(np.array(read, np.int32))
    return found


def _read_prompts(model: nn.Module, sharing: ModelSharing) -> dict[int, ReadRows]:
    """The rows before their first token, those that share a stem behind it."""
    found: dict[int, ReadRows] = {}
    behind_stem = [row for row, (shared, _) in enumerate(PROMPTS) if shared]
    for numbers in (behind_stem, *([row] for row in range(len(PROMPTS)) if row not in behind_stem)):
        prompts = [_ids(row)[: _length(row)] for row in numbers]
        plan = plan_prompts(prompts, Limits(max_rows=len(PROMPTS)), sharing.sharing, sharing.cache)
        prefill = Prefill(model, sharing.caches(model), plan, max_rows=len(PROMPTS), run_tokens=0)
        for read, rows in prefill:
            found |= {
                numbers[number]: rows.take(slice(place, place + 1)) for place, number in enumerate(read)
            }
    return found
