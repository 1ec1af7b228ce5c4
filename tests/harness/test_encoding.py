from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_eval.harness import encoding
from mlx_eval.harness.encoding import Encoder, Pair, fit_prompt, fit_request, hf_tokenizer
from mlx_eval.models.load import wrap_tokenizer
from mlx_eval.records import ScoringRequest
from tests.tiny import BOS, EOS, bpe_tokenizer, spm_tokenizer

TOKENIZERS = {"bos": lambda: bpe_tokenizer(adds_bos=True), "plain": bpe_tokenizer, "spm": spm_tokenizer}
PIECES = ["the", " quick", "Ans", "wer", "é", "😀", "\n", "\t ", " ", "42", BOS, EOS, "<s>", "</s>"]
TEXT = st.text(st.sampled_from("the quick Answer é😀\n\t "), max_size=14) | st.lists(
    st.sampled_from(PIECES), max_size=5
).map("".join)


def encoder(name: str, **options: Any) -> Encoder:
    return Encoder(wrap_tokenizer(TOKENIZERS[name](), None), **options)


def slow_encode(name: str, text: str, special: bool | None = None) -> list[int]:
    """One call of transformers; BOS not added to a text that spells it."""
    tokenizer = TOKENIZERS[name]()
    if special is None:
        special = not text.startswith(tokenizer.bos_token)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=special)
    return ids


def ids_of(pair: Pair) -> tuple[list[int], list[int]]:
    return pair.context_ids.tolist(), pair.continuation_ids.tolist()


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(TOKENIZERS)), st.lists(TEXT, max_size=5), st.sampled_from([None, True, False]))
def test_many_texts_encode_as_each_alone(name: str, texts: list[str], special: bool | None) -> None:
    encoded = encoder(name).encode_all(texts, special)
    assert [ids.tolist() for ids in encoded] == [slow_encode(name, text, special) for text in texts]
    assert all(ids.dtype == np.int32 for ids in encoded)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(TOKENIZERS)), st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=6))
def test_pairs_follow_lm_evals_encode_pair(name: str, requests: list[tuple[str, str]]) -> None:
    """Wherever lm-eval's own method gives tokens to score; a pair always has a context."""
    from lm_eval.api.model import TemplateLM

    class Theirs:
        backend = "causal"

        def tok_encode(self, text: str, **_: Any) -> list[int]:
            return slow_encode(name, text)

    pairs = encoder(name).pairs(requests)
    for (context, continuation), pair in zip(requests, pairs, strict=True):
        assert pair.context_ids.size
        assert (
            pair.continuation_ids.size
            or not continuation
            or slow_encode(name, continuation, False)
            in (
                [],
                [encoder(name).prefix_token_id],
            )
        )
        if context:
            theirs: Any = TemplateLM._encode_pair(Theirs(), context, continuation)  # type: ignore[arg-type]
            if theirs[1] and theirs[0]:
                assert ids_of(pair) == tuple(theirs)
                assert not pair.joined


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("context", [" ", "\n", " \t\n "])
def test_white_space_alone_is_no_context(name: str, context: str) -> None:
    own = encoder(name)
    (pair,) = own.pairs([(context, "Answer")])
    assert pair.context_ids.tolist() == [own.prefix_token_id]
    assert own.decode(pair.continuation_ids) == own.decode(slow_encode(name, f"{context}Answer", False))


MIXED = [("the ", "quick"), ("", "the"), ("Ans", "wer"), ("the", ""), ("the ", "quick"), ("the", " quick")]


@pytest.mark.parametrize("num_characters", [1, 5, 10**6])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_many_pairs_encode_as_each_alone(
    name: str, num_characters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = functools.partial(encoding.chunks, num_characters=num_characters)
    monkeypatch.setattr(encoding, "chunks", chunks)
    own = encoder(name)
    pairs = own.pairs(MIXED)
    for request, pair in zip(MIXED, pairs, strict=True):
        (alone,) = own.pairs([request])
        assert ids_of(pair) == ids_of(alone)
        assert pair.joined == alone.joined
    assert own.pairs([]) == []


def test_texts_with_and_without_bos_in_one_batch_keep_their_order() -> None:
    texts = ["the", f"{BOS}quick", "fox", f"{BOS}", "", "the"]
    encoded = encoder("plain", add_bos_token=True).encode_all(texts)
    (bos,) = slow_encode("plain", BOS)
    assert [ids.tolist() for ids in encoded] == [
        [bos, *slow_encode("plain", text.removeprefix(BOS))] for text in texts
    ]


def test_what_is_equal_is_shared() -> None:
    """14,000 contexts of 700 tokens, four choices each, are 40 MB so."""
    own = encoder("bos")
    first, second, third, fourth = own.pairs(
        [("the fox ", "a"), ("the fox", " b"), ("the", "c"), ("the fox ", "a")]
    )
    assert first.context_ids is second.context_ids
    assert first.context_ids is not third.context_ids
    assert fourth is first
    one, other = own.encode_all(["the", "the"])
    assert one is other


def test_a_continuation_does_not_keep_the_whole_in_memory() -> None:
    (pair,) = encoder("bos").pairs([("the quick brown fox", " jumps")])
    assert pair.continuation_ids.base is None


class Listening(type(bpe_tokenizer())):  # type: ignore[misc]
    """Remembers what it was asked to encode."""

    heard: list[str]

    def encode(self, text: str, **options: Any) -> list[int]:
        self.heard.append(text)
        ids: list[int] = super().encode(text, **options)
        return ids


def listening() -> tuple[Encoder, list[str]]:
    inner = bpe_tokenizer()
    tokenizer = Listening(
        tokenizer_object=inner.backend_tokenizer, bos_token=BOS, clean_up_tokenization_spaces=False
    )
    tokenizer.heard = []
    own = Encoder(wrap_tokenizer(tokenizer, None))
    tokenizer.heard.clear()  # mlx-lm's wrapper tries it
    return own, tokenizer.heard


def test_each_distinct_text_is_encoded_once() -> None:
    """Contexts once for all choices, wholes once for equal requests, and nothing for its own sake alone."""
    own, heard = listening()
    own.pairs([("the ", "a"), ("the", " a"), ("the", " b"), ("", "fox"), ("the", ""), ("Ans", "wer")] * 3)
    assert sorted(heard) == sorted(["the", "", "Ans", "the a", "the b", "Answer", "fox", "", "wer"])
    heard.clear()
    own.encode_all(["the", "fox", "the"])
    assert heard == ["the", "fox"]
    heard.clear()
    own.rolling_windows_all(["the", "fox", "the"], 8)
    assert heard == ["the", "fox"]


def test_a_joined_token_is_marked() -> None:
    (pair,) = encoder("plain").pairs([("Ans", "wer")])
    assert pair.joined
    assert pair.continuation_ids.tolist() == slow_encode("plain", "wer")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_windows_of_many_texts_are_those_of_each(name: str) -> None:
    texts = ["the quick brown fox " * 5, "", f"{BOS}the", "é😀", "the quick brown fox " * 5]
    own = encoder(name)
    windows = own.rolling_windows_all(texts, 8)
    assert windows == [own.rolling_windows(text, 8) for text in texts]
    for text, found in zip(texts, windows, strict=True):
        targets = [token for window in found for token in window.continuation_ids.tolist()]
        assert targets == slow_encode(name, text.removeprefix(TOKENIZERS[name]().bos_token), False)


def test_prompts_are_never_empty() -> None:
    own = encoder("plain")
    assert [ids.tolist() for ids in own.prompts(["", "the"])] == [
        [own.prefix_token_id],
        slow_encode("plain", "the"),
    ]
    bos = encoder("bos")
    assert [ids.tolist() for ids in bos.prompts([""])] == [[bos.prefix_token_id]]


def test_the_transformers_tokenizer_inside_the_wrapper() -> None:
    inner = bpe_tokenizer()
    assert hf_tokenizer(wrap_tokenizer(inner, None)) is inner
    assert hf_tokenizer(inner) is inner


IDS = st.lists(st.integers(0, 99), min_size=1, max_size=8)


@given(IDS, IDS, st.integers(2, 12))
def test_what_is_kept_of_a_pair(context: list[int], continuation: list[int], window: int) -> None:
    """The right end of both, the model fed no more than its window, and as much scored as can be."""
    request, context_cut, continuation_cut = fit_request(context, continuation, window)
    whole = context + continuation
    kept = [*request.context_ids.tolist(), *request.continuation_ids.tolist()]
    assert kept == whole[len(whole) - len(kept) :]
    assert context_cut == (len(kept) < len(whole))
    assert continuation_cut == (len(request.continuation_ids) < len(continuation))
    assert len(kept) - 1 == min(window, len(whole) - 1)
    assert request.context_ids.size
    assert len(request.continuation_ids) == min(len(continuation), window)


def test_truncation_by_example() -> None:
    assert fit_request([1, 2, 3], [4, 5], 3) == (ScoringRequest((2, 3), (4, 5)), True, False)
    assert fit_request([1, 2], [3, 4, 5, 6], 2) == (ScoringRequest((4,), (5, 6)), True, True)
    assert fit_request([1, 2], [3], 2) == (ScoringRequest((1, 2), (3,)), False, False)


def test_what_is_kept_of_an_array_is_not_copied() -> None:
    context, continuation = np.arange(9, dtype=np.int32), np.arange(2, dtype=np.int32)
    whole = fit_request(context, continuation, 20).request
    assert whole.context_ids is context
    assert whole.continuation_ids is continuation
    assert np.shares_memory(fit_request(context, continuation, 5).request.context_ids, context)


@given(IDS, st.integers(1, 20), st.integers(2, 12))
def test_what_is_kept_of_a_prompt(ids: list[int], max_tokens: int, window: int) -> None:
    prompt = fit_prompt(np.array(ids, dtype=np.int32), max_tokens, window)
    assert prompt.ids.size
    assert prompt.ids.tolist() == ids[prompt.truncated_by :]
    assert 1 <= prompt.max_tokens <= max_tokens
    assert len(prompt.ids) + prompt.max_tokens <= window
    if max_tokens < window:
        assert prompt.max_tokens == max_tokens
        assert len(prompt.ids) == min(len(ids), window - max_tokens)  # as lm-eval's hf backend
