from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_eval.harness.encoding import Encoder, Pair, fit_prompt, fit_request, hf_tokenizer
from mlx_eval.models.load import wrap_tokenizer
from mlx_eval.records import ScoringRequest
from tests.tiny import BOS, bpe_tokenizer, spm_tokenizer

TOKENIZERS = {"bos": lambda: bpe_tokenizer(adds_bos=True), "plain": bpe_tokenizer, "spm": spm_tokenizer}
TEXT = st.text(st.sampled_from("the quick Answer é😀\n\t "), max_size=14)


def encoder(name: str, **options: Any) -> Encoder:
    return Encoder(wrap_tokenizer(TOKENIZERS[name](), None), **options)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(TOKENIZERS)), st.lists(TEXT, max_size=5), st.sampled_from([None, True, False]))
def test_many_texts_encode_as_each_alone(name: str, texts: list[str], special: bool | None) -> None:
    own = encoder(name)
    assert own.encode_all(texts, special) == [own.encode(text, special) for text in texts]
    for text in texts:
        expected = TOKENIZERS[name]().encode(text, add_special_tokens=special is not False)
        assert own.encode(text, special) == expected


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(TOKENIZERS)), TEXT, TEXT)
def test_pairs_follow_lm_evals_encode_pair(name: str, context: str, continuation: str) -> None:
    """Wherever lm-eval's own method gives tokens to score; a pair always has a context."""
    from lm_eval.api.model import TemplateLM

    own = encoder(name)

    class Theirs:
        backend = "causal"

        def tok_encode(self, text: str, **_: Any) -> list[int]:
            return own.encode(text)

    (pair,) = own.pairs([(context, continuation)])
    assert pair.context_ids
    assert pair.continuation_ids or not continuation or not own.encode(continuation, False)
    if context:
        theirs: Any = TemplateLM._encode_pair(Theirs(), context, continuation)  # type: ignore[arg-type]
        if theirs[1] and theirs[0]:
            assert (pair.context_ids, pair.continuation_ids) == theirs
            assert not pair.joined


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("context", [" ", "\n", " \t\n "])
def test_white_space_alone_is_no_context(name: str, context: str) -> None:
    own = encoder(name)
    (pair,) = own.pairs([(context, "Answer")])
    assert pair.context_ids == [own.prefix_token_id]
    assert own.decode(pair.continuation_ids) == own.decode(own.encode(f"{context}Answer", False))


def test_many_pairs_encode_as_each_alone() -> None:
    own = encoder("bos")
    requests = [("the ", "quick"), ("", "the"), ("Ans", "wer"), ("the", ""), ("the ", "quick")]
    assert own.pairs(requests) == [own.pairs([one])[0] for one in requests]
    assert own.pairs([]) == []


def test_a_joined_token_is_marked() -> None:
    (pair,) = encoder("plain").pairs([("Ans", "wer")])
    assert pair.joined
    assert pair.continuation_ids == encoder("plain").encode("wer")


def test_prompts_are_never_empty() -> None:
    own = encoder("plain")
    assert own.prompts(["", "the"]) == [[own.prefix_token_id], own.encode("the")]
    bos = encoder("bos")
    assert bos.prompts([""]) == [[bos.prefix_token_id]]


def test_a_tokenizer_whose_encode_was_changed_is_asked_text_by_text() -> None:
    class Changed(type(bpe_tokenizer())):  # type: ignore[misc]
        def encode(self, text: str, **kwargs: Any) -> list[int]:
            return [9, *super().encode(text, **kwargs)]

    inner = bpe_tokenizer()
    changed = Changed(
        tokenizer_object=inner.backend_tokenizer, bos_token=BOS, clean_up_tokenization_spaces=False
    )
    assert Encoder(wrap_tokenizer(changed, None)).encode_all(["the", "fox"])[0][0] == 9


def test_the_transformers_tokenizer_inside_the_wrapper() -> None:
    inner = bpe_tokenizer()
    assert hf_tokenizer(wrap_tokenizer(inner, None)) is inner
    assert hf_tokenizer(inner) is inner


IDS = st.lists(st.integers(0, 99), min_size=1, max_size=8)


@given(IDS, IDS, st.integers(2, 12))
def test_what_is_kept_of_a_pair(context: list[int], continuation: list[int], window: int) -> None:
    """The right end of both, the model fed no more than its window, and as much scored as can be."""
    request, context_cut, continuation_cut = fit_request(Pair(context, continuation), window)
    whole = context + continuation
    kept = [*request.context_ids, *request.continuation_ids]
    assert kept == whole[len(whole) - len(kept) :]
    assert context_cut == (len(kept) < len(whole))
    assert continuation_cut == (len(request.continuation_ids) < len(continuation))
    assert len(kept) - 1 == min(window, len(whole) - 1)
    assert request.context_ids
    assert len(request.continuation_ids) == min(len(continuation), window)


def test_truncation_by_example() -> None:
    assert fit_request(Pair([1, 2, 3], [4, 5]), 3) == (ScoringRequest((2, 3), (4, 5)), True, False)
    assert fit_request(Pair([1, 2], [3, 4, 5, 6]), 2) == (ScoringRequest((4,), (5, 6)), True, True)
    assert fit_request(Pair([1, 2], [3]), 2) == (ScoringRequest((1, 2), (3,)), False, False)


@given(IDS, st.integers(1, 20), st.integers(2, 12))
def test_what_is_kept_of_a_prompt(ids: list[int], max_tokens: int, window: int) -> None:
    prompt = fit_prompt(ids, max_tokens, window)
    assert prompt.ids
    assert prompt.ids == ids[prompt.truncated_by :]
    assert 1 <= prompt.max_tokens <= max_tokens
    assert len(prompt.ids) + prompt.max_tokens <= window
    if max_tokens < window:
        assert prompt.max_tokens == max_tokens
        assert len(prompt.ids) == min(len(ids), window - max_tokens)  # as lm-eval's hf backend
