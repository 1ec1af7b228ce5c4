"""Batches of the tokenizers library against the tokenizer's own `encode`, text by text."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_eval.harness.batch_encoding import chunks, encode_batch, is_answered_by_library
from tests.tiny import BOS, CORPUS, EOS, EOT, bpe_tokenizer, spm_tokenizer


@functools.cache
def unigram_tokenizer() -> Any:
    """Lower-cased, a space in front, `</s>` at the end, and added tokens that swallow spaces around them."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=80, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("fox", lstrip=True), AddedToken("dog", rstrip=True, single_word=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", tokenizer.token_to_id("</s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    )


@functools.cache
def literal_tokenizer() -> Any:
    """Reads the text of a special token as ordinary text."""
    literal = copy.deepcopy(bpe_tokenizer(adds_bos=True))
    literal.split_special_tokens = True
    return literal


def python_tokenizer() -> Any:
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()


TOKENIZERS = {
    "bos": lambda: bpe_tokenizer(adds_bos=True),
    "plain": bpe_tokenizer,
    "literal": literal_tokenizer,
    "spm": spm_tokenizer,
    "unigram": unigram_tokenizer,
    "python": python_tokenizer,
}
PIECES = ["the", " quick", "Answer", "  ", "\n", "é", "e\u0301", "😀", "ﬁ", "fox", " dog ", "0042", "</s>"]
TEXT = st.lists(st.sampled_from([*PIECES, BOS, EOS, EOT]), max_size=8).map("".join)


@pytest.mark.filterwarnings("ignore:This sequence already has </s>")  # transformers' ByT5, of such texts
@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(TOKENIZERS)), st.lists(TEXT, max_size=5), st.booleans())
def test_a_batch_gives_what_encode_gives_one_by_one(name: str, texts: list[str], special: bool) -> None:
    tokenizer = TOKENIZERS[name]()
    encoded = encode_batch(tokenizer, texts, special)
    assert [ids.tolist() for ids in encoded] == [
        tokenizer.encode(text, add_special_tokens=special) for text in texts
    ]
    assert all(ids.dtype == np.int32 and ids.ndim == 1 for ids in encoded)


def test_fast_tokenizers_are_answered_by_the_library() -> None:
    assert {name: is_answered_by_library(make()) for name, make in TOKENIZERS.items()} == {
        **dict.fromkeys(TOKENIZERS, True),
        "python": False,
    }


def test_truncation_and_padding_of_an_earlier_call_do_not_stay() -> None:
    tokenizer = unigram_tokenizer()
    whole = tokenizer.encode(CORPUS[0])
    short = tokenizer([CORPUS[0], "a"], truncation=True, max_length=4, padding="max_length")
    assert [len(ids) for ids in short["input_ids"]] == [4, 4]
    assert [ids.tolist() for ids in encode_batch(tokenizer, [CORPUS[0], "a"], True)] == [
        whole,
        tokenizer.encode("a"),
    ]


def test_special_tokens_read_as_text_by_an_earlier_call_are_special_again() -> None:
    tokenizer = copy.deepcopy(bpe_tokenizer())
    assert len(tokenizer(EOS, split_special_tokens=True)["input_ids"]) > 1
    assert [ids.tolist() for ids in encode_batch(tokenizer, [EOS], False)] == [[tokenizer.eos_token_id]]


def changed(step: str) -> Any:
    """A fast tokenizer one of whose steps was changed so that 9 comes first."""
    base: Any = type(bpe_tokenizer())

    def encode(self: Any, text: str, **options: Any) -> list[int]:
        return [9, *base.encode(self, text, **options)]

    def encode_plus(self: Any, text: str, **options: Any) -> Any:
        return {"input_ids": [9, *base._encode_plus(self, text, **options)["input_ids"]]}

    step_of = {"encode": encode, "_encode_plus": encode_plus}[step]
    return type("Changed", (base,), {step: step_of})(tokenizer_object=bpe_tokenizer().backend_tokenizer)


@pytest.mark.parametrize("step", ["encode", "_encode_plus"])
def test_a_tokenizer_with_a_step_of_its_own_is_asked_text_by_text(step: str) -> None:
    tokenizer = changed(step)
    assert not is_answered_by_library(tokenizer)
    assert [ids.tolist() for ids in encode_batch(tokenizer, ["the", "fox"], True)] == [
        [9, *bpe_tokenizer().encode(text)] for text in ("the", "fox")
    ]


def test_an_instance_with_an_encode_of_its_own_is_asked_text_by_text() -> None:
    tokenizer = copy.deepcopy(bpe_tokenizer())
    tokenizer.encode = lambda text, add_special_tokens: [len(text)]
    assert [ids.tolist() for ids in encode_batch(tokenizer, ["the", "a"], True)] == [[3], [1]]


@given(st.lists(st.text(max_size=6)), st.integers(1, 12))
def test_chunks_are_bounded_and_in_order(texts: list[str], size: int) -> None:
    found = list(chunks(iter(texts), size))
    assert [text for chunk in found for text in chunk] == texts
    assert all(sum(map(len, chunk[:-1])) < size for chunk in found)
    assert all(sum(map(len, chunk)) >= size for chunk in found[:-1])
    assert all(found)


def test_chunks_are_taken_only_when_needed() -> None:
    """So that texts that are made on the way are not all there at once."""
    taken: list[str] = []
    texts = (taken.append(text) or text for text in ("abc", "def", "ghi"))
    assert next(chunks(texts, 4)) == ["abc", "def"]
    assert taken == ["abc", "def"]
