"""Computes prompts through the forest, a batch of the plan at a time, for rows that are decoded next.

Knows token ids, a plan and the model's caches; knows no answer and no text. The last token of a prompt is left to
the row's first step, which it shares with the other rows; so the output layer is never computed here.

What rows stand behind while they are decoded is decided here too. Prefixes lie within one another; a row reads
one of them where it is stored once, and has a copy of what lies between that one and its own tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx import nn

from mlx_eval import config
from mlx_eval.engine import kv
from mlx_eval.engine.batches import Batch, Row, RowKey, ScoringPlan
from mlx_eval.engine.branch import BranchCache, behind
from mlx_eval.engine.held import Held
from mlx_eval.engine.row_caches import ReadRows
from mlx_eval.engine.rows import take_rows

Int32Array = npt.NDArray[np.int32]


class ReadPrompts(NamedTuple):
    """Prompts that one batch has completed."""

    numbers: tuple[int, ...]
    """Which prompts, k of them."""
    rows: ReadRows


def find_stems(
    plan: ScoringPlan, max_rows: int, run_tokens: int = config.RUN_TOKENS
) -> dict[RowKey, RowKey | None]:
    """Choose the prefixes of a plan that are worth a run of their own.

    A step reads a prefix once for the run, or once for each row that has a copy of it.

    Args:
        plan: of prompts.
        max_rows: rows that are decoded together.
        run_tokens: what a run costs beyond that, in tokens.

    Returns:
        For each prefix, the one that rows behind it read where it is stored once; None: they copy all of it.
    """
    parents: dict[RowKey, RowKey | None] = {}
    lengths: dict[RowKey, int] = {}
    rows_below: Counter[RowKey] = Counter()
    for index, batch in enumerate(plan.batches):
        num_ends = sum(len(row.answers) for row in batch.rows)
        above = batch.prefix
        while above is not None:
            rows_below[above] += num_ends
            above = parents[above]
        for row in batch.new_prefixes:
            key = RowKey(index, row)
            parents[key] = batch.prefix
            lengths[key] = batch.rows[row].end
    stems: dict[RowKey, RowKey | None] = {}
    for key, parent in parents.items():
        above = None if parent is None else stems[parent]
        own_tokens = lengths[key] - (0 if above is None else lengths[above])
        num_rows = min(rows_below[key], max_rows)
        stems[key] = key if num_rows * own_tokens - lengths[key] >= run_tokens else above
    return stems


class Prefill:
    """One pass through a plan of prompts, as rows are asked for."""

    def __init__(
        self,
        model: nn.Module,
        factory: kv.CacheFactory,
        plan: ScoringPlan,
        max_rows: int,
        on_batch: Callable[[Batch, int], None] = lambda batch, num_forwards: None,
        *,
        run_tokens: int = config.RUN_TOKENS,
    ) -> None:
        """Prepare for one pass.

        Args:
            model: an mlx-lm model.
            factory: makes its caches, as the plan's `Sharing` says.
            plan: of requests that are prompts without their last token, which is the one to be predicted.
            max_rows: rows that are decoded together.
            on_batch: called with each batch that was read, and the forward passes that it took.
            run_tokens: see `find_stems`.
        """
        self._model = model
        self._factory = factory
        self._max_rows = max_rows
        self._run_tokens = run_tokens
        self._on_batch = on_batch
        self._plan = plan
        self._held = Held(factory)
        self._stems = find_stems(plan, max_rows, run_tokens) if factory.splits_attention else {}
        self._stem_prefixes: dict[RowKey, kv.Prefix] = {}
        self._rows_left = Counter(
            stem
            for batch in plan.batches
            for row in batch.rows
            for _ in row.answers
            if (stem := self._stem_of(batch)) is not None and not self._is_stem(batch, row)
        )

    def __iter__(self) -> Iterator[ReadPrompts]:
        """Compute batch after batch; yields the prompts of each that completes some."""
        for index, batch in enumerate(self._plan.batches):
            before = self._held.prefix_of(batch)
            state = self._read(index, batch)
            ends: list[tuple[int, int]] = []
            for place, row in enumerate(batch.rows):
                numbers = [answer.request for answer in row.answers]
                if self._is_stem(batch, row):
                    stem = self._factory.prefix(state, place, before)
                    for begin in range(0, len(numbers), self._max_rows):
                        some = tuple(numbers[begin : begin + self._max_rows])
                        places = np.full(len(some), place, np.int32)
                        yield ReadPrompts(some, self._read_rows(state, before, places, stem))
                else:
                    ends += [(number, place) for number in numbers]
            for begin in range(0, len(ends), self._max_rows):
                yield self._behind_prefix(batch, state, before, ends[begin : begin + self._max_rows])

    def _stem_of(self, batch: Batch) -> RowKey | None:
        return None if batch.prefix is None else self._stems.get(batch.prefix)

    def _is_stem(self, batch: Batch, row: Row) -> bool:
        """Whether so many prompts end in a row, equal but for their last token, that it is stored once for them."""
        if not self._factory.splits_attention:
            return False
        key = self._stem_of(batch)
        shared = 0 if key is None else self._plan.batches[key.batch].rows[key.row].end
        num_rows = min(len(row.answers), self._max_rows)
        return num_rows > 1 and num_rows * (row.end - shared) - row.end >= self._run_tokens

    def _read(self, index: int, batch: Batch) -> kv.State:
        """Have the model read a batch."""
        state = self._held.start(batch)
        tokens = mx.array(self._plan.token_array(batch))  # [B, T]
        step = self._plan.limits.step
        for begin in range(0, batch.length, step):
            self._model(tokens[:, begin : begin + step], cache=state.caches)
            if begin + step < batch.length:  # what a step needs in between is free again before the next one
                mx.eval(kv.arrays_of(state.caches))
        self._on_batch(batch, -(-batch.length // step))
        kv.finalize(state.caches)
        mx.async_eval(kv.arrays_of(state.caches))
        self._held.keep(index, batch, state)
        for row in batch.new_prefixes:
            key = RowKey(index, row)
            if self._rows_left[key]:
                self._stem_prefixes[key] = self._held.prefix(key)
        return state

    def _behind_prefix(
        self, batch: Batch, state: kv.State, before: kv.Prefix | None, ends: Sequence[tuple[int, int]]
    ) -> ReadPrompts:
        """Prompts that end in rows of a batch, as (number, row), behind the batch's own stem."""
        key = self._stem_of(batch)
        stem = None if key is None else self._stem_prefixes[key]
        if key is not None:
            self._rows_left[key] -= len(ends)
            if not self._rows_left[key]:
                del self._stem_prefixes[key]
        numbers, places = zip(*ends, strict=True)
        return ReadPrompts(numbers, self._read_rows(state, before, np.array(places, np.int32), stem))

    def _read_rows(
        self, state: kv.State, before: kv.Prefix | None, places: Int32Array, stem: kv.Prefix | None
    ) -> ReadRows:
        """What the model remembers of the prompts that end in the rows `places` [k], which may repeat."""
        slots = _Slots(state, places, 0 if stem is None else stem.length)
        prefixes = kv.leaves(before.caches) if before is not None else []
        layers: list[Any] = []
        for index, leaf in enumerate(kv.leaves(state.caches)):
            if isinstance(leaf, BranchCache):
                layers.append(slots.own(leaf, prefixes[index] if prefixes else None))
            else:
                layers.append(take_rows(leaf, places))
        rows = ReadRows(slots.lengths, stem, layers)
        mx.async_eval(rows.arrays())
        return rows


class _Slots:
    """Which slots of a batch hold the tokens that rows keep for themselves."""

    def __init__(self, state: kv.State, places: Int32Array, shared: int) -> None:
        """Look at the rows `places` [k] of a batch that was read, `shared` tokens of which are stored once."""
        positions = state.layout.after(state.num_new)[places]  # [k, S]
        self._prefix_len = state.layout.prefix_len
        self._places = places
        self._shared = shared
        self._tokens = [np.flatnonzero(row >= 0) for row in positions]
        self.lengths = np.array([self._prefix_len + own.size for own in self._tokens], np.int32)
        """[k] tokens of each row, those of the prefix included."""

    def own(
        self, cache: BranchCache, prefix: tuple[mx.array, mx.array] | None
    ) -> tuple[mx.array, mx.array] | None:
        """Keys and values [k, H, S, D] of one layer, from each row's first slot on; None: there are none."""
        if cache.keys is None:
            return None
        if cache.window is None:
            first = np.full_like(self.lengths, self._shared)
        else:
            first = np.maximum(self.lengths - cache.window, 0)
        if (first == self.lengths).all():
            return None
        lowest = min(int(first.min()), self._prefix_len)
        index = self._index(first, lowest, cache.keys.shape[2])
        made = []
        for place, array in enumerate(cache.state):
            rows = (
                array
                if np.array_equal(self._places, np.arange(array.shape[0]))
                else array[mx.array(self._places)]
            )
            if lowest < self._prefix_len:
                assert prefix is not None
                rows = behind(prefix[place][:, :, lowest:], rows)
            made.append(_gathered(rows, index))
        return made[0], made[1]

    def _index(self, first: Int32Array, lowest: int, num_slots: int) -> Int32Array:
        """[k, S] where the wanted tokens are, in what is left of the prefix from `lowest` on and in the slots."""
        num_before = self._prefix_len - lowest
        width = int((self.lengths - first).max())
        index = np.zeros((self.lengths.size, width), np.int32)
        for row, (begin, tokens) in enumerate(zip(first.tolist(), self._tokens, strict=True)):
            everything = np.concatenate([np.arange(num_before), num_before + tokens])[begin - lowest :]
            index[row, : everything.size] = everything
            # a row that is shorter is padded with what comes next, so that a slice may do for all
            behind_it = (everything[-1] if everything.size else -1) + 1 + np.arange(width - everything.size)
            index[row, everything.size :] = np.minimum(behind_it, num_before + num_slots - 1)
        return index


def _gathered(rows: mx.array, index: Int32Array) -> mx.array:
    """[k, H, S', D] with the slots [k, S] of each row."""
    begin, width = int(index[0, 0]) if index.size else 0, index.shape[1]
    if (index == begin + np.arange(width)).all():
        return rows[:, :, begin : begin + width]
    slots = mx.broadcast_to(mx.array(index)[:, None, :, None], (*rows.shape[:2], width, rows.shape[3]))
    return mx.take_along_axis(rows, slots, axis=2)


def read_alone(model: nn.Module, ids: Sequence[int]) -> list[Any]:
    """mlx-lm's own caches of one row after `ids`, which may be none."""
    from mlx_lm.models.cache import make_prompt_cache

    caches: list[Any] = make_prompt_cache(model)
    for begin in range(0, len(ids), config.PREFILL_STEP):
        model(mx.array([ids[begin : begin + config.PREFILL_STEP]]), cache=caches)
        # only what the caches hold: the head is never computed
        mx.eval([cache.state for cache in caches])
        mx.clear_cache()
    return caches
