"""How exact is the normaliser? `mlx_eval_kernels.logprob` beside `mx.logsumexp`, against float64.

    python benchmarks/logsumexp.py

Prints, for each vocabulary, the mean and the largest error in nats over random rows of logits. A mean that
is not near zero is the same sign on every token, and adds up over a continuation.
"""

from __future__ import annotations

import argparse

import mlx.core as mx
import numpy as np
from mlx_eval_kernels import logprob
from tabulate import tabulate

VOCABULARIES = (32_000, 49_152, 151_936, 262_144)


def errors(vocabulary: int, rows: int, seed: int) -> list[list[object]]:
    logits = np.random.default_rng(seed).normal(0.0, 3.0, (rows, vocabulary)).astype(np.float32)
    exact = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    ours = np.array(logprob(mx.array(logits), mx.zeros((rows, 1), mx.int32)).logsumexp)
    plain = np.array(mx.logsumexp(mx.array(logits), axis=-1))
    return [
        [f"{vocabulary:,}", name, f"{(found - exact).mean():+.1e}", f"{np.abs(found - exact).max():.1e}"]
        for name, found in (("mx.logsumexp", plain), ("logprob", ours))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(f"device: {mx.default_device()}, {arguments.rows} rows")
    rows = [row for v in VOCABULARIES for row in errors(v, arguments.rows, arguments.seed)]
    print(tabulate(rows, ["vocabulary", "function", "mean error", "largest error"], disable_numparse=True))


if __name__ == "__main__":
    main()
