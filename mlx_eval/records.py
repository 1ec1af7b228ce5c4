"""The frozen records that travel between the modules. Knows no model, no tokenizer and no lm-eval."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """One continuation to be scored after one context, both as token ids."""

    context_ids: tuple[int, ...]
    """At least one id: the first continuation id is predicted from the last of these."""
    continuation_ids: tuple[int, ...]
    """At least one id."""


class Score(NamedTuple):
    """The answer to a `ScoringRequest`."""

    logprob: float
    """Sum of the continuation's token log-probabilities, in nats."""
    is_greedy: bool
    """Whether greedy decoding would produce exactly this continuation."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. Temperature 0 is greedy and ignores the rest."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    seed: int = 0
    """The same seed, prompt and options give the same text whatever else is in the batch."""

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is taken at every step."""
        return self.temperature == 0.0

    def with_seed(self, seed: int) -> Sampling:
        """The same with another seed."""
        return replace(self, seed=seed)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to be continued."""

    prompt_ids: tuple[int, ...]
    """At least one id."""
    max_tokens: int
    """At least one."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer, each not empty; they are not part of it."""
    sampling: Sampling = Sampling()
    in_thinking: bool = False
    """Whether the prompt's end has opened a thinking section already."""


class Generation(NamedTuple):
    """The answer to a `GenerationRequest`."""

    text: str
    """Before the first stop text, without special tokens and thinking section."""
    num_tokens: int
    """Tokens that the model produced for it."""
    finish_reason: str
    """`stop` (a stop text or an end-of-sequence token) or `length`."""
    unfinished_thinking: bool = False
    """Whether the token limit came while the thinking section was open: the text is empty then."""
