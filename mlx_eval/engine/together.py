"""Whether a model's rows can be decoded together: asked of the model itself, as no class or name tells.

Knows mlx-lm's batched and unbatched decoding; knows neither requests nor text. Decoding a batch over
caches of unequal length fails for some of mlx-lm's models, loudly or silently (gemma2's grouped heads take
the mask of rows for one of heads; some caches cannot be merged). Such models are decoded a row at a time.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

PROBE_PROMPTS = ([3, 1, 4, 1, 5, 2, 3], [2, 5, 1, 3], [4, 2])
"""Rows of unequal length, valid ids for any vocabulary of six or more."""
FAILURES = (ValueError, TypeError, AttributeError, IndexError, RuntimeError, NotImplementedError)
"""What a model that cannot be batched may raise."""
NUM_STEPS = 6
"""Tokens of each row: the rows join one by one, and all must run together for some steps."""


def decodes_together(model: nn.Module) -> bool:
    """Whether rows of unequal length give, side by side, the log-probabilities that each gives alone."""
    from mlx_lm.models.cache import make_prompt_cache

    dtype = model(mx.array([[1]]), cache=make_prompt_cache(model)).dtype
    alone = [row for prompt in PROBE_PROMPTS for row in _decode(model, [prompt])]
    try:
        together = _decode(model, PROBE_PROMPTS)
    except FAILURES:
        return False
    return _agree(alone, together, dtype)


def _agree(alone: list[np.ndarray[Any, Any]], together: list[np.ndarray[Any, Any]], dtype: mx.Dtype) -> bool:
    """Whether rows are the same but for rounding. A model that gives NaN has other troubles than batches."""
    if any(np.isnan(row).any() for row in alone):
        return True
    # rounding differs with the shape of a batch and grows over the layers: half of the type's digits are
    # asked for; a wrong mask or position changes the first digit
    tolerance = math.sqrt(mx.finfo(dtype).eps)
    return all(
        float(np.sqrt(np.mean((row - other) ** 2))) <= tolerance * float(np.std(row))
        for row, other in zip(alone, together, strict=True)
    )


def _decode(model: nn.Module, prompts: Any) -> list[np.ndarray[Any, Any]]:
    """Log-probabilities [NUM_STEPS, V] of each row, the rows together; every step takes the same token."""
    from mlx_lm.generate import BatchGenerator, generate_step

    def take(logprobs: mx.array) -> mx.array:
        return mx.ones(logprobs.shape[0], dtype=mx.uint32)

    found: dict[int, list[mx.array]] = {}
    if len(prompts) == 1:
        steps = generate_step(mx.array(prompts[0]), model, max_tokens=NUM_STEPS, sampler=take)
        found[0] = [logprobs for _, logprobs in steps]
    else:
        generator = BatchGenerator(
            model, sampler=take, completion_batch_size=len(prompts), prefill_batch_size=1
        )
        try:
            found = {uid: [] for uid in generator.insert(prompts, [NUM_STEPS] * len(prompts))}
            while responses := generator.next_generated():
                for response in responses:
                    found[response.uid].append(response.logprobs)
        finally:
            generator.close()
    return [np.array(mx.stack(steps).astype(mx.float32)) for _, steps in sorted(found.items())]
