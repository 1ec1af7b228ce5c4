"""`generate_until`, rule by rule of what a right answer is, on a model that says what it is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_eval.errors import UnknownNameError
from mlx_eval.harness.lm import MLXEvalLM
from mlx_eval.models.bytes import byte_tokenizer
from tests.harness.backends import TOKENIZERS, backend, network, said, scripted
from tests.tiny import (
    BOS,
    NEAR_TIE,
    SCRIPT_EOS,
    SECOND_EOS,
    THINK_END,
    ScriptedModel,
    bpe_tokenizer,
    loaded,
    oracle_generate,
    request,
)

# ---------------------------------------------------------------- generation

UNTIL = [
    ("string", {"until": "wo"}, "hello "),
    ("one", {"until": ["wo"]}, "hello "),
    ("first of several", {"until": ["wo", "l"]}, "he"),
    ("empty list", {"until": []}, "hello world"),
    ("none", {"until": None}, "hello world"),
    ("absent", {}, "hello world"),
    ("empty text ignored", {"until": ["", "wo"]}, "hello "),
    ("only empty text", {"until": [""]}, "hello world"),
    ("empty string", {"until": ""}, "hello world"),
    ("whitespace", {"until": [" "]}, "hello"),
]


@pytest.mark.parametrize(
    ("gen_kwargs", "text"), [case[1:] for case in UNTIL], ids=[case[0] for case in UNTIL]
)
def test_until_in_every_form(gen_kwargs: dict[str, Any], text: str) -> None:
    assert said(scripted("hello world"), gen_kwargs) == text


@pytest.mark.parametrize("batch_size", [1, 2, 4, 20])
def test_each_request_keeps_its_own_until_in_a_mixed_batch(batch_size: int) -> None:
    lm = scripted("hello world", batch_size=batch_size)
    asked = [request("x" * place + "<|script0|>", case[1]) for place, case in enumerate(UNTIL)]
    assert lm.generate_until(asked) == [case[2] for case in UNTIL]


def test_until_lists_that_lm_evals_collator_confuses_are_kept_apart() -> None:
    lm = scripted("a\nb\n\nc")
    asked = [request("<|script0|>", {"until": until}) for until in ("\n\n", ["\n", "\n"])]
    assert lm.generate_until(asked) == ["a\nb", "a"]


def test_a_stop_split_over_tokens_inside_a_token_and_spelled_otherwise() -> None:
    """The model's text ` quick brown` in any tokenisation; the stop's own tokens never appear."""
    tokenizer = bpe_tokenizer()

    class Replay(ScriptedModel):
        """Says what follows the prompt's last token in a fixed chain of distinct ids."""

        def __init__(self, ids: list[int]) -> None:
            super().__init__("")
            self.next = dict(zip([0, *ids], [*ids, tokenizer.eos_token_id], strict=True))

        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            if cache is not None:
                states = inputs.astype(mx.float32)[:, None, :, None]
                cache[0].update_and_fetch(states, states)
            chosen = mx.array([[self.next.get(token, 0) for token in row] for row in inputs.tolist()])
            return (mx.arange(len(tokenizer)) == chosen[..., None]) * 20.0

    for pieces in (["Answer"], ["An", "sw", "er"], ["A", "n", "s", "w", "e", "r"]):
        ids = [piece for text in pieces for piece in tokenizer.encode(text)]
        lm: Any = MLXEvalLM(loaded(Replay(ids), tokenizer))
        assert said(lm, {"until": ["swe"], "max_gen_toks": 20}, tokenizer.decode([0])) == "An"


def test_a_stop_in_the_prompt_does_not_count() -> None:
    assert said(scripted("hello\nworld"), {"until": ["Q:"]}, "Q: stop Q:<|script0|>") == "hello\nworld"


def test_end_of_sequence_stops_and_every_id_of_the_generation_config_too() -> None:
    assert said(scripted([*b"ab", SCRIPT_EOS, *b"cd"])) == "ab"
    assert said(scripted([*b"ab", SECOND_EOS, *b"cd"], eos=[SCRIPT_EOS, SECOND_EOS])) == "ab"
    assert said(scripted([*b"ab", SECOND_EOS, *b"cd"])) == "abcd"


def test_the_text_of_the_end_of_sequence_token_stops_too() -> None:
    """As in lm-eval's hf backend, when a model spells it with other tokens."""
    assert said(scripted("ab<|eos|>cd")) == "ab"


def test_special_tokens_are_skipped_and_split_characters_whole() -> None:
    assert said(scripted([*"é".encode(), SECOND_EOS, *"😀!".encode()])) == "é😀!"


def test_max_gen_toks_defaults_to_256_and_has_its_aliases() -> None:
    lm = scripted("a" * 300)
    assert len(said(lm)) == 256
    for name in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"):
        assert said(lm, {name: 3}) == "aaa"
    assert said(lm, {"max_tokens": 9, "max_gen_toks": 2}) == "aa"
    assert len(said(scripted("a" * 300, max_gen_toks=7))) == 7


def test_unknown_generation_arguments_are_named() -> None:
    with pytest.raises(UnknownNameError, match="'temprature'; did you mean temperature"):
        said(scripted("ab"), {"temprature": 1.0})


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_greedy_texts_are_the_oracles(name: str, batch_size: int) -> None:
    lm = backend(name, batch_size=batch_size)
    prompts = ["the quick", "Question: what is the answer?", "", "é", "Answer", "the lazy dog. " * 3]
    asked = [request(prompt, {"max_gen_toks": 10}) for prompt in prompts]
    for prompt, text in zip(prompts, lm.generate_until(asked), strict=True):
        ids = lm.tok_encode(prompt) or [lm.prefix_token_id]
        expected, margin = oracle_generate(network(), ids, 10, [lm.eot_token_id])
        assert margin > NEAR_TIE, "choose another seed: the oracle itself is not sure"
        assert text == lm.tok_decode(expected)


def test_equal_greedy_requests_are_computed_once_and_answered_each() -> None:
    lm = scripted("abc")
    assert lm.generate_until([request("<|script0|>", {})] * 5) == ["abc"] * 5
    assert lm.statistics.decoding.generated_tokens == 4
    assert lm.statistics.requests["generate_until"] == 5


@pytest.mark.parametrize("name", ["bos", "plain"])
def test_bos_exactly_once_in_prompts(name: str) -> None:
    lm = backend(name)
    (bos,) = bpe_tokenizer().encode(BOS)
    first, written, empty = (
        asked.prompt_ids for asked in lm._generation_requests([("the", {}), (f"{BOS}the", {}), ("", {})])
    )
    assert first.count(bos) == (name == "bos")
    assert written.count(bos) == 1
    assert empty == (bos,)


def limits(lm: Any, length: int, max_gen_toks: int) -> tuple[tuple[int, ...], int]:
    (asked,) = lm._generation_requests([("abcdefghij"[:length], {"max_gen_toks": max_gen_toks})])
    return asked.prompt_ids, asked.max_tokens


def test_prompts_are_truncated_on_their_left_and_never_empty() -> None:
    """Only max_gen_toks as large as the window is shrunk; prompt and answer always fit."""
    lm = scripted("x", window=8)
    assert limits(lm, 5, 3) == (tuple(b"abcde"), 3)
    assert limits(lm, 6, 3) == (tuple(b"bcdef"), 3)
    assert limits(lm, 10, 7) == (tuple(b"j"), 7)
    assert lm.statistics.notes == {"the prompt and its answer do not fit; prompt truncated on the left": 2}
    assert limits(lm, 3, 8) == (tuple(b"abc"), 5)
    assert limits(lm, 10, 8) == (tuple(b"ghij"), 4)
    assert limits(lm, 10, 100) == (tuple(b"ghij"), 4)
    assert lm.statistics.notes["max_gen_toks is as large as the window; the answer's limit was lowered"] == 3


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 10), st.integers(1, 30), st.integers(2, 12))
def test_prompt_and_answer_always_fit(length: int, max_gen_toks: int, window: int) -> None:
    lm = scripted("x", window=window)
    prompt, limit = limits(lm, length, max_gen_toks)
    assert len(prompt) >= 1
    assert limit >= 1
    assert len(prompt) + limit <= window
    assert limit == max_gen_toks or max_gen_toks >= window
    assert b"abcdefghij"[:length].endswith(bytes(prompt))


# ---------------------------------------------------------------- sampling

SAMPLED = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 12}


def test_sampling_is_reproducible_per_request_whatever_the_batch() -> None:
    def texts(batch_size: int, prompts: Sequence[str]) -> dict[str, str]:
        lm = scripted("abcdefghijkl", spread=0.1, batch_size=batch_size)
        found = lm.generate_until([request(f"{prompt}<|script0|>", SAMPLED) for prompt in prompts])
        return dict(zip(prompts, found, strict=True))

    whole = texts(4, ["a", "bb", "ccc", "dddd"])
    assert texts(1, ["dddd", "a", "ccc", "bb"]) == whole
    assert texts(3, ["bb"]) == {"bb": whole["bb"]}
    assert whole["a"] != "abcdefghijkl"


def test_repeats_differ_and_are_reproducible() -> None:
    def texts() -> list[str]:
        lm = scripted("abcdefghijkl", spread=0.1)
        found: list[str] = lm.generate_until([request("<|script0|>", SAMPLED)] * 4)
        return found

    assert len(set(texts())) == 4
    assert texts() == texts()


def test_the_seed_of_the_run_and_of_the_request_are_obeyed() -> None:
    lm = scripted("abcdefghijkl", spread=0.1)
    first = said(lm, SAMPLED)
    assert said(scripted("abcdefghijkl", spread=0.1, seed=7), SAMPLED) != first
    assert said(lm, {**SAMPLED, "seed": 7}) == said(scripted("abcdefghijkl", spread=0.1, seed=7), SAMPLED)


@pytest.mark.parametrize(
    "greedy",
    [
        {},
        {"do_sample": False},
        {"do_sample": False, "temperature": 0.7},
        {"do_sample": True, "temperature": 0.0},
    ],
)
def test_what_is_greedy(greedy: dict[str, Any]) -> None:
    assert said(scripted("abcdefghijkl", spread=0.1), {**greedy, "max_gen_toks": 12}) == "abcdefghijkl"


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_top_k_top_p_and_min_p_reach_the_sampler(narrow: dict[str, Any]) -> None:
    """Each so narrow that only the best token is left."""
    assert said(scripted("abcdefghijkl", spread=0.1), {**SAMPLED, **narrow}) == "abcdefghijkl"


# ---------------------------------------------------------------- thinking


def thinking_tokenizer(special: bool) -> Any:
    """Bytes with `<think>` and `</think>` as tokens, written out when decoded or not."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    base = byte_tokenizer(eos_token_id=256, vocab_size=257)
    backend_tokenizer = base.backend_tokenizer
    names = ["<think>", "</think>", "<|filler0|>", "<|filler1|>", *[f"<|script{k}|>" for k in range(16)]]
    backend_tokenizer.add_tokens(
        [AddedToken(name, special=special or "script" in name, normalized=False) for name in names]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend_tokenizer, eos_token="<|eos|>", clean_up_tokenization_spaces=False
    )


THOUGHT, THOUGHT_END = 257, 258
"""Ids of `<think>` and `</think>` in `thinking_tokenizer`."""


@pytest.mark.parametrize("special", [False, True])
def test_a_thinking_section_is_removed_and_stops_inside_it_do_not_count(special: bool) -> None:
    """Whether `<think>` is written out when decoded (Qwen3) or is a special token that is left out."""
    tokenizer = thinking_tokenizer(special)
    assert tokenizer.convert_tokens_to_ids(["<think>", "</think>", "<|script0|>"]) == [257, 258, 261]
    script = [THOUGHT, *b"one\n\ntwo", THOUGHT_END, *b"\n\nyes\n\nno"]
    lm = scripted(
        script,
        [*b"one\n\ntwo", THOUGHT_END, *b"yes\n\nno"],
        [THOUGHT, *b"one\n"],
        tokenizer=tokenizer,
        eos=256,
    )
    assert said(lm, {"until": ["no"]}) == "yes\n\n"
    assert said(lm, {"until": ["s\n"]}) == "ye"
    assert said(lm, {"until": ["\n"], "max_gen_toks": 4}, "<|script2|>") == ""
    assert lm.statistics.notes["the token limit came inside the thinking section; the answer is empty"] == 1


@pytest.mark.parametrize("special", [False, True])
def test_a_section_opened_by_the_prompt(special: bool) -> None:
    tokenizer = thinking_tokenizer(special)
    lm = scripted([THOUGHT, *b"\none\n\ntwo", THOUGHT_END, *b"yes\nno"], tokenizer=tokenizer, eos=256)
    assert said(lm, {"until": ["\n"]}, "<|script0|><think>") == "yes"
    assert said(lm, {"until": ["\n"]}, "<|script0|><think>\n") == "yes"
    assert said(lm, {"until": ["\n"], "max_gen_toks": 3}, "<|script0|><think>\n") == ""


def test_a_model_that_can_think_and_does_not() -> None:
    lm = scripted("yes\nno", tokenizer=thinking_tokenizer(False), eos=256)
    assert said(lm, {"until": ["\n"]}) == "yes"


@pytest.mark.parametrize("end", ["DONE", "<|endthink|>", THINK_END, str(THINK_END)])
def test_the_users_think_end_token_as_text_and_as_id(end: str | int) -> None:
    closing = list(b"DONE") if end == "DONE" else [THINK_END]
    lm = scripted([*b"one\ntwo", *closing, *b" yes\nno"], think_end_token=end)
    assert said(lm, {"until": ["\n"]}) == "yes"


def test_the_users_think_end_token_that_never_comes() -> None:
    """Nobody knows whether a section was opened: the text counts up to its first stop, as in lm-eval."""
    lm = scripted("one\ntwo", think_end_token="DONE")
    assert said(lm, {"until": ["\n"]}) == "one"
