"""What is drawn, against an oracle in float64 and against transformers, and on what a draw depends."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_eval.engine.sampling import Sampler, adjusted, draw, gumbel, row_sampler
from mlx_eval.records import Sampling

Floats = npt.NDArray[np.float64]

LOGITS = (2.0, 1.4, -0.3, 0.9, -1.2, 0.1, 1.1, -2.5)
IDS = (0, 3, 4)
"""A prompt: some ids with logits of either sign."""
OPTIONS = [
    Sampling(1.0),
    Sampling(0.5),
    Sampling(2.0),
    Sampling(1.0, top_k=3),
    Sampling(1.0, top_k=99),
    Sampling(1.0, top_p=0.7),
    Sampling(1.0, top_p=0.01),
    Sampling(1.0, top_p=0.0),
    Sampling(1.0, min_p=0.3),
    Sampling(1.0, min_p=1.0),
    Sampling(1.0, repetition_penalty=1.8),
    Sampling(1.0, repetition_penalty=0.6),
    # what a limit sees is what the one before it has left, temperature first
    Sampling(0.5, top_p=0.9),
    Sampling(2.0, min_p=0.5),
    Sampling(2.0, top_k=4, top_p=0.6),
    Sampling(1.5, top_p=0.8, top_k=6, min_p=0.25, repetition_penalty=1.3),
]


def oracle(logits: Sequence[float], options: Sampling, ids: Sequence[int]) -> Floats:
    """Probabilities [V] in float64, one token and one rule at a time."""
    scores = np.array(logits, np.float64)
    for token in set(ids):
        penalty = options.repetition_penalty
        scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
    scores = (scores - scores.max()) / options.temperature
    if options.top_k:
        least = np.sort(scores)[::-1][: options.top_k][-1]
        scores[scores < least] = -np.inf
    chances: Floats = np.exp(scores) / np.exp(scores).sum()
    if options.top_p < 1:
        above = np.array([chances[chances > chance].sum() for chance in chances])
        chances[(above >= options.top_p) & (chances < chances.max())] = 0
    chances[chances < options.min_p * chances.max()] = 0
    chances /= chances.sum()
    return chances


def sampler(sampling: Sampling, ids: Sequence[int] = IDS, num_drawn: int = 0) -> Sampler:
    found = row_sampler(sampling, ids, num_drawn)
    assert found is not None
    return found


def drawn(logits: Sequence[float], options: Sampling, num_draws: int) -> list[int]:
    """Draws with as many seeds."""
    samplers = [sampler(options.with_seed(seed)) for seed in range(num_draws)]
    return ids_of(draw(mx.broadcast_to(mx.array(list(logits)), (num_draws, len(logits))), samplers))


def ids_of(tokens: mx.array) -> list[int]:
    ids: list[int] = np.array(tokens).tolist()
    return ids


def seen_mask(ids: Sequence[int], vocab_size: int) -> mx.array:
    return mx.array(np.isin(np.arange(vocab_size), np.array(ids, np.int64))[None])


# ---------------------------------------------------------------- what is drawn


@pytest.mark.parametrize("options", OPTIONS)
def test_tokens_are_drawn_with_their_probabilities(options: Sampling) -> None:
    """By chi-square. The seeds are fixed, so that the outcome is; the bound is four deviations above the mean."""
    num_draws = 4000
    expected = oracle(LOGITS, options, IDS) * num_draws
    counts = np.bincount(drawn(LOGITS, options, num_draws), minlength=len(LOGITS))
    possible = expected > 0
    assert not counts[~possible].any(), "a token that is left out was drawn"
    freedom = int(possible.sum()) - 1
    distance = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert distance <= freedom + 4 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("options", OPTIONS)
def test_draws_of_one_row_follow_the_same_probabilities(options: Sampling) -> None:
    """One after another instead of beside each other; without the penalty, which would change with each."""
    options = replace(options, repetition_penalty=1.0)
    row, logits, num_draws = sampler(options), mx.array([LOGITS]), 400
    tokens = [draw(logits, [row]) for _ in range(num_draws)]
    shares = np.bincount(np.array(mx.concatenate(tokens)), minlength=len(LOGITS)) / num_draws
    # five standard deviations of a share of one half
    assert np.abs(shares - oracle(LOGITS, options, ())).max() < 5 * np.sqrt(0.25 / num_draws)


def test_improbable_tokens_of_a_large_vocabulary_are_drawn_as_often_as_they_should() -> None:
    """A thousand tokens 12 nats below one: coarse noise would draw them too seldom or from a few values only."""
    num_draws, size = 2000, 1000
    logits = np.full(size, -np.log(size) - 1.0)  # together e^-1 of the first one
    logits[0] = 0.0
    tokens = np.array(drawn(logits.tolist(), Sampling(1.0), num_draws))
    share = np.exp(-1) / (1 + np.exp(-1))
    assert abs((tokens > 0).mean() - share) < 5 * np.sqrt(share * (1 - share) / num_draws)
    assert len(set(tokens.tolist())) > 350, "of 538 draws from a thousand, 416 differ on average"


def test_the_noise_is_exact_from_the_smallest_uniform_number_to_the_largest() -> None:
    uniform = np.concatenate([np.logspace(-32, 0, 300, base=2), 1 - np.logspace(-24, -1, 300, base=2)])
    uniform = np.minimum(uniform, 1 - 2.0**-24).astype(np.float32)
    expected = -np.log(-np.log1p(-uniform.astype(np.float64)))
    # rounding in float32 of numbers up to 22, and of the logarithm before it
    assert np.abs(np.array(gumbel(mx.array(uniform))) - expected).max() < 4e-6
    ends = np.array(gumbel(mx.array([0.0, 2.0**-32, 1 - 2.0**-24, 1.0])))
    assert np.isfinite(ends).all()
    assert ends[0] > ends[1] > ends[2] == ends[3]


def test_the_nucleus_counts_all_tokens_that_are_as_good_as_the_last_of_the_top_k() -> None:
    """Two are asked for and five are left, half of their probability in the first."""
    logits = [float(np.log(4)), 0.0, 0.0, 0.0, 0.0]
    assert set(drawn(logits, Sampling(1.0, top_k=2, top_p=0.6), 100)) == {0, 1, 2, 3, 4}
    assert set(drawn(logits, Sampling(1.0, top_k=2, top_p=0.4), 100)) == {0}


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_options_leave_what_the_oracle_leaves(data: st.DataObject) -> None:
    """With many ties, as half precision makes them; tokens next to a limit may fall on either side of it."""
    size = data.draw(st.integers(1, 12))
    logits = data.draw(st.lists(st.integers(-8, 8).map(lambda n: n / 2), min_size=size, max_size=size))
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=4))
    options = Sampling(
        temperature=data.draw(st.sampled_from([0.3, 1.0, 1.7])),
        top_p=data.draw(st.floats(0.0, 1.0)),
        top_k=data.draw(st.integers(0, 14)),
        min_p=data.draw(st.floats(0.0, 1.0)),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.25, 0.8])),
    )
    scores = np.array(adjusted(mx.array([logits]), options, seen_mask(ids, size)))[0].astype(np.float64)
    found = np.exp(scores) / np.exp(scores).sum()
    near = [replace(options, top_p=options.top_p + step) for step in (-1e-5, 0.0, 1e-5)]
    near = [
        replace(one, min_p=min(1.0, one.min_p * factor)) for one in near for factor in (1 - 1e-5, 1 + 1e-5)
    ]
    distances = [np.abs(found - oracle(logits, one, ids)).max() for one in near]
    assert min(distances) < 1e-5  # float32, of probabilities


@pytest.mark.parametrize("options", [*OPTIONS, Sampling(repetition_penalty=1.8)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_the_scores_are_those_of_transformers(options: Sampling, dtype: mx.Dtype) -> None:
    torch = pytest.importorskip("torch", reason="transformers' logits processors need torch")
    from transformers.generation import logits_process as hf

    generator = np.random.default_rng(5)
    logits = mx.array(generator.normal(size=(4, 60)).astype(np.float32) * 2).astype(dtype)  # ties in bfloat16
    ids = generator.integers(0, 60, (4, 9))
    scores = torch.tensor(np.array(logits.astype(mx.float32)))
    steps: list[Any] = [hf.RepetitionPenaltyLogitsProcessor(options.repetition_penalty)]
    if not options.is_greedy:
        steps.append(hf.TemperatureLogitsWarper(options.temperature))
    if options.top_k:
        steps.append(hf.TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        steps.append(hf.TopPLogitsWarper(options.top_p))
    if options.min_p:
        steps.append(hf.MinPLogitsWarper(options.min_p))
    for step in steps:
        scores = step(torch.tensor(ids), scores)
    seen = mx.concatenate([seen_mask(row.tolist(), 60) for row in ids])
    found = torch.tensor(np.array(adjusted(logits, options, seen)))
    if options.top_p < 1 and dtype == mx.bfloat16:  # there the sort decides which of equally good tokens stay
        more = (found > -torch.inf) & (scores == -torch.inf)
        least = torch.where(scores > -torch.inf, found, torch.inf).amin(-1, keepdim=True)
        assert (found[more] == least.expand_as(found)[more]).all()
        found = torch.where(more, -torch.inf, found)
    # both are float32
    assert (torch.softmax(scores, -1) - torch.softmax(found, -1)).abs().max() < 1e-6


# ---------------------------------------------------------------- on what a draw depends


def mixed(num_rows: int) -> list[Sampling]:
    """Options of rows that may be in one batch, some of them equal."""
    kinds = itertools.cycle([*OPTIONS[:4], *OPTIONS, Sampling(repetition_penalty=1.5)])
    return [kind.with_seed(seed) for seed, kind in zip(range(num_rows), kinds, strict=False)]


def texts(rows: Sequence[Sampling], logits: mx.array, order: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Each row's tokens, where `order` has the rows of each step. Logits [N, T, V] of each row's i-th token."""
    samplers = [sampler(row) for row in rows]
    found: dict[int, list[int]] = {row: [] for row in range(len(rows))}
    for step in order:
        if step:
            of_rows = mx.stack([logits[row, samplers[row].num_drawn] for row in step])
            tokens = draw(of_rows, [samplers[row] for row in step])
            for row, token in zip(step, ids_of(tokens), strict=True):
                found[row].append(token)
    return found


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_row_draws_the_same_whoever_is_beside_it_and_whenever_they_join(data: st.DataObject) -> None:
    rows, length = mixed(7), 5
    logits = mx.array(np.random.default_rng(2).normal(size=(len(rows), length, 40)).astype(np.float32) * 2)
    alone = texts(rows, logits, [[row] for row in range(len(rows)) for _ in range(length)])
    left = dict.fromkeys(range(len(rows)), length)
    order = []
    while left:
        step = data.draw(st.lists(st.sampled_from(sorted(left)), unique=True))
        order.append(step or [min(left)])
        left = {row: count - (row in order[-1]) for row, count in left.items() if count > (row in order[-1])}
    assert texts(rows, logits, order) == alone


@pytest.mark.parametrize("options", [Sampling(0.8, seed=3), *mixed(20)])
def test_a_row_that_is_begun_again_goes_on_as_it_would_have(options: Sampling) -> None:
    logits = mx.array(np.random.default_rng(4).normal(size=(9, 1, 40)).astype(np.float32) * 2)
    whole = sampler(options)
    tokens = [ids_of(draw(logits[step], [whole]))[0] for step in range(9)]
    for num_drawn in (1, 4, 8):
        again = sampler(options, (*IDS, *tokens[:num_drawn]), num_drawn)
        assert [ids_of(draw(logits[step], [again]))[0] for step in range(num_drawn, 9)] == tokens[num_drawn:]


def test_the_same_seed_draws_the_same_and_another_does_not() -> None:
    logits = mx.zeros((1, 50))

    def of_seed(seed: int) -> list[int]:
        row = sampler(Sampling(1.0, seed=seed))
        return [ids_of(draw(logits, [row]))[0] for _ in range(10)]

    assert of_seed(3) == of_seed(3)
    assert len({tuple(of_seed(seed)) for seed in (3, 4, 2**32 + 3, 2**63)}) == 4
    assert len(set(of_seed(3))) > 1, "every step draws anew"


def test_rows_whose_seeds_alone_differ_are_computed_together() -> None:
    one, other, unlike = (sampler(Sampling(t, 0.9, seed=seed)) for t, seed in ((1.0, 1), (1.0, 2), (0.9, 1)))
    assert one.options == other.options != unlike.options


def test_a_token_that_was_just_drawn_is_penalised_before_anyone_has_read_it() -> None:
    row = sampler(Sampling(repetition_penalty=2.0), ids=(0,))
    logits = mx.array([[3.9, 3.0, 2.5, 2.0, -1.0]])
    tokens = [draw(logits, [row]) for _ in range(5)]
    # 3.9 stands as 1.95; then 3.0 as 1.5, 2.5 as 1.25, 2.0 as 1.0, and nothing is left above 1.95
    assert np.array(mx.concatenate(tokens)).tolist() == [1, 2, 3, 0, 0]


def test_a_penalty_below_one_favours_what_was_seen_and_logits_below_zero_are_multiplied() -> None:
    assert draw(mx.array([[1.0, 1.1]]), [sampler(Sampling(repetition_penalty=0.5), (0,))]).item() == 0
    assert draw(mx.array([[-1.0, -1.1]]), [sampler(Sampling(repetition_penalty=2.0), (0,))]).item() == 1


def test_a_temperature_that_float32_cannot_divide_by_takes_the_best_token() -> None:
    assert drawn([1.0, 3.0, 2.0, 2.9], Sampling(1e-50), 20) == [1] * 20
    assert not np.isnan(np.array(adjusted(mx.array([[1.0, 3.0]]), Sampling(1e-50)))).any()


def test_greedy_rows_need_a_sampler_only_for_a_penalty() -> None:
    assert row_sampler(Sampling(top_k=3, top_p=0.5, seed=9), IDS) is None
    assert row_sampler(Sampling(repetition_penalty=1.1), IDS) is not None


def test_nothing_is_computed_before_a_token_is_asked_for() -> None:
    """Four steps of eight rows leave no more memory behind than the few small arrays that they start from."""
    rows, size = 8, 20_000
    samplers = [sampler(Sampling(0.9, 0.9, 0, 0.01, seed, 1.2)) for seed in range(rows)]
    mx.eval([one.seen(size) for one in samplers])
    logits = mx.random.normal((rows, size), key=mx.random.key(0))
    before = mx.get_active_memory()
    tokens = [draw(logits, samplers) for _ in range(4)]
    assert mx.get_active_memory() - before < rows * size, (
        "a byte for each score would be more than is left out"
    )
    mx.eval(tokens)
    assert len({tuple(ids_of(step)) for step in tokens}) == 4


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("options", OPTIONS)
def test_half_precision_logits_are_drawn_from_in_float32(options: Sampling, dtype: mx.Dtype) -> None:
    logits = mx.array([LOGITS]).astype(dtype)
    single = draw(logits.astype(mx.float32), [sampler(options)])
    half = draw(logits, [sampler(options)])
    assert half.dtype == single.dtype == mx.uint32
    assert half.tolist() == single.tolist()
    assert adjusted(logits, options, seen_mask(IDS, len(LOGITS))).dtype == mx.float32


@pytest.mark.parametrize("options", [*OPTIONS, Sampling(1e-50), Sampling(1e30)])
@pytest.mark.parametrize(
    "logits", [[1.0, -np.inf, -np.inf], [-np.inf, 1e30, -1e30], [5.0], [np.nan, 1.0, 2.0], [-np.inf, -np.inf]]
)
def test_extreme_logits_give_an_id_that_is_not_barred(options: Sampling, logits: list[float]) -> None:
    tokens = drawn(logits * 2, replace(options, repetition_penalty=1.0), 20)
    assert all(0 <= token < 2 * len(logits) for token in tokens)
    if np.isfinite(logits).any() and not np.isnan(logits).any():
        assert all(np.isfinite((logits * 2)[token]) for token in tokens)
