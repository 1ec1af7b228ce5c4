"""What the answers should be: one sequence at a time, fresh caches, every position's logits, float64 normalisers.

Texts are split into context, continuation and windows by lm-eval's own functions, and mlx-lm's model is called as it
is. Too slow to be wrong. Knows nothing of ours, but that float32 and the BLAS are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from mlx_eval.models.runtime import preload_blas

preload_blas()

import mlx.core as mx  # noqa: E402  # the BLAS comes first
import numpy as np  # noqa: E402
from lm_eval import utils  # noqa: E402
from lm_eval.api.model import TemplateLM  # noqa: E402

STEP: Final = 256
"""Tokens of one forward, so that its float64 logits stay small."""


class OracleLM(TemplateLM):  # type: ignore[misc]  # lm_eval has no type marker
    """Scores with an mlx-lm model, one request after the other."""

    def __init__(self, model: str) -> None:
        """Load a directory.

        Raises:
            SystemExit: the tokenizer adds tokens of its own, and it is a matter of taste where.
        """
        from mlx_lm.utils import load

        super().__init__()
        loaded = load(str(Path(model)))
        self._model, self.tokenizer = loaded[0], loaded[1]
        self._model.set_dtype(mx.float32)
        self.max_length: int | None = None
        """Tokens of a window; None: texts fit into the model's."""
        if self.tokenizer.encode("a") != self.tokenizer.encode("a", add_special_tokens=False):
            raise SystemExit("the oracle is for tokenizers that add no tokens to a text")
        self.num_tokens = self.num_forwards = 0

    @property
    def eot_token_id(self) -> int:
        """What lm-eval takes for the end of a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Stands before a text that is scored whole: BOS where there is one, as in lm-eval's `hf`."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text."""
        return list(self.tokenizer.encode(string, add_special_tokens=False))

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return [self._score(context, continuation) for _, context, continuation in requests]

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """Sum over the windows of each text."""
        totals = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            size = self.max_length or len(ids) + 1
            windows = utils.get_rolling_token_windows(ids, self.prefix_token_id, size, context_len=1)
            totals.append(sum(self._score(*utils.make_disjoint_window(one))[0] for one in windows))
        return totals

    def generate_until(self, requests: Any, **_: Any) -> list[str]:
        """Not asked for."""
        raise NotImplementedError("the oracle only scores")

    def _score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """One sequence from its first token on."""
        from mlx_lm.models.cache import make_prompt_cache

        ids = np.array([*context, *continuation])
        cache, first = make_prompt_cache(self._model), len(context) - 1
        total, greedy = 0.0, True
        for begin in range(0, ids.size - 1, STEP):
            piece = ids[begin : min(begin + STEP, ids.size - 1)]
            logits = np.array(self._model(mx.array(piece[None]), cache=cache)[0]).astype(np.float64)
            self.num_tokens += piece.size
            self.num_forwards += 1
            rows = np.arange(max(first - begin, 0), piece.size)  # those that predict the continuation
            targets, logits = ids[begin + rows + 1], logits[rows]
            top = logits.max(axis=-1, keepdims=True, initial=-np.inf)
            sums = top[:, 0] + np.log(np.exp(logits - top).sum(axis=-1))
            total += float((logits[np.arange(rows.size), targets] - sums).sum())
            greedy &= bool((logits.argmax(axis=-1) == targets).all())
        return total, greedy
