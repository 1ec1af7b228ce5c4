from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from mlx_eval_kernels.exponential import LOWEST, exp_below


@pytest.fixture(params=["squared", "mlx"])
def _either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's own way, and MLX's `exp` as on other devices."""
    if request.param == "mlx":
        monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))


def exact(values: np.ndarray, shift: float = 0.0) -> np.ndarray:
    return np.exp(values.astype(np.float64) - shift)


@pytest.mark.usefixtures("_either_way")
def test_large_terms_are_exact_to_a_part_and_small_ones_to_a_part_of_the_largest() -> None:
    values = np.linspace(-100, 0, 200_001, dtype=np.float32)
    found = np.array(exp_below(mx.array(values), mx.array(0.0))).astype(np.float64)
    error = np.abs(found - exact(values))
    near = values > -8
    assert (error[near] <= 3e-6 * exact(values[near])).all()  # what the module promises
    assert error[~near].max() <= 2e-6


@pytest.mark.usefixtures("_either_way")
def test_the_largest_term_is_one_and_terms_grow_with_their_values() -> None:
    values = mx.array(np.linspace(-80, 0, 5000, dtype=np.float32))
    found = np.array(exp_below(values, mx.array(0.0)))
    assert found[-1] == 1.0
    assert (np.diff(found) >= -1e-6).all()  # but for rounding


@pytest.mark.usefixtures("_either_way")
def test_each_row_is_shifted_by_its_own() -> None:
    values = np.random.default_rng(0).normal(0, 3, (4, 50)).astype(np.float32)
    shift = values.max(axis=1, keepdims=True)
    found = exp_below(mx.array(values), mx.array(shift))
    assert found.dtype == mx.float32
    np.testing.assert_allclose(np.array(found), exact(values, shift), rtol=0, atol=3e-6)  # the largest is 1


@pytest.mark.usefixtures("_either_way")
def test_what_is_far_below_is_next_to_nothing_and_nan_stays() -> None:
    found = np.array(exp_below(mx.array([-math.inf, 10 * LOWEST, math.nan]), mx.array(0.0)))
    assert (found[:2] >= 0).all()
    assert (found[:2] < 1e-32).all()
    assert math.isnan(found[2])
