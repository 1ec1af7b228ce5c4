"""How near the two most probable tokens are where two greedy texts part. Knows a model and token ids.

    python -m benchmarks.side_by_side.near_ties ASKED.json FOUND.json

Two ways of computing the same model in float32 round differently, so where two logits are nearly equal either token
is right; a larger gap means that one of the texts is wrong. The gap is computed anew, one prompt at a time in
mlx-lm's own caches.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

NEAR_TIE: Final = 1e-4
"""Difference of two float32 logits that rounding may reverse."""


@dataclass(frozen=True, slots=True)
class Parting:
    """Where a text leaves ours."""

    question: int
    """Counted from 0."""
    place: int
    """Tokens of the answer before it."""
    token: int | None
    """What the other text goes on with there; None: both have the same tokens and end elsewhere."""


@dataclass(frozen=True, slots=True)
class Gap:
    """The model's logits at a parting."""

    gap: float
    """Between the two largest."""
    rank: int
    """Of the other text's token, 0 for the most probable one."""

    @property
    def is_near_tie(self) -> bool:
        """Whether either text may be right."""
        return self.gap < NEAR_TIE and self.rank < 2


def part(ours: str, ids: Sequence[int], decode: Callable[[list[int]], str]) -> tuple[int, int | None]:
    """The first of another text's tokens that leaves ours.

    Args:
        ours: our text.
        ids: the other one, and what may have been generated behind its end.
        decode: ids to text.

    Returns:
        How many tokens agree, and the next one; None where none is left.
    """
    count = 0
    while count < len(ids) and ours.startswith(decode(list(ids[: count + 1])).rstrip("\ufffd")):
        count += 1
    return count, ids[count] if count < len(ids) else None


def gap_after(model: Any, ids: Sequence[int], token: int) -> Gap:
    """What an mlx-lm model makes of a text.

    Args:
        model: the model.
        ids: two or more.
        token: the one whose rank is wanted.
    """
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    model(mx.array([ids[:-1]]), cache=cache)
    mx.eval([layer.state for layer in cache])
    logits = model(mx.array([ids[-1:]]), cache=cache)[0, -1].astype(mx.float32)  # [V]
    best = mx.sort(logits)[-2:]
    return Gap((best[1] - best[0]).item(), int((logits > logits[token]).sum().item()))


def main() -> None:
    from mlx_eval.harness.encoding import Encoder
    from mlx_eval.models.load import load_model

    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    loaded = load_model(asked["model"], dtype="float32")
    encoder = Encoder(loaded.tokenizer)
    found = []
    for one in asked["texts"]:
        ids = [*encoder.encode(one["prompt"]).tolist()]
        place, token = part(one["ours"], one["ids"], encoder.decode)
        parting = asdict(Parting(one["question"], place, token))
        gap = None if token is None else asdict(gap_after(loaded.model, ids + one["ids"][:place], token))
        found.append({"parting": parting, "gap": gap})
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
