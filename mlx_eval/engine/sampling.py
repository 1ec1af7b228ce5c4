"""Draws the next token of one row. Knows log-probabilities and random keys, no model and no text."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from mlx_eval.records import Sampling

SMALLEST_TOP_P = 1e-6
"""Stands for 0, which leaves the most probable token alone."""

Sampler = Callable[[mx.array], mx.array]
"""[1, V] log-probabilities to [1] token ids."""


def row_sampler(sampling: Sampling) -> Sampler | None:
    """A sampler with a random state of its own, so that a row does not depend on its neighbours.

    The order is that of transformers: temperature, top-k, top-p, min-p, then the draw.

    Returns:
        None for greedy decoding.
    """
    if sampling.is_greedy:
        return None
    from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

    key = mx.random.key(sampling.seed)

    def sample(logprobs: mx.array) -> mx.array:
        nonlocal key
        key, draw = mx.random.split(key)
        scaled = logprobs.astype(mx.float32) / sampling.temperature
        scaled = scaled - mx.logsumexp(scaled, axis=-1, keepdims=True)
        if 0 < sampling.top_k < scaled.shape[-1]:
            scaled = apply_top_k(scaled, sampling.top_k)
        if sampling.top_p < 1.0:
            scaled = apply_top_p(scaled, max(sampling.top_p, SMALLEST_TOP_P))
        if sampling.min_p > 0.0:
            scaled = apply_min_p(scaled, sampling.min_p)
        return mx.random.categorical(scaled, key=draw)

    return sample
