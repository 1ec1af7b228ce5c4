"""Every architecture of mlx-lm through decoding, against one sequence alone with a fresh cache."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_eval.engine import prefill
from mlx_eval.engine.decode import Decoder
from mlx_eval.records import Generation, GenerationRequest
from tests.tiny import oracle_generate
from tests.zoo.build import VOCAB, build, runnable

REACH = 40
"""Tokens that windows see: fewer than the longest rows here have."""
CLEAR = 1e-2
"""Nats between the two best tokens of a place that counts: an expert or key that is chosen within rounding may move
the logits of these random models by less than that."""
END = 7
"""The id that ends a sequence."""
DECODING = json.loads(Path(__file__).with_name("decoding.json").read_text(encoding="utf-8"))
"""What the self-test finds on a CPU, by name of the architecture."""


def requests() -> list[GenerationRequest]:
    """Rows behind a common stem and others, of unequal lengths and limits."""
    rng = np.random.default_rng(5)
    stem = rng.integers(1, VOCAB, 30).tolist()
    prompts = [stem + rng.integers(1, VOCAB, size).tolist() for size in (3, 9, 5, 1, 7)]
    prompts += [rng.integers(1, VOCAB, size).tolist() for size in (2, 12, 36, 5)]
    return [GenerationRequest(tuple(ids), 4 + 3 * (place % 4)) for place, ids in enumerate(prompts)]


def spelled(ids: list[int]) -> str:
    return " ".join(map(str, ids))


@pytest.mark.slow
@pytest.mark.parametrize("name", runnable())
def test_rows_side_by_side_are_those_of_one_sequence_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill.config, "RUN_TOKENS", 0)  # so short a stem is copied otherwise
    model = build(name, REACH)
    asked = requests()
    for speculate in (0, 3):
        decoder = Decoder(model, speculate=speculate)
        found: dict[int, Generation] = {}
        decoder.run(
            asked,
            batch_size=4,
            decode=lambda ids: spelled(list(ids)),
            eos_token_ids=frozenset([END]),
            on_generation=found.__setitem__,
        )
        if mx.default_device() == mx.Device(mx.cpu):
            assert [decoder.decoding.together, decoder.decoding.drafts] == DECODING[name]
        for index, request in enumerate(asked):
            ids, margin = oracle_generate(model, request.prompt_ids, request.max_tokens, [END])
            wanted = spelled([token for token in ids if token != END])  # no part of the text
            assert found[index].text == wanted or margin < CLEAR, (index, speculate, margin)
