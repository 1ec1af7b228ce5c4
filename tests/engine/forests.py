"""Random requests that share a lot, and what their forest must be, by brute force over all prefixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st

from mlx_eval import config
from mlx_eval.records import ScoringRequest


@st.composite
def shared_requests(
    draw: Any, vocab: int = 4, max_requests: int = 12, longest_piece: int = 4, max_pieces: int = 4
) -> list[ScoringRequest]:
    """Requests glued together from a few pieces: common stems, duplicates, prefixes of one another, single tokens."""
    ids = st.integers(0, vocab - 1)
    pieces = draw(st.lists(st.lists(ids, min_size=1, max_size=longest_piece), min_size=1, max_size=5))
    chosen = st.lists(st.sampled_from(pieces), min_size=1, max_size=max_pieces)
    requests = []
    for parts in draw(st.lists(chosen, max_size=max_requests)):
        tokens = [*(token for part in parts for token in part), draw(ids)]
        at = draw(st.integers(1, len(tokens) - 1))
        requests.append(ScoringRequest(tokens[:at], tokens[at:]))
    return requests


class Policy(NamedTuple):
    """What the planner takes for cheap; small numbers make rare plans of small forests."""

    prefix_copies: int
    ahead_tokens: int

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Have the planner think so while the block runs."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(config, "PREFIX_COPIES", self.prefix_copies)
            patch.setattr(config, "AHEAD_TOKENS", self.ahead_tokens)
            yield


POLICIES = st.builds(
    Policy,
    prefix_copies=st.sampled_from([1, 12, config.PREFIX_COPIES]),
    ahead_tokens=st.sampled_from([0, 8, config.AHEAD_TOKENS]),
)


def input_of(request: ScoringRequest) -> tuple[int, ...]:
    """What the model is fed: all tokens but the last, which is only predicted."""
    return (*request.context_ids.tolist(), *request.continuation_ids.tolist()[:-1])


def prefixes_of(requests: Sequence[ScoringRequest]) -> set[tuple[int, ...]]:
    """Every distinct beginning of an input, of one token or more."""
    inputs = {input_of(request) for request in requests}
    return {tokens[:size] for tokens in inputs for size in range(1, len(tokens) + 1)}


def maximal_inputs(requests: Sequence[ScoringRequest]) -> list[tuple[int, ...]]:
    """The inputs that are no beginning of another, sorted."""
    inputs = {input_of(request) for request in requests}
    return sorted(one for one in inputs if not any(other[: len(one)] == one for other in inputs - {one}))


def with_order(requests: Sequence[ScoringRequest], random: Any) -> tuple[list[ScoringRequest], list[int]]:
    """The requests shuffled, and which of the old ones each of the new is."""
    order = list(range(len(requests)))
    random.shuffle(order)
    return [requests[index] for index in order], order
