from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_eval_kernels import NO_TARGET, logprob

ROUNDING = 5e-6
"""Nats: float32 has 24 bits, and log-probabilities of some tens of nats use five of them before the point."""


def reference(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities [N, V] and logsumexp [N] in float64."""
    values = logits.astype(np.float64)
    top = values.max(axis=-1, keepdims=True)
    normaliser = top[:, 0] + np.log(np.exp(values - top).sum(axis=-1))
    return values - normaliser[:, None], normaliser


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 1000, 49_152, 151_936])
def test_values_are_those_of_float64(size: int) -> None:
    generator = np.random.default_rng(size)
    logits = (4 * generator.standard_normal((3, size))).astype(np.float32)
    targets = generator.integers(0, size, (3, 4))
    result = logprob(mx.array(logits), mx.array(targets))
    expected, normaliser = reference(logits)
    np.testing.assert_allclose(
        np.array(result.logprob), np.take_along_axis(expected, targets, axis=1), atol=ROUNDING, rtol=0
    )
    np.testing.assert_allclose(np.array(result.logsumexp), normaliser, atol=ROUNDING, rtol=0)
    assert np.array(result.argmax).tolist() == logits.argmax(axis=-1).tolist()


def test_a_large_flat_row_keeps_its_digits() -> None:
    """One float32 sweep over 151,936 equal terms is off by some 1e-4; here it must not be."""
    logits = np.full((1, 151_936), 0.1, dtype=np.float32)
    result = logprob(mx.array(logits), mx.array([[0]]))
    assert abs(result.logprob.item() + np.log(151_936)) < ROUNDING


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_types_are_computed_in_float32(dtype: mx.Dtype) -> None:
    logits = mx.array(np.random.default_rng(1).standard_normal((2, 5000)).astype(np.float32)).astype(dtype)
    result = logprob(logits, mx.array([[7], [8]]))
    expected, _ = reference(np.array(logits.astype(mx.float32)))
    assert result.logprob.dtype == mx.float32
    np.testing.assert_allclose(
        np.array(result.logprob)[:, 0], expected[[0, 1], [7, 8]], atol=ROUNDING, rtol=0
    )


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_large_logits_do_not_overflow(shift: float) -> None:
    logits = mx.array([[0.0, 1.0, 2.0]]) + shift
    result = logprob(logits, mx.array([[2]]))
    assert abs(result.logprob.item() + np.log(1 + np.exp(-1) + np.exp(-2))) < ROUNDING


def test_no_target_and_ids_outside_the_vocabulary_are_nan() -> None:
    result = logprob(mx.zeros((1, 4)), mx.array([[NO_TARGET, 4, 3]]))
    values = np.array(result.logprob)[0]
    assert np.isnan(values).tolist() == [True, True, False]
    assert abs(values[2] + np.log(4)) < ROUNDING


def test_masked_tokens_are_minus_infinity_and_nan_stays_nan() -> None:
    infinite = logprob(mx.array([[-np.inf, 0.0], [-np.inf, -np.inf]]), mx.array([[0, 1], [0, 1]]))
    values = np.array(infinite.logprob)
    assert values[0].tolist() == [-np.inf, 0.0]
    assert np.array(infinite.logsumexp)[1] == -np.inf
    assert np.isnan(values[1]).all()
    damaged = logprob(mx.array([[np.nan, 0.0]]), mx.array([[1]]))
    assert np.isnan(damaged.logprob.item())


def test_argmax_takes_the_lowest_of_equals() -> None:
    assert logprob(mx.array([[1.0, 3.0, 3.0]]), mx.array([[0]])).argmax.item() == 1


@pytest.mark.parametrize(
    ("rows", "targets"), [((3,), (1, 1)), ((2, 3), (1, 1)), ((2, 3), (2,)), ((1, 2, 3), (1, 1))]
)
def test_shapes_that_do_not_fit_are_named(rows: tuple[int, ...], targets: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"logits \[N, V\] and targets \[N, K\]"):
        logprob(mx.zeros(rows), mx.zeros(targets, dtype=mx.int32))
