"""MLX's exponential on the CPU beside ours for numbers below their maximum: time and error.

    python benchmarks/exponential.py

Prints nanoseconds a number (median of five, CPU time) and errors against float64.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Final

import mlx_eval.models  # noqa: F401  (before mlx)

import mlx.core as mx  # isort: skip
import numpy as np
from mlx_eval_kernels.exponential import exp_below

SHAPES: Final = ((1, 3, 2880, 276), (1, 3, 70, 2500), (200, 49152))
"""Scores of attention to a short prefix, a block of those to a long one, and logits."""
REPEATS: Final = 5


def nanoseconds(compute: Callable[[], mx.array]) -> float:
    """CPU time a number."""
    mx.eval(compute())
    spent = []
    for _ in range(REPEATS):
        start = time.process_time()
        mx.eval(compute())
        spent.append(time.process_time() - start)
    return statistics.median(spent) / compute().size * 1e9


def errors(compute: Callable[[mx.array], mx.array]) -> tuple[float, float, float]:
    """Largest relative error above -8, its mean there, and the largest absolute error of all, from -40 to 0."""
    values = np.linspace(-40, 0, 1_000_001).astype(np.float32)
    exact = np.exp(values.astype(np.float64))
    found = np.array(compute(mx.array(values))).astype(np.float64)
    relative = ((found - exact) / exact)[values > -8]
    return float(np.abs(relative).max()), float(relative.mean()), float(np.abs(found - exact).max())


def main() -> None:
    """Print the tables."""
    print("| shape | mx.exp(values - shift), ns | ours, ns | ratio |\n|---|---|---|---|")
    for shape in SHAPES:
        values = -mx.abs(mx.random.normal(shape)) * 5
        shift = mx.max(values, axis=-1, keepdims=True)
        mx.eval(values, shift)
        theirs = nanoseconds(lambda values=values, shift=shift: mx.exp(values - shift))  # type: ignore[misc]
        ours = nanoseconds(lambda values=values, shift=shift: exp_below(values, shift))  # type: ignore[misc]
        print(f"| {shape} | {theirs:.1f} | {ours:.1f} | {theirs / ours:.1f} |")
    print("\n| | largest relative error above -8 | mean there | largest absolute error |\n|---|---|---|---|")
    for name, compute in (("mx.exp", mx.exp), ("ours", lambda values: exp_below(values, mx.array(0.0)))):
        largest, mean, absolute = errors(compute)
        print(f"| {name} | {largest:.1e} | {mean:+.1e} | {absolute:.1e} |")


if __name__ == "__main__":
    main()
