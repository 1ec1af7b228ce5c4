"""Many texts to arrays of token ids: what the tokenizer's own `encode` gives for each, but in batches.

Knows transformers' tokenizers and the library under the fast ones; knows nothing of contexts, BOS rules or lm-eval.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from mlx_eval.records import IntArray

CHUNK_CHARACTERS: Final = 2**20
"""Characters encoded in one call: enough to keep all cores busy, and some 25 MB in the library's own form."""

STEPS_OF_ENCODE: Final = (
    "encode",
    "_encode_plus",
    "_get_padding_truncation_strategies",
    "set_truncation_and_padding",
    "backend_tokenizer",
    "_convert_encoding",
)
"""Through these a fast tokenizer's `encode` goes to the library and back."""


def chunks(texts: Iterable[str], num_characters: int = CHUNK_CHARACTERS) -> Iterator[list[str]]:
    """Lists of texts in order; each ends with the text that brings it to `num_characters`."""
    chunk: list[str] = []
    size = 0
    for text in texts:
        chunk.append(text)
        size += len(text)
        if size >= num_characters:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def encode_batch(tokenizer: Any, texts: Sequence[str], add_special_tokens: bool) -> list[IntArray]:
    """The ids of each text, as `tokenizer.encode` gives them one by one.

    Args:
        tokenizer: a transformers tokenizer.
        texts: one chunk; the library keeps about 70 bytes a token until all are encoded.
        add_special_tokens: as in transformers.
    """
    if not is_answered_by_library(tokenizer):
        return [id_array(ids) for ids in _encode_one_by_one(tokenizer, texts, add_special_tokens)]
    # as every call does, this one sets the library's truncation, padding and reading of special tokens
    tokenizer.encode("", add_special_tokens=False)
    library = tokenizer.backend_tokenizer
    encodings = library.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
    return [id_array(encoding.ids) for encoding in encodings]


def id_array(ids: Sequence[int]) -> IntArray:
    """A new array of token ids."""
    return np.array(ids, dtype=np.int32)


def is_answered_by_library(tokenizer: Any) -> bool:
    """Whether `encode` is what the tokenizers library answers: a subclass may change any step on the way."""
    from transformers import PreTrainedTokenizerFast

    return isinstance(tokenizer, PreTrainedTokenizerFast) and all(
        _is_inherited(tokenizer, step, PreTrainedTokenizerFast) for step in STEPS_OF_ENCODE
    )


def _is_inherited(tokenizer: Any, step: str, base: type) -> bool:
    """Whether neither the object nor its class replaces the step; no when `base` has none of that name."""
    original = inspect.getattr_static(base, step, None)
    return original is not None and inspect.getattr_static(tokenizer, step, None) is original


def _encode_one_by_one(tokenizer: Any, texts: Iterable[str], add_special_tokens: bool) -> Iterator[list[int]]:
    from transformers import PreTrainedTokenizerBase

    # transformers would warn of long texts, which are cut later; a subclass may not know the argument
    options = {"verbose": False} if _is_inherited(tokenizer, "encode", PreTrainedTokenizerBase) else {}
    for text in texts:
        yield tokenizer.encode(text, add_special_tokens=add_special_tokens, **options)
