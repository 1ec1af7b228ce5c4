"""What tests of decoding share: models with what they allow, rows that are read and joined, the oracle's verdict."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
from mlx import nn

from mlx_eval import config
from mlx_eval.engine import attention
from mlx_eval.engine.batches import CacheSize, Level, Limits
from mlx_eval.engine.counts import DecodeCounts
from mlx_eval.engine.decode import Decoder
from mlx_eval.engine.plan import plan_prompts
from mlx_eval.engine.prefill import Prefill, ReadPrompts
from mlx_eval.engine.row_caches import ReadRows, RowCaches
from mlx_eval.engine.sampling import row_sampler
from mlx_eval.engine.sharing import ModelSharing, Way, find_sharing
from mlx_eval.engine.steps import RowBatch, RowStart, Token
from mlx_eval.engine.together import Decoding, find_decoding
from mlx_eval.models.head import RowHead
from mlx_eval.records import Generation, GenerationRequest, Sampling
from tests.tiny import FIRST_SCRIPT, NEAR_TIE, RECURRENT, oracle_generate, oracle_logits, tiny_model

VOCAB: Final = 120
"""Of random models."""
EOS: Final = 7
"""Ends their answers."""
WINDOWED: Final = {"query_pre_attn_scalar": 8, "sliding_window": 8, "sliding_window_pattern": 2}
KINDS: Final[dict[str, dict[str, Any]]] = {
    "llama": {},
    "gemma3_text": WINDOWED,
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 8},
    **RECURRENT,
}
"""gemma2 with grouped heads is decoded a row at a time; recurrent ones cannot take drafts."""
BATCHED: Final = [kind for kind in KINDS if kind != "gemma2"]
KEYS_ONLY: Final = ["llama", "gemma3_text", "qwen3"]

SCRIPTED: Final = ModelSharing(
    Way(Level.RAGGED, branches=True, splits_attention=False), keys_only=True, cache=CacheSize(token_bytes=8)
)
"""What a `ScriptedModel` allows: its attention is its own."""
TOGETHER: Final = Decoding(together=True, drafts=True)


@functools.cache
def random_model(kind: str = "llama", seed: int = 3) -> nn.Module:
    """The same model for all tests: not to be changed."""
    model = tiny_model(kind, VOCAB, seed, **KINDS[kind])
    _KEPT.append(id(model))
    return model


_KEPT: Final[list[int]] = []
"""The models that live as long as the tests."""


@functools.cache
def allowed(kind: str = "llama") -> tuple[ModelSharing, Decoding]:
    """What the models of a kind allow, as the self-tests find it."""
    model = random_model(kind)
    sharing = find_sharing(model, RowHead(model, config.LOGITS_BYTES))
    return sharing, find_decoding(model, sharing)


def as_text(ids: Sequence[int]) -> str:
    """Ids in words, so that a text tells them."""
    return " ".join(map(str, ids))


def ids_of(answer: Generation) -> list[int]:
    """The ids of an answer that `as_text` told, the one that ends it included."""
    ids = [int(word) for word in answer.text.split()]
    return [*ids, EOS] if answer.finish_reason == "stop" else ids


def random_prompts(seed: int, stem: int = 30, behind: int = 5, others: int = 4) -> list[tuple[int, ...]]:
    """Prompts behind one stem, and others of 1 to 20 ids, in a random order."""
    rng = np.random.default_rng(seed)

    def ids(size: int) -> list[int]:
        found: list[int] = rng.integers(8, VOCAB, size).tolist()
        return found

    first = ids(stem)
    prompts = [(*first, *ids(int(size))) for size in rng.integers(1, 9, behind)]
    prompts += [tuple(ids(int(size))) for size in rng.integers(1, 21, others)]
    return [prompts[index] for index in rng.permutation(len(prompts))]


# ---------------------------------------------------------------- whole answers


def answers(
    model: nn.Module,
    requests: Sequence[GenerationRequest],
    batch_size: int | None = 3,
    *,
    allows: tuple[ModelSharing, Decoding] = (SCRIPTED, TOGETHER),
    eos: Sequence[int] = (EOS,),
    decode: Any = as_text,
    speculate: int | None = 0,
    counts: DecodeCounts | None = None,
    **options: Any,
) -> list[Generation]:
    """Answers in the order of the requests, each given exactly once."""
    found: dict[int, Generation] = {}
    calls: Counter[int] = Counter()

    def on_generation(index: int, generation: Generation) -> None:
        calls[index] += 1
        found[index] = generation

    decoder = Decoder(
        model,
        allows[0],
        speculate=speculate,
        find_decoding=None if allows[1] is None else (lambda: allows[1]),
        counts=counts,
    )
    decoder.run(
        requests,
        batch_size=batch_size,
        decode=decode,
        eos_token_ids=frozenset(eos),
        on_generation=on_generation,
        **options,
    )
    assert calls == Counter(range(len(requests)))
    return [found[index] for index in range(len(requests))]


class Difference(NamedTuple):
    """Where an answer leaves the oracle's."""

    place: int
    """Index of the token."""
    nats: float
    """Between the oracle's most probable token there and the one that was given."""

    @property
    def is_tie(self) -> bool:
        """Whether either token may be the most probable."""
        return self.nats < NEAR_TIE


def difference(
    model: nn.Module, prompt: Sequence[int], given: Sequence[int], expected: Sequence[int]
) -> Difference | None:
    """The first difference of two greedy answers, judged by the model itself; None: there is none."""
    if list(given) == list(expected):
        return None
    pairs = zip(given, expected, strict=False)
    place = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
    if place is None:  # one is longer
        return Difference(min(len(given), len(expected)), float("inf"))
    logits = oracle_logits(model, [*prompt, *expected[:place]])[-1]
    return Difference(place, float(abs(logits[expected[place]] - logits[given[place]])))


def assert_oracles(
    model: nn.Module, requests: Sequence[GenerationRequest], found: Sequence[Generation]
) -> None:
    """Each greedy answer is the oracle's, or leaves it at a near-tie."""
    for index, (request, answer) in enumerate(zip(requests, found, strict=True)):
        expected = oracle_answer(model, request.prompt_ids, request.max_tokens)
        other = difference(model, request.prompt_ids, ids_of(answer), expected)
        assert other is None or other.is_tie, f"request {index}: {other}"
        if other is None:
            assert answer.num_tokens == len(expected)
            assert answer.finish_reason == ("stop" if expected[-1] == EOS else "length")


_ORACLE: dict[tuple[int, tuple[int, ...]], list[int]] = {}


def oracle_answer(model: nn.Module, prompt: tuple[int, ...], count: int) -> list[int]:
    """`oracle_generate`; that of a `random_model`, which no test changes, is computed once."""
    known = _ORACLE.get((id(model), prompt), [])
    if len(known) < count and (not known or known[-1] != EOS):
        known, _ = oracle_generate(model, prompt, count, (EOS,))
        if id(model) in _KEPT:
            _ORACLE[id(model), prompt] = known
    return known[:count]


# ---------------------------------------------------------------- rows and steps


@contextlib.contextmanager
def attention_of(model: nn.Module, sharing: ModelSharing) -> Iterator[None]:
    """The model's attention reads prefixes where they are, if it can."""
    with attention.prefix_attention_in(model) if sharing.way.splits_attention else contextlib.nullcontext():
        yield


def read_prompts(
    model: nn.Module,
    sharing: ModelSharing,
    prompts: Sequence[Sequence[int]],
    *,
    limits: Limits | None = None,
    max_rows: int = 32,
    run_tokens: int = config.RUN_TOKENS,
) -> list[ReadPrompts]:
    """Prompts of two ids or more, read but for their last one."""
    plan = plan_prompts(
        [prompt[:-1] for prompt in prompts], limits or Limits(max_rows), sharing.sharing, sharing.cache
    )
    with attention_of(model, sharing):
        return list(Prefill(model, sharing.caches(model), plan, max_rows, run_tokens=run_tokens))


def set_run_tokens(patch: pytest.MonkeyPatch, count: int) -> None:
    """What a run of rows costs in the decoder: 0 stores every prefix once that rows share."""
    defaults: Any = Prefill.__init__.__kwdefaults__
    patch.setitem(defaults, "run_tokens", count)


class Rows:
    """A batch whose rows join with their prompts."""

    def __init__(self, model: nn.Module, sharing: ModelSharing = SCRIPTED) -> None:
        self.model = model
        self.sharing = sharing
        self.caches = RowCaches(sharing.caches(model))
        self.batch = RowBatch(model, self.caches)

    def join(
        self,
        prompts: Mapping[int, Sequence[int]],
        max_tokens: int | Mapping[int, int] = 50,
        *,
        run_tokens: int = config.RUN_TOKENS,
        sampling: Mapping[int, Sampling] | None = None,
    ) -> None:
        """Read prompts, by row, and take the rows in."""

        def start(row: int) -> RowStart:
            limit = max_tokens if isinstance(max_tokens, int) else max_tokens[row]
            how = (sampling or {}).get(row, Sampling())
            return RowStart(row, prompts[row][-1], limit, row_sampler(how, prompts[row]))

        with_past = [row for row, ids in prompts.items() if len(ids) > 1]
        others = [row for row, ids in prompts.items() if len(ids) == 1]
        if with_past:
            for numbers, read in read_prompts(
                self.model, self.sharing, [prompts[row] for row in with_past], run_tokens=run_tokens
            ):
                self.batch.join([start(with_past[number]) for number in numbers], read)
        if others:
            self.batch.join(
                [start(row) for row in others], ReadRows(np.zeros(len(others), np.int32), None, [])
            )

    def step(self) -> list[Token]:
        """One step, with the attention of the rows."""
        with attention_of(self.model, self.sharing):
            return self.batch.step()

    def verify(self, drafts: Mapping[int, Sequence[int]]) -> list[Token]:
        """One step with drafts, cut as they must be."""
        with attention_of(self.model, self.sharing):
            return self.batch.verify(self.batch.fitting(drafts))

    def finish(self) -> dict[int, list[Token]]:
        """All tokens of each row, until every row has reached its limit."""
        found: dict[int, list[Token]] = {}
        while len(self.batch):
            for token in self.step():
                found.setdefault(token.row, []).append(token)
        for token in self.step():
            found.setdefault(token.row, []).append(token)
        return found


def script(number: int, prompt: bytes = b">") -> tuple[int, ...]:
    """A prompt after which a `ScriptedModel` writes script `number`."""
    return (*prompt, FIRST_SCRIPT + number)


def distinct_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens where each common beginning counts once, by brute force."""
    return len({tuple(ids[: size + 1]) for ids in prompts for size in range(len(ids))})
