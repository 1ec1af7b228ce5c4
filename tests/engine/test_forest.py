from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_eval.engine import forest as forest_module
from mlx_eval.engine.forest import NO_SHARING, Answer, Forest, Node, build_forest, num_input_tokens, walk
from mlx_eval.records import ScoringRequest
from tests.engine.forests import input_of, maximal_inputs, prefixes_of, shared_requests, with_order

SPLITS = st.sampled_from([0, 1, 2, 3, 5, 8, NO_SHARING])


def request(context: Sequence[int], continuation: Sequence[int]) -> ScoringRequest:
    return ScoringRequest(list(context), list(continuation))


def paths(forest: Forest) -> Iterator[tuple[Node, tuple[int, ...]]]:
    """Every node with the tokens from its root to its end, taken from the nodes of the way."""
    waiting: list[tuple[Node, tuple[int, ...]]] = [(root, ()) for root in forest.roots]
    while waiting:
        node, above = waiting.pop()
        assert node.start == len(above)
        path = above + tuple(forest.sequences[node.sequence][node.start : node.end].tolist())
        yield node, path
        waiting += [(child, path) for child in node.children]


def planned_tokens(forest: Forest) -> int:
    return sum(node.length for node in walk(forest.roots))


def shape(forest: Forest) -> Any:
    """Nested (tokens, children), to be compared with what is written by hand."""

    def drawn(node: Node) -> Any:
        tokens = tuple(forest.sequences[node.sequence][node.start : node.end].tolist())
        return (tokens, [drawn(child) for child in node.children]) if node.children else tokens

    return [drawn(root) for root in forest.roots]


@given(shared_requests())
def test_unique_tokens_are_the_distinct_prefixes(requests: list[ScoringRequest]) -> None:
    for split in (0, 8, NO_SHARING):
        forest = build_forest(requests, split)
        assert forest.unique_tokens == len(prefixes_of(requests))
        assert forest.naive_tokens == sum(len(input_of(one)) for one in requests)


@given(shared_requests())
def test_without_a_cost_each_prefix_is_computed_once(requests: list[ScoringRequest]) -> None:
    forest = build_forest(requests, 0)
    computed = [path[:size] for node, path in paths(forest) for size in range(node.start + 1, node.end + 1)]
    assert Counter(computed) == Counter(prefixes_of(requests))


@given(shared_requests(), SPLITS)
def test_every_continuation_token_is_answered_once_by_a_node_that_spells_its_way(
    requests: list[ScoringRequest], split: float
) -> None:
    answered: Counter[tuple[int, int]] = Counter()
    for node, path in paths(build_forest(requests, split)):
        for answer in node.answers:
            assert answer.first < answer.stop
            for index in range(answer.first, answer.stop):
                one = requests[answer.request]
                place = one.context_ids.size - 1 + index
                assert node.start <= place < node.end
                assert path[: place + 1] == input_of(one)[: place + 1]
                answered[answer.request, index] += 1
    assert answered == Counter(
        (number, index) for number, one in enumerate(requests) for index in range(one.continuation_ids.size)
    )


@given(shared_requests())
def test_no_sharing_leaves_the_inputs_that_are_no_prefix_of_another(requests: list[ScoringRequest]) -> None:
    found = list(paths(build_forest(requests, NO_SHARING)))
    assert all(not node.children for node, _ in found)
    assert sorted(path for _, path in found) == maximal_inputs(requests)


@given(shared_requests(), SPLITS)
def test_splits_pay_for_themselves(requests: list[ScoringRequest], split: float) -> None:
    forest = build_forest(requests, split)
    inner = [node for node in walk(forest.roots) if node.children]
    assert all(node.length * (len(node.children) - 1) >= max(split, 1) for node in inner)
    apart = sum(map(len, maximal_inputs(requests)))
    assert forest.unique_tokens <= planned_tokens(forest) <= apart <= forest.naive_tokens
    if inner:
        assert planned_tokens(forest) + split * len(inner) <= apart


@given(shared_requests(), SPLITS, st.randoms(use_true_random=False))
def test_the_order_of_requests_changes_nothing(
    requests: list[ScoringRequest], split: float, random: Any
) -> None:
    shuffled, order = with_order(requests, random)
    first, second = build_forest(requests, split), build_forest(shuffled, split)
    assert shape(first) == shape(second)
    for (node, path), (other, other_path) in zip(paths(first), paths(second), strict=True):
        assert path == other_path
        renamed = [Answer(order[one.request], one.first, one.stop) for one in other.answers]
        assert sorted(renamed) == sorted(node.answers)


def test_the_example_of_the_module() -> None:
    requests = [request([1, 2], [3, 4, 5]), request([1, 2], [6, 7]), request([1, 2, 3], [4])]
    forest = build_forest(requests, 0)
    assert shape(forest) == [((1, 2), [(3, 4), (6,)])]
    (root,) = forest.roots
    assert sorted(root.answers) == [(0, 0, 1), (1, 0, 1)]
    assert sorted(root.children[0].answers) == [(0, 1, 3), (2, 0, 1)]  # 3 and 4 were apart at first
    assert root.children[1].answers == [(1, 1, 2)]
    assert (forest.naive_tokens, forest.unique_tokens) == (4 + 3 + 3, 5)


def test_no_requests_make_no_nodes() -> None:
    forest = build_forest([], 8)
    assert (forest.roots, forest.sequences, forest.unique_tokens, forest.naive_tokens) == ((), (), 0, 0)


def test_equal_inputs_with_other_splits_share_a_node_and_keep_their_answers() -> None:
    requests = [request([1, 2], [3, 4]), request([1], [2, 3, 5]), request([1, 2], [3, 4])]
    (root,) = build_forest(requests, 0).roots
    assert (root.start, root.end, root.children) == (0, 3, [])
    assert sorted(root.answers) == [(0, 0, 2), (1, 0, 3), (2, 0, 2)]


def test_an_input_that_begins_another_is_answered_on_the_way() -> None:
    requests = [request([1, 2, 3, 4], [5]), request([1], [2]), request([1, 2], [3])]
    for split in (0, NO_SHARING):
        forest = build_forest(requests, split)
        assert shape(forest) == [(1, 2, 3, 4)]  # an only child's parent is no node of its own
        assert sorted(forest.roots[0].answers) == [(0, 0, 1), (1, 0, 1), (2, 0, 1)]


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (6, [((1, 1, 1), [(2, 0), (3, 0), (4, 0)])]),  # three tokens for three rows: six are saved
        (7, [(1, 1, 1, 2, 0), (1, 1, 1, 3, 0), (1, 1, 1, 4, 0)]),
    ],
)
def test_a_split_is_made_where_it_saves_its_cost(split: float, expected: Any) -> None:
    requests = [request([1, 1, 1, last], [0, 0]) for last in (2, 3, 4)]
    assert shape(build_forest(requests, split)) == expected


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (0, [((7, 7, 7, 7), [((1,), [(1,), (2,)]), ((2, 2), [(1,), (2,)])])]),
        (1, [((7, 7, 7, 7), [((1,), [(1,), (2,)]), ((2, 2), [(1,), (2,)])])]),
        (2, [((7, 7, 7, 7), [(1, 1), (1, 2), ((2, 2), [(1,), (2,)])])]),
        (12, [((7, 7, 7, 7), [(1, 1), (1, 2), (2, 2, 1), (2, 2, 2)])]),  # 4 tokens for 4 rows: 12 are saved
        (13, [(7, 7, 7, 7, 1, 1), (7, 7, 7, 7, 1, 2), (7, 7, 7, 7, 2, 2, 1), (7, 7, 7, 7, 2, 2, 2)]),
    ],
)
def test_small_branches_join_before_the_stem_is_judged(split: float, expected: Any) -> None:
    requests = [request([7, 7, 7, 7, *middle, last], [0]) for middle in ([1], [2, 2]) for last in (1, 2)]
    assert shape(build_forest(requests, split)) == expected


def test_a_joined_prefix_is_answered_by_one_of_its_rows() -> None:
    requests = [request([1], [2, 3]), request([1, 2, 4], [5]), request([1, 2, 3], [6])]
    forest = build_forest(requests, 100)
    assert shape(forest) == [(1, 2, 3), (1, 2, 4)]
    assert [sorted(root.answers) for root in forest.roots] == [[(0, 0, 2), (2, 0, 1)], [(1, 0, 1)]]


def test_large_and_small_ids_are_kept_apart_and_in_order() -> None:
    ids = [0, 1, 255, 256, 65_535, 65_536, 2**24, 2**31 - 1]
    forest = build_forest([request([token, 5], [1]) for token in reversed(ids)], 0)
    assert [sequence.tolist() for sequence in forest.sequences] == [[token, 5] for token in ids]
    assert all(sequence.dtype == np.int32 for sequence in forest.sequences)
    assert len(forest.roots) == len(ids)


@pytest.mark.parametrize("split", [0, 8, NO_SHARING])
def test_a_chain_deeper_than_the_recursion_limit(split: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes that begin one another, each with a branch of one token."""
    depth = 3 * sys.getrecursionlimit()
    ones = np.ones(depth, np.int32)
    requests = [ScoringRequest(np.append(ones[:size], np.int32(2)), [3]) for size in range(depth)]
    pushed: list[int] = []
    push = forest_module._push_down

    def counting(node: Node, children: list[Node]) -> None:
        pushed.append(len(children))
        push(node, children)

    monkeypatch.setattr(forest_module, "_push_down", counting)
    forest = build_forest(requests, split)
    assert forest.unique_tokens == 2 * depth - 1
    nodes = list(walk(forest.roots))
    assert sorted(answer.request for node in nodes for answer in node.answers) == list(range(depth))
    if split == 0:
        assert sum(node.length for node in nodes) == forest.unique_tokens
    if split == NO_SHARING:
        assert len(forest.roots) == depth
    else:
        assert sum(pushed) <= 9 * depth  # at most nine children join before a one-token stem pays


def test_input_tokens_leave_out_the_last_one() -> None:
    assert num_input_tokens(request([1, 2], [3])) == 2
    assert num_input_tokens(request([1], [3, 4, 5])) == 3


# ---------------------------------------------------------------- inputs that are gone on from


@given(shared_requests(), SPLITS)
def test_a_node_ends_where_an_input_does_if_that_is_gone_on_from(
    requests: list[ScoringRequest], split: float
) -> None:
    """And nothing else is changed: splits that no input asks for pay for themselves."""
    forest = build_forest(requests, split, keeps_ends=True)
    ends = {path: node for node, path in paths(forest)}
    assert len(ends) == sum(1 for _ in walk(forest.roots))
    for index, one in enumerate(requests):
        node = ends[input_of(one)]
        assert index in {answer.request for answer in node.answers}
    inputs = set(map(input_of, requests))
    for path, node in ends.items():
        if path not in inputs:
            saved = node.length * (len(node.children) - 1)
            answered = bool(node.answers)  # by a continuation of several tokens
            assert answered or saved >= max(split, 1)
    assert forest.unique_tokens == len(prefixes_of(requests)) <= planned_tokens(forest)


@given(shared_requests(), SPLITS)
def test_answers_are_the_same_where_ends_are_kept(requests: list[ScoringRequest], split: float) -> None:
    found = {
        (answer.request, token)
        for node, _ in paths(build_forest(requests, split, keeps_ends=True))
        for answer in node.answers
        for token in range(answer.first, answer.stop)
    }
    assert found == {
        (index, token) for index, one in enumerate(requests) for token in range(one.continuation_ids.size)
    }


def test_a_prompt_that_begins_another_is_a_node_whatever_the_split_costs() -> None:
    prompts = [request([1, 2], [0]), request([1, 2, 3, 4], [0]), request([1, 2, 5], [0])]
    forest = build_forest(prompts, 100, keeps_ends=True)
    assert shape(forest) == [((1, 2), [(3, 4), (5,)])]
    assert shape(build_forest(prompts, 100)) == [(1, 2, 3, 4), (1, 2, 5)]
    # one that is not asked for does not stay
    assert shape(build_forest(prompts[1:], 100, keeps_ends=True)) == [(1, 2, 3, 4), (1, 2, 5)]
