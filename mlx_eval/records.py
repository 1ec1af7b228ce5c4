"""The frozen records that travel between the modules. Knows no model, no tokenizer and no lm-eval."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
"""Token ids, one-dimensional; whoever is given one does not write to it, since it may be shared."""


@dataclass(frozen=True, slots=True, eq=False)
class ScoringRequest:
    """One continuation to be scored after one context, both as token ids.

    Any sequence of ids becomes an array; an int32 array is kept, not copied, so that requests may share one.
    """

    context_ids: IntArray
    """[C] At least one id: the first continuation id is predicted from the last of these."""
    continuation_ids: IntArray
    """[N] At least one id."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "context_ids", np.asarray(self.context_ids, dtype=np.int32))
        object.__setattr__(self, "continuation_ids", np.asarray(self.continuation_ids, dtype=np.int32))

    def __eq__(self, other: object) -> bool:
        """Whether the ids are the same, split at the same place."""
        if not isinstance(other, ScoringRequest):
            return NotImplemented
        return np.array_equal(self.context_ids, other.context_ids) and np.array_equal(
            self.continuation_ids, other.continuation_ids
        )

    def __hash__(self) -> int:
        """A hash of the ids' values."""
        return hash((self.context_ids.tobytes(), self.continuation_ids.tobytes()))


class Score(NamedTuple):
    """The answer to a `ScoringRequest`."""

    logprob: float
    """Sum of the continuation's token log-probabilities, in nats."""
    is_greedy: bool
    """Whether greedy decoding would produce exactly this continuation."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. Temperature 0 is greedy and ignores all but the penalty."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    seed: int = 0
    """The same seed, prompt and options give the same text whatever else is in the batch."""
    repetition_penalty: float = 1.0
    """Divides the logits above 0 of the ids in prompt and answer, multiplies those below; greedy decoding too."""

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is taken at every step, after the penalty if there is one."""
        return self.temperature == 0.0

    @property
    def takes_largest(self) -> bool:
        """Whether the token of the largest logit is taken at every step, whatever came before."""
        return self.is_greedy and self.repetition_penalty == 1.0

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
