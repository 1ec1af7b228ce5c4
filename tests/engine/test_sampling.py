from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_eval.engine.sampling import row_sampler
from mlx_eval.records import Sampling

PROBABILITIES = [0.5, 0.3, 0.15, 0.05]
DRAWS = 400
SPREAD = 0.12
"""Five standard deviations of a share of 0.5 in 400 draws: 5 * sqrt(0.25 / 400)."""


def shares(sampling: Sampling) -> list[float]:
    """How often each token is drawn."""
    sample = row_sampler(sampling)
    assert sample is not None
    logprobs = mx.log(mx.array([PROBABILITIES]))
    drawn = np.array(mx.concatenate([sample(logprobs) for _ in range(DRAWS)]))
    return [float((drawn == token).mean()) for token in range(len(PROBABILITIES))]


def expected(weights: list[float]) -> list[float]:
    return [weight / sum(weights) for weight in weights]


def test_temperature_zero_is_greedy_and_needs_no_sampler() -> None:
    assert row_sampler(Sampling(top_k=3, top_p=0.5)) is None


@pytest.mark.parametrize(
    ("sampling", "weights"),
    [
        (Sampling(1.0), PROBABILITIES),
        (Sampling(0.5), [p**2 for p in PROBABILITIES]),
        (Sampling(2.0), [p**0.5 for p in PROBABILITIES]),
        (Sampling(1.0, top_k=2), [0.5, 0.3, 0, 0]),
        (Sampling(1.0, top_k=99), PROBABILITIES),
        (Sampling(1.0, top_p=0.7), [0.5, 0.3, 0, 0]),
        (Sampling(1.0, top_p=0.4), [1, 0, 0, 0]),
        (Sampling(1.0, min_p=0.5), [0.5, 0.3, 0, 0]),
        # temperature first: 0.5 ** 2 / (0.5 ** 2 + 0.3 ** 2 + …) = 0.684 alone does not reach 0.9, two do
        (Sampling(0.5, top_p=0.9), [0.25, 0.09, 0, 0]),
        (Sampling(2.0, min_p=0.5), [0.5**0.5, 0.3**0.5, 0.15**0.5, 0]),
    ],
)
def test_tokens_are_drawn_with_their_probabilities(sampling: Sampling, weights: list[float]) -> None:
    found = shares(sampling)
    for share, weight, wanted in zip(found, weights, expected(weights), strict=True):
        assert abs(share - wanted) < SPREAD
        assert share == 0 or weight > 0, "a token that is cut off was drawn"


def test_the_same_seed_draws_the_same_and_another_does_not() -> None:
    logprobs = mx.log(mx.full((1, 50), 1 / 50))

    def draw(seed: int) -> list[int]:
        sample = row_sampler(Sampling(1.0, seed=seed))
        assert sample is not None
        return [int(sample(logprobs).item()) for _ in range(10)]

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)
    assert len(set(draw(3))) > 1, "every step draws anew"


def test_half_precision_log_probabilities_do_not_change_the_shape() -> None:
    sample = row_sampler(Sampling(0.7, top_p=0.9, top_k=3, min_p=0.01))
    assert sample is not None
    assert sample(mx.log(mx.array([PROBABILITIES])).astype(mx.bfloat16)).shape == (1,)
