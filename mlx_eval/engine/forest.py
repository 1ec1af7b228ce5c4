"""Builds the forest of shared prefixes: what all requests feed the model, each common beginning once.

Knows token ids only: Python and numpy, no model and no mlx, no batches.

    context 1 2, continuation 3 4 5     input 1 2 3 4        1 2 ─┬─ 3 4     predicts 3 (at 2), 4, 5
    context 1 2, continuation 6 7       input 1 2 6               ├─ 6       predicts 6 (at 2), 7
    context 1 2 3, continuation 4       input 1 2 3               │          is part of the first path

The last continuation token is predicted and never fed. Inputs are sorted, so that the length of the
prefix that two neighbours share is all that the forest is made from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from mlx_eval.records import IntArray, ScoringRequest

NO_SHARING: Final = math.inf
"""`split_tokens` that shares no prefix."""


class Answer(NamedTuple):
    """A stretch of one request's continuation that a node predicts."""

    request: int
    """Index into the requests of the call."""
    first: int
    """Index into the continuation."""
    stop: int
    """Index into it behind the stretch."""


@dataclass(slots=True, eq=False)
class Node:
    """Tokens `start` to `end` of a sequence, computed once for everything below. Changes only in `build_forest`."""

    sequence: int
    """Index into the forest's sequences of one that passes through."""
    start: int
    """How many tokens its ancestors have: the position of its first token."""
    end: int
    children: list[Node] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    num_below: int = 0
    """Nodes of its subtree, itself left out."""

    @property
    def length(self) -> int:
        """Its own tokens."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Forest:
    """Everything that a call has to compute."""

    roots: tuple[Node, ...]
    sequences: tuple[IntArray, ...]
    """Distinct inputs in the order of their tokens; nodes are cut from them."""
    unique_tokens: int
    """Tokens in the forest before the cost model joined nodes: no plan can compute fewer."""
    naive_tokens: int
    """Tokens that a pass of its own for each request would compute."""


def build_forest(
    requests: Sequence[ScoringRequest],
    split_tokens: float,
    *,
    joins_inputs: bool = True,
    keeps_ends: bool = False,
) -> Forest:
    """Share every common prefix for which a split pays.

    Args:
        requests: in any order; equal ones share everything.
        split_tokens: what a split costs, in tokens: a node whose sharing saves fewer is computed again in each
            of its children. `NO_SHARING` yields one root for each input that is no prefix of another.
        joins_inputs: whether an input may be a part of another one's row. False, for models in which a token
            changes those before it: one root for each distinct input.
        keeps_ends: whether a node ends wherever an input does, whatever the split costs.
    """
    keys, owners = _distinct_inputs(requests)
    sequences = tuple(np.frombuffer(key, dtype=">i4").astype(np.int32) for key in keys)
    roots, ends = _trie(sequences)
    unique = sum(node.length for node in walk(place.node for place in roots))
    if not joins_inputs:
        roots = ends = [_Place(Node(index, 0, tokens.size), None) for index, tokens in enumerate(sequences)]
    for end, indices in zip(ends, owners, strict=True):
        for index in indices:
            _place_answers(end, index, requests[index])
    return Forest(
        roots=tuple(_settle([place.node for place in roots], split_tokens, keeps_ends)),
        sequences=sequences,
        unique_tokens=unique,
        naive_tokens=sum(num_input_tokens(request) for request in requests),
    )


def num_input_tokens(request: ScoringRequest) -> int:
    """Tokens that the model is fed for a request on its own."""
    return request.context_ids.size + request.continuation_ids.size - 1


def walk(roots: Iterable[Node]) -> Iterator[Node]:
    """All nodes, each before its children."""
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(node.children)


def _distinct_inputs(requests: Sequence[ScoringRequest]) -> tuple[list[bytes], list[list[int]]]:
    """Sorted inputs as big-endian bytes, which compare as their ids do, and the requests of each."""
    owners: dict[bytes, list[int]] = {}
    contexts: dict[int, bytes] = {}  # requests of one question hold one array: it is converted once
    for index, request in enumerate(requests):
        context = contexts.get(id(request.context_ids))
        if context is None:
            context = contexts[id(request.context_ids)] = request.context_ids.astype(">i4").tobytes()
        key = context + request.continuation_ids[:-1].astype(">i4").tobytes()
        owners.setdefault(key, []).append(index)
    keys = sorted(owners)
    return keys, [owners[key] for key in keys]


@dataclass(slots=True, eq=False)
class _Place:
    """A node while the trie grows, with the way up."""

    node: Node
    parent: _Place | None


def _trie(sequences: Sequence[IntArray]) -> tuple[list[_Place], list[_Place]]:
    """Roots, and the place where each of the sorted sequences ends."""
    roots: list[_Place] = []
    ends: list[_Place] = []
    path: list[_Place] = []  # from a root to where the last sequence ended
    for index, tokens in enumerate(sequences):
        shared = _common_prefix(sequences[index - 1], tokens) if index else 0
        below: _Place | None = None
        while path and path[-1].node.end > shared:
            below = path.pop()
        if below is not None and below.node.start < shared:
            path.append(_split(below, shared, roots))
        parent = path[-1] if path else None
        place = _Place(Node(index, shared, tokens.size), parent)
        if parent is None:
            roots.append(place)
        else:
            parent.node.children.append(place.node)
        path.append(place)
        ends.append(place)
    return roots, ends


def _split(place: _Place, at: int, roots: list[_Place]) -> _Place:
    """Cut a node in two; its upper half, which is new, takes its place in the parent."""
    node = place.node
    upper = _Place(Node(node.sequence, node.start, at, [node]), place.parent)
    if place.parent is None:
        roots[-1] = upper  # sequences are sorted: what is cut is the last of its siblings
    else:
        place.parent.node.children[-1] = upper.node
    node.start = at
    place.parent = upper
    return upper


def _common_prefix(left: IntArray, right: IntArray) -> int:
    size = min(left.size, right.size)
    differs = left[:size] != right[:size]
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size


def _place_answers(end: _Place, index: int, request: ScoringRequest) -> None:
    """Give each stretch of the continuation to the node that predicts it, from the path's end upwards."""
    shift = request.context_ids.size - 1  # position that predicts the first continuation token
    place: _Place | None = end
    while place is not None and place.node.end > shift:
        first = max(place.node.start - shift, 0)
        place.node.answers.append(Answer(index, first, place.node.end - shift))
        place = place.parent


def _settle(roots: list[Node], split_tokens: float, keeps_ends: bool) -> list[Node]:
    """Join nodes where a split does not pay, from the leaves upwards."""
    top = Node(0, 0, 0, roots)
    for node in reversed(list(walk([top]))):
        children: list[Node] = []
        for child in node.children:
            stays = not child.children or (keeps_ends and child.answers)
            if not stays and _saves(child) < max(split_tokens, 1):
                _push_down(child, child.children)
                children += child.children
            else:
                children.append(child)
        node.children = children
        node.num_below = sum(1 + child.num_below for child in children)
    return top.children


def _saves(node: Node) -> int:
    """Tokens that are not computed again because the node is computed once; none for an only child's parent."""
    return node.length * (len(node.children) - 1)


def _push_down(node: Node, children: list[Node]) -> None:
    """Have each child compute the node's tokens itself; the first gives the node's answers."""
    for child in children:
        child.start = node.start
    first = children[0]
    ends = {answer.request: answer for answer in first.answers}
    for answer in node.answers:  # of one request, the child's stretch goes on where the node's stops
        after = ends.get(answer.request)
        ends[answer.request] = answer if after is None else Answer(answer.request, answer.first, after.stop)
    first.answers = list(ends.values())
