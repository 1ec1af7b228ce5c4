"""Backends over tiny models, and over the model that says what it is told, for the tests of `MLXEvalLM`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from mlx import nn

from mlx_eval.harness.lm import MLXEvalLM
from tests.tiny import (
    SCRIPT_EOS,
    ScriptedModel,
    bpe_tokenizer,
    loaded,
    request,
    script_tokenizer,
    spm_tokenizer,
    tiny_model,
)

VOCAB = 340
TOKENIZERS = {
    "bos": lambda: bpe_tokenizer(adds_bos=True),
    "plain": bpe_tokenizer,
    "eos only": lambda: bpe_tokenizer(has_bos=False),
    "spm": spm_tokenizer,
}


@functools.cache
def network() -> nn.Module:
    return tiny_model(vocab_size=VOCAB)


def backend(name: str = "bos", window: int = 64, **options: Any) -> Any:
    return MLXEvalLM(loaded(network(), TOKENIZERS[name](), window=window), **options)


class Hook:
    """lm-eval's cache hook, remembering."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any, Any]] = []

    def add_partial(self, kind: str, arguments: Any, answer: Any) -> None:
        self.seen.append((kind, arguments, answer))


def scripted(*scripts: Sequence[int] | str, spread: float = 0.0, window: int = 1000, **options: Any) -> Any:
    model = ScriptedModel(*scripts, spread=spread)
    eos = options.pop("eos", SCRIPT_EOS)
    return MLXEvalLM(loaded(model, options.pop("tokenizer", script_tokenizer()), eos, window), **options)


def said(lm: Any, gen_kwargs: dict[str, Any] | None = None, prompt: str = "<|script0|>") -> str:
    (text,) = lm.generate_until([request(prompt, gen_kwargs or {})])
    assert isinstance(text, str)
    return text
