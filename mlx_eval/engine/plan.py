"""Decides what is computed together and in which order, from token ids alone: Python and numpy, no mlx.

The forest's nodes become rows of batches, depth first, so that the KV of a subtree is freed as soon as its
last row is sent:

    batch 0    header ................          one row; its KV becomes the prefix of all that follow
    batch 1    ├─ passage A ....  ─┐            rows of similar length, padded on the right
               ├─ passage B ...    ─┤
    batch 2    │   ├─ question 1 .. (below A)   each row goes on from its parent's row of batch 1,
               │   ├─ question 2 .  (below A)   behind the prefix, which is stored once
               │   └─ question 3 .. (below B)
    batch 3    ├─ question 4 ...                rows without children come last, and fill what room
               └─ question 5 ..                 the batches before have left

A node with a large family becomes a prefix: its KV is held once for all rows of a batch. In small
families each row gets a copy of its parent's KV, and several families share a batch.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from mlx_eval import config
from mlx_eval.engine.batches import (
    FULL_SHARING,
    ONE_BYTE,
    Batch,
    CacheSize,
    Level,
    Limits,
    Row,
    RowKey,
    ScoringPlan,
    Sharing,
)
from mlx_eval.engine.forest import NO_SHARING, Forest, Node, build_forest
from mlx_eval.records import ScoringRequest


def plan_scoring(
    requests: Sequence[ScoringRequest],
    limits: Limits,
    sharing: Sharing = FULL_SHARING,
    cache: CacheSize = ONE_BYTE,
    split_tokens: float = config.SPLIT_TOKENS,
    *,
    keeps_ends: bool = False,
) -> ScoringPlan:
    """Plan the batches that answer `requests`.

    Args:
        requests: in any order; the plan does not depend on it.
        limits: what a batch may take.
        sharing: what the model allows.
        cache: memory of what the model read, for the budget and the figures.
        split_tokens: what sharing a prefix costs, in tokens.
        keeps_ends: whether what the model remembers where an input ends is gone on from: a row ends there then, and
            is not padded where a model does not allow it.
    """
    shares = sharing.level >= Level.EQUAL
    is_alone = sharing.level is Level.ALONE
    forest = build_forest(
        requests, split_tokens if shares else NO_SHARING, joins_inputs=not is_alone, keeps_ends=keeps_ends
    )
    if is_alone:
        longest = max((tokens.size for tokens in forest.sequences), default=1)
        limits = replace(limits, max_rows=1, step=max(limits.step, longest))
    packer = _Packer(limits, sharing, cache, keeps_ends=keeps_ends)
    packer.pack(forest)
    batches = tuple(packer.batches)
    return ScoringPlan(
        batches=batches,
        sequences=forest.sequences,
        num_requests=len(requests),
        naive_tokens=forest.naive_tokens,
        unique_tokens=forest.unique_tokens,
        planned_tokens=sum(batch.num_tokens for batch in batches),
        padding=sum(batch.padding for batch in batches),
        num_forwards=sum(-(-batch.length // limits.step) for batch in batches),
        peak_kv_bytes=packer.peak_kv_bytes,
        limits=limits,
    )


def plan_prompts(
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    sharing: Sharing = FULL_SHARING,
    cache: CacheSize = ONE_BYTE,
) -> ScoringPlan:
    """Plan the batches that read `prompts`, so that rows can go on from where each ends.

    Args:
        prompts: at least one id each; in any order.
        limits: what a batch may take.
        sharing: what the model allows.
        cache: memory of what the model read.

    Returns:
        A plan whose rows answer request i, one token of it, where prompt i ends.
    """
    requests = [ScoringRequest(np.array(ids, np.int32), np.zeros(1, np.int32)) for ids in prompts]
    return plan_scoring(requests, limits, sharing, cache, keeps_ends=True)


class _Ready(NamedTuple):
    """A node whose ancestors are planned."""

    node: Node
    parent: RowKey | None
    num_slots: int = 0
    """Own slots up to the parent's last token, padding between its ancestors' included."""


@dataclass(slots=True, eq=False)
class _Layer:
    """Nodes that became ready together, each list sorted by `_Packer._key`: the longest last."""

    parents: list[_Ready]
    leaves: list[_Ready]

    def __bool__(self) -> bool:
        return bool(self.parents or self.leaves)


@dataclass(slots=True, eq=False)
class _Family:
    """What stands behind one prefix."""

    prefix: RowKey | None
    prefix_len: int
    layers: list[_Layer]
    """The deepest last."""
    below: list[_Ready] = field(default_factory=list)
    """Nodes that became ready below the deepest layer while it still has parents."""

    @property
    def is_done(self) -> bool:
        """Whether all of its nodes are planned."""
        return not (self.below or any(self.layers))


@dataclass(slots=True, eq=False)
class _Group:
    """Nodes on their way into one batch."""

    rows: list[_Ready] = field(default_factory=list)
    num_tokens: int = 0
    length: int = 0
    """Of the longest node."""
    start: int = 0
    """The furthest."""
    num_slots: int = 0
    """The most."""
    num_parents: int = 0
    """Nodes that have children."""

    def add(self, ready: _Ready) -> None:
        """Take one node."""
        node = ready.node
        self.rows.append(ready)
        self.num_tokens += node.length
        self.length = max(self.length, node.length)
        self.start = max(self.start, node.start)
        self.num_slots = max(self.num_slots, ready.num_slots)
        self.num_parents += bool(node.children)


@dataclass(slots=True, eq=False)
class _Held:
    """A parent batch or a prefix in memory."""

    num_bytes: int
    waiting: int
    """Rows, or for a prefix families, that still need it."""


class _Packer:
    """Walks the forest depth first and fills batches."""

    def __init__(self, limits: Limits, sharing: Sharing, cache: CacheSize, *, keeps_ends: bool) -> None:
        self._keeps_ends = keeps_ends
        self.batches: list[Batch] = []
        self.peak_kv_bytes = 0
        self._limits = limits
        self._sharing = sharing
        self._cache = cache
        self._held: dict[int | RowKey, _Held] = {}
        self._ahead_bytes = (
            0  # a row's caches come from one batch: those that are copied may not fit together
        )
        if sharing.prefix_once:
            self._ahead_bytes = min(limits.kv_bytes // 4, config.AHEAD_TOKENS * cache.token_bytes)

    def pack(self, forest: Forest) -> None:
        """Plan all batches."""
        families = [_Family(None, 0, [self._layer(_Ready(node, None) for node in forest.roots)])]
        while families:
            family = families[-1]
            while family.layers and not family.layers[-1]:
                family.layers.pop()
            if not family.layers:
                families.pop()
                continue
            families += self._next_batch(family)

    def _next_batch(self, family: _Family) -> list[_Family]:
        """Plan one batch of a family; returns the families that it begins, the one to be walked first last."""
        layer = family.layers[-1]
        source = layer.parents or layer.leaves
        group = _Group()
        group.add(source.pop())
        while source and self._fits(group, source[-1]):
            group.add(source.pop())
        self._top_up(group, family)
        group.rows.sort(key=lambda ready: ready.parent or (-1, -1))
        index = len(self.batches)
        begun: list[_Family] = []
        children: list[_Ready] = []
        for row, (node, _, _) in enumerate(group.rows):
            key = RowKey(index, row)
            if self._becomes_prefix(node, group, family):
                members = self._layer(_Ready(child, None) for child in node.children)
                begun.append(_Family(key, node.end, [members]))
            else:
                children += [_Ready(child, key, group.num_slots + node.length) for child in node.children]
        family.below += children
        self._record(family, group, begun, len(children))
        if not layer.parents or self._held_bytes() > self._ahead_bytes:
            self._descend(family)
        return begun[::-1]

    def _descend(self, family: _Family) -> None:
        """Let what became ready below a family's deepest layer be its deepest layer."""
        if family.below:
            family.layers.append(self._layer(family.below))
            family.below = []

    def _record(self, family: _Family, group: _Group, begun: Sequence[_Family], num_children: int) -> None:
        """Add a batch, and count what is held and freed."""
        index = len(self.batches)
        running = self._bytes(len(group.rows), group.start, group.num_slots, group.length)
        self.peak_kv_bytes = max(self.peak_kv_bytes, running + self._held_bytes())
        frees: list[int | RowKey] = []
        for ready in group.rows:
            if ready.parent is not None:
                self._held[ready.parent.batch].waiting -= 1
        frees += [key for key, held in self._held.items() if isinstance(key, int) and held.waiting == 0]
        if family.prefix is not None and family.is_done:
            frees.append(family.prefix)
        for key in frees:
            del self._held[key]
        if num_children:
            self._held[index] = _Held(running, num_children)
        for one in begun:
            assert one.prefix is not None
            size = one.prefix_len * self._cache.token_bytes + self._cache.row_bytes
            self._held[one.prefix] = _Held(size, 1)
        self.batches.append(
            Batch(
                rows=tuple(
                    Row(node.sequence, node.start, node.end, parent, tuple(node.answers))
                    for node, parent, _ in group.rows
                ),
                prefix=family.prefix,
                prefix_len=family.prefix_len,
                new_prefixes=tuple(one.prefix.row for one in begun if one.prefix is not None),
                is_parent=num_children > 0,
                frees=tuple(frees),
            )
        )

    def _top_up(self, group: _Group, family: _Family) -> None:
        """Fill a batch with nodes that have no children: from its own layer, then from those that wait above."""
        layers = family.layers[::-1] if self._sharing.keys_only else family.layers[-1:]
        for layer in layers:
            key = self._key(group.rows[0].node)[0], group.length
            end = begin = bisect.bisect_right(layer.leaves, key, key=lambda ready: self._key(ready.node))
            while begin and self._fits(group, layer.leaves[begin - 1]):
                begin -= 1
                group.add(layer.leaves[begin])
            del layer.leaves[begin:end]

    def _fits(self, group: _Group, ready: _Ready) -> bool:
        """Whether a batch may have one node more."""
        node = ready.node
        num_rows = len(group.rows) + 1
        length = max(group.length, node.length)
        if num_rows > self._limits.max_rows or num_rows * length > self._limits.batch_tokens:
            return False
        is_kept = node.children or (self._keeps_ends and node.answers)
        if self._sharing.level is Level.EQUAL and (
            node.start != group.start or (is_kept and node.length != group.length)
        ):
            return False
        tokens = group.num_tokens + node.length
        if num_rows * length - tokens > config.FORWARD_TOKENS + config.PADDING_SHARE * tokens:
            return False
        free = self._limits.kv_bytes - self._held_bytes()
        if group.num_parents:
            free //= 2  # their children need as much
        start, num_slots = max(group.start, node.start), max(group.num_slots, ready.num_slots)
        return self._bytes(num_rows, start, num_slots, length) <= free

    def _held_bytes(self) -> int:
        return sum(held.num_bytes for held in self._held.values())

    def _becomes_prefix(self, node: Node, group: _Group, family: _Family) -> bool:
        """Whether the node's children get batches of their own, behind it."""
        if not node.children:
            return False
        if (node.end - family.prefix_len) * node.num_below >= config.PREFIX_COPIES:
            return True
        return group.num_parents == 1 and family.is_done  # no other family is left to share a batch with

    def _bytes(self, num_rows: int, start: int, num_slots: int, length: int) -> int:
        """KV of a batch while it is computed, padding and copies of the parents' KV included."""
        before = num_slots if self._sharing.prefix_once else start
        return num_rows * ((before + length) * self._cache.token_bytes + self._cache.row_bytes)

    def _layer(self, ready: Iterable[_Ready]) -> _Layer:
        nodes = sorted(ready, key=lambda one: self._key(one.node))
        return _Layer(
            [one for one in nodes if one.node.children], [one for one in nodes if not one.node.children]
        )

    def _key(self, node: Node) -> tuple[int, int]:
        """Nodes that may share a batch are neighbours when sorted by this."""
        return node.start if self._sharing.level is Level.EQUAL else 0, node.length
