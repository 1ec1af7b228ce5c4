"""Perplexity of one text file. Knows files, the backend's rolling windows and the units."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mlx_eval.app.awake import kept_awake
from mlx_eval.errors import InputError
from mlx_eval.harness.lm import MLXEvalLM


@dataclass(frozen=True, slots=True)
class Perplexity:
    """How well a model predicts a text."""

    num_tokens: int
    num_bytes: int
    """In UTF-8."""
    nats: float
    """Negative log-probability of the whole text."""

    @property
    def perplexity(self) -> float:
        """exp(nats a token)."""
        return math.exp(self.nats / self.num_tokens)

    @property
    def bits_per_token(self) -> float:
        """Bits a token."""
        return self.nats / self.num_tokens / math.log(2)

    @property
    def bits_per_byte(self) -> float:
        """Bits a byte of UTF-8; comparable between tokenizers."""
        return self.nats / self.num_bytes / math.log(2)

    def as_dict(self) -> dict[str, Any]:
        """All figures by name."""
        return {
            **asdict(self),
            "perplexity": self.perplexity,
            "bits_per_token": self.bits_per_token,
            "bits_per_byte": self.bits_per_byte,
        }


def read_text(path: str | Path) -> str:
    """The text of a file.

    Raises:
        InputError: it cannot be read, is empty or is not text in UTF-8.
    """
    try:
        # not read_text, which would turn \r\n into \n: other tokens, and other bytes to divide by
        text = Path(path).expanduser().read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not text in UTF-8: byte {error.start} is {error.object[error.start]:#04x}"
        ) from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    if not text:
        raise InputError(f"{path} is empty: there is nothing to score")
    if "\0" in text:
        raise InputError(f"{path} is not text: it holds NUL characters")
    return text


def text_perplexity(
    lm: MLXEvalLM, text: str, on_stage: Callable[[str], None] = lambda text: None
) -> Perplexity:
    """Score `text` in windows of the model's length, every token once.

    Args:
        lm: the backend.
        text: not empty.
        on_stage: told what begins, for somebody who waits.

    Raises:
        InputError: the tokenizer makes no token of it.
    """
    num_tokens = lm.count_rolling_tokens(text)
    if num_tokens == 0:
        raise InputError("the tokenizer makes no tokens of this text: there is nothing to score")
    with kept_awake(on_stage):
        total = lm.loglikelihood_rolling([SimpleNamespace(args=(text,))])[0]
    return Perplexity(num_tokens, len(text.encode()), -total)
