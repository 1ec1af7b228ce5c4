"""Draws the next tokens of rows that sample. Knows logits, seeds and token ids, no model and no text.

The i-th token of an answer is drawn with noise made from its row's seed and i, and from nothing else: neither rows
beside it nor what was drawn before can change it, and an answer that is begun again goes on as it would have.
Nothing here waits for the device.

What is left out of a draw is left out by its value: of tokens that are equally probable all stay or none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import mlx.core as mx
import numpy as np

from mlx_eval.records import Sampling

SMALLEST_TEMPERATURE: Final = 1e-6
"""Stands for less, by which float32 cannot divide: the best token, but for those that are as good within 1e-5."""
SMALLEST_UNIFORM: Final = 2.0**-33
"""Stands for 0 in the noise: half of the step between two uniform numbers made from 32 bits."""
LARGEST_UNIFORM: Final = 1 - 2.0**-24
"""The largest float32 below 1."""


class Sampler:
    """One row's drawing state."""

    def __init__(self, sampling: Sampling, ids: Sequence[int], num_drawn: int) -> None:
        """Start a row, or go on with one.

        Args:
            sampling: how tokens are drawn.
            ids: the prompt and the answer so far.
            num_drawn: how many of them are the answer's.
        """
        self.options = sampling.with_seed(0)
        """All but the seed: rows of equal options are drawn together."""
        self.num_drawn = num_drawn
        """Tokens of the answer, those included that the device is computing."""
        self._seed = sampling.seed
        self._ids = tuple(ids) if sampling.repetition_penalty != 1.0 else ()
        self._seen: mx.array | None = None

    def seen(self, vocab_size: int) -> mx.array:
        """[V] Whether an id is in the prompt or the answer; a lazy array."""
        if self._seen is None:
            seen = np.zeros(vocab_size, np.bool_)
            seen[list(self._ids)] = True
            self._seen = mx.array(seen)
        return self._seen

    def noise_key(self) -> tuple[int, int]:
        """Two words of 32 bits, made from the seed and the number of the token to be drawn."""
        digest = hashlib.blake2b(f"{self._seed}:{self.num_drawn}".encode(), digest_size=8).digest()
        return int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:], "big")

    def move_on(self, seen: mx.array | None) -> None:
        """One token was drawn; `seen` [V] has it too, None where no penalty asks for it."""
        self.num_drawn += 1
        self._seen = seen


def row_sampler(sampling: Sampling, ids: Sequence[int], num_drawn: int = 0) -> Sampler | None:
    """What a row needs to draw its tokens.

    Args:
        sampling: how tokens are drawn.
        ids: the prompt and the answer so far, each within the vocabulary.
        num_drawn: how many of them are the answer's: a row that is begun again goes on from there.

    Returns:
        None where the token of the largest logit is taken, whatever came before.
    """
    return None if sampling.takes_largest else Sampler(sampling, ids, num_drawn)


def draw(logits: mx.array, samplers: Sequence[Sampler]) -> mx.array:
    """Draw each row's next token and move its sampler on by one.

    The order is that of transformers: repetition penalty, temperature, top-k, top-p, min-p, then the draw, all of it
    in float32.

    Args:
        logits: [N, V] of any float type, as the model gives them; N and V at least one.
        samplers: one for each row, each given once.

    Returns:
        [N] uint32, not computed yet. Of a row with NaN, some id of the vocabulary.
    """
    places: dict[Sampling, list[int]] = {}
    for place, sampler in enumerate(samplers):
        places.setdefault(sampler.options, []).append(place)
    if len(places) == 1:
        return _draw_equal(logits, samplers)
    parts = [
        _draw_equal(logits[mx.array(group)], [samplers[place] for place in group])
        for group in places.values()
    ]
    order = np.argsort(np.concatenate(list(places.values())))
    return mx.concatenate(parts)[mx.array(order)]


def adjusted(logits: mx.array, options: Sampling, seen: mx.array | None = None) -> mx.array:
    """What a draw takes for log-probabilities: the logits after penalty, temperature and limits.

    Args:
        logits: [N, V] of any float type.
        options: whose seed does not count. Without a temperature there is nothing but the penalty.
        seen: [N, V] whether an id was there before; needed where there is a penalty.

    Returns:
        [N, V] float32, -inf where a token is left out; of a row that samples, 0 is the most probable.
    """
    scores = logits.astype(mx.float32)
    penalty = options.repetition_penalty
    if penalty != 1.0 and seen is not None:
        scores = mx.where(seen, mx.where(scores < 0, scores * penalty, scores / penalty), scores)
    if options.is_greedy:
        return scores
    scores = scores - mx.max(scores, axis=-1, keepdims=True)
    scores = scores / max(options.temperature, SMALLEST_TEMPERATURE)
    floor = _floor(scores, options)
    return scores if floor is None else mx.where(scores < floor, -mx.inf, scores)


def _draw_equal(logits: mx.array, samplers: Sequence[Sampler]) -> mx.array:
    """`draw` where the options of all rows are equal."""
    options, vocab_size = samplers[0].options, logits.shape[1]
    seen = None
    if options.repetition_penalty != 1.0:
        seen = mx.stack([sampler.seen(vocab_size) for sampler in samplers])  # [N, V]
    scores = adjusted(logits, options, seen)
    if not options.is_greedy:
        keys = np.array([sampler.noise_key() for sampler in samplers], np.uint32)
        scores = scores + _noise(mx.array(keys), vocab_size)
    tokens = mx.argmax(scores, axis=-1)
    if seen is not None:
        seen = mx.put_along_axis(seen, tokens[:, None], mx.array(True), axis=1)
    for place, sampler in enumerate(samplers):
        sampler.move_on(None if seen is None else seen[place])
    return tokens


def _floor(scores: mx.array, options: Sampling) -> mx.array | None:
    """[N, 1] The least score [N, V] that may be drawn; None where all may be.

    Each limit looks at what the one before it has left, as in transformers.
    """
    floors = []
    vocab_size, top_k = scores.shape[1], options.top_k
    best: mx.array = scores
    num_more: mx.array | int = 0
    if 0 < top_k < vocab_size:
        best = mx.topk(scores, top_k)  # [N, k]
        least = mx.min(best, axis=-1, keepdims=True)
        num_more = mx.sum(scores >= least, axis=-1, keepdims=True) - top_k  # as good as the k-th
        floors.append(least)
    if options.top_p < 1.0:
        best = mx.sort(best, axis=-1)
        shares = mx.exp(best)
        mass = mx.cumsum(shares, axis=-1) + num_more * shares[:, :1]  # of a token and the less probable ones
        num_dropped = mx.sum(mass <= (1 - options.top_p) * mass[:, -1:], axis=-1, keepdims=True)
        floors.append(mx.take_along_axis(best, mx.minimum(num_dropped, best.shape[1] - 1), axis=-1))
    if options.min_p > 0.0:
        floors.append(mx.full((scores.shape[0], 1), float(np.log(options.min_p))))
    if not floors:
        return None
    # never above the best score, 0: rounding must not leave nothing
    return mx.minimum(mx.max(mx.concatenate(floors, axis=-1), axis=-1, keepdims=True), 0.0)


def _noise(keys: mx.array, vocab_size: int) -> mx.array:
    """[N, V] Gumbel noise from keys [N, 2]: the largest sum of noise and log-probability is a draw.

    A row's noise is the same whatever keys stand beside its own.
    """
    return gumbel(mx.vmap(lambda key: mx.random.uniform(shape=(vocab_size,), key=key))(keys))


def gumbel(uniform: mx.array) -> mx.array:
    """-log(-log(1 - u)) of float32 numbers between 0 and 1, both included: finite, and exact for small u.

    The small u are what improbable tokens are drawn by. log(1 - u) is taken as u log(w) / (w - 1) with w = 1 - u as
    rounded, for the error of w is in both: a third of the time of MLX's `log1p` on the CPU.
    """
    uniform = mx.clip(uniform, SMALLEST_UNIFORM, LARGEST_UNIFORM)
    rest = 1.0 - uniform
    return -mx.log(mx.where(rest == 1.0, uniform, uniform * mx.log(rest) / (rest - 1.0)))
