"""All rules of generation at once: batches that mix requests of every kind, where each is answered as it is alone.

The rules one by one are in `test_lm_generation.py`.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_eval.harness.lm import MLXEvalLM
from tests.harness.backends import TOKENIZERS, VOCAB, Hook, network, scripted
from tests.harness.test_lm_generation import THOUGHT, THOUGHT_END, thinking_tokenizer
from tests.tiny import NEAR_TIE, RECURRENT, loaded, oracle_generate, request, tiny_model

Asked = tuple[str, dict[str, Any]]

# ---------------------------------------------------------------- a model that says what it is told

EOS, SECOND_EOS = 256, 259
SCRIPTS = (
    [*b"hello world. Next line\n\nmore", EOS],
    [THOUGHT, *b"one\n\ntwo", THOUGHT_END, *b"\n\nyes\n\nno", EOS],
    [*"a😀b é stop it".encode(), SECOND_EOS, *b" not this", EOS],
    [THOUGHT, *b"never ends\n\n" * 20],
    [*b"x" * 40, EOS],
    [*b"spelled<|eos|>more", EOS],
    [EOS],
    [*b" \n tail ", EOS],
    [*b"in the answer ", THOUGHT, *b"\n", THOUGHT_END, *b" the rest\nmore", EOS],
)
HOT = {"do_sample": True, "temperature": 6.0, "max_gen_toks": 20}
"""At which a script's next token has a chance of one in ten, and every other one, EOS and thinking too, has some."""
TABLE: tuple[tuple[str, dict[str, Any], str | None], ...] = (
    # until in every form
    ("<|script0|>", {"until": "wo"}, "hello "),
    ("Q: <|script0|>", {"until": ["\n\n", "Next"]}, "hello world. "),
    ("a stop here\n\n<|script0|>", {"until": ("here", "\n\n")}, "hello world. Next line"),
    ("é" * 30 + "<|script0|>", {"until": ["", "."]}, "hello world"),
    ("b<|script0|>", {"until": None}, "hello world. Next line\n\nmore"),
    ("c<|script0|>", {"until": ""}, "hello world. Next line\n\nmore"),
    ("d<|script0|>", {}, "hello world. Next line\n\nmore"),
    ("e<|script0|>", {"until": [" "]}, "hello"),
    ("f<|script7|>", {"until": ["\n"]}, " "),
    ("g<|script7|>", {"until": []}, " \n tail "),
    ("h<|script2|>", {"until": ["😀"]}, "a"),
    ("ii<|script2|>", {"until": "é s"}, "a😀b "),
    # until lists that look alike
    ("jj<|script0|>", {"until": "\n\n"}, "hello world. Next line"),
    ("jj<|script0|>", {"until": ["\n", "\n"]}, "hello world. Next line"),
    ("jj<|script0|>", {"until": ["\n\n", "e"]}, "h"),
    # limits
    ("k<|script0|>", {"until": ["zzz"], "max_gen_toks": 7}, "hello w"),
    ("k<|script4|>", {"max_new_tokens": 33}, "x" * 33),
    ("k<|script4|>", {"max_tokens": 40}, "x" * 40),
    ("k<|script4|>", {"max_completion_tokens": 1}, "x"),
    ("k<|script4|>", {"until": ["xxxxx"]}, ""),
    # what ends a sequence
    ("l<|script2|>", {}, "a😀b é stop it"),
    ("l<|script5|>", {"until": ["more"]}, "spelled"),
    ("l<|script6|>", {}, ""),
    # thinking
    ("m<|script1|>", {"until": ["\n\n"]}, "yes"),
    ("mm<|script1|>", {"until": ["yes"]}, ""),
    ("mmm<|script1|>", {}, "yes\n\nno"),
    ("m<|script1|>", {"until": [], "max_gen_toks": 5}, ""),
    ("<|script1|><think>", {"until": "\n\n"}, "yes"),
    ("<|script1|><think>", {"until": ["two", "es"]}, "y"),
    ("<|script3|>", {"until": ["\n\n"], "max_gen_toks": 30}, ""),
    ("<|script8|>", {"until": ["rest"]}, "the "),
    ("<|script8|>", {"until": ["answer"]}, "in the "),
    # sampled and penalised
    ("n<|script4|>", HOT, None),
    ("n<|script4|>", {**HOT, "seed": 3}, None),
    ("n<|script0|>", {**HOT, "until": ["o"], "top_k": 3}, None),
    ("nn<|script1|>", {**HOT, "top_p": 0.5, "until": ["\n"]}, None),
    ("nnn<|script4|>", {"temperature": 8, "min_p": 0.02, "max_gen_toks": 5}, None),
    ("mno<|script2|>", {**HOT, "repetition_penalty": 1.5}, None),
    ("nnn<|script4|>", {"repetition_penalty": 1.5}, "x" * 40),
    ("nnn<|script0|>", {"do_sample": False, "temperature": 1, "num_beams": 1, "until": ["w"]}, "hello "),
)  # fmt: skip
ASKED: tuple[Asked, ...] = tuple((prompt, gen_kwargs) for prompt, gen_kwargs, _ in TABLE)


def answers(lm: Any, asked: Sequence[Asked], batch_size: int) -> list[str]:
    with lm.in_batches_of(batch_size):
        found: list[str] = lm.generate_until([request(*one) for one in asked])
    return found


@functools.cache
def teller(special: bool) -> Any:
    """Whether `<think>` is a special token, which decoding leaves out, or an ordinary one."""
    return scripted(*SCRIPTS, tokenizer=thinking_tokenizer(special), eos=[EOS, SECOND_EOS])


@functools.cache
def alone(special: bool, index: int, times: int) -> list[str]:
    """What a request of the table is answered by itself, asked several times."""
    return answers(teller(special), [ASKED[index]] * times, 1)


def in_turn(indices: Sequence[int], special: bool) -> list[str]:
    """What each request is answered alone, the n-th time that it is asked for."""
    times: Counter[int] = Counter()
    found = []
    for index in indices:
        times[index] += 1
        found.append(alone(special, index, times[index])[-1])
    return found


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("index", range(len(TABLE)))
def test_alone_each_kind_of_request_is_answered_by_its_rule(index: int, special: bool) -> None:
    prompt, _, expected = TABLE[index]
    (text,) = alone(special, index, 1)
    if expected is None:
        assert text != alone(special, index, 2)[1], (
            f"{prompt}: asked again, a sampled request has another answer"
        )
    else:
        assert text == expected


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("batch_size", range(1, 9))
def test_all_kinds_in_one_call_are_answered_as_alone(batch_size: int, special: bool) -> None:
    order = list(range(len(TABLE)))
    random.Random(batch_size).shuffle(order)
    assert answers(teller(special), [ASKED[index] for index in order], batch_size) == in_turn(order, special)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, len(TABLE) - 1), min_size=2, max_size=12), st.integers(1, 8), st.booleans())
def test_any_mix_in_any_order_is_answered_as_alone(
    indices: list[int], batch_size: int, special: bool
) -> None:
    asked = [ASKED[index] for index in indices]
    assert answers(teller(special), asked, batch_size) == in_turn(indices, special)


@pytest.mark.parametrize("batch_size", [3, 8])
def test_each_answer_of_a_mixed_call_goes_to_the_cache_once_with_its_own_arguments(batch_size: int) -> None:
    lm = teller(False)
    asked = [request(*one) for one in (*ASKED, *ASKED[:5])]
    before, lm.cache_hook = lm.cache_hook, Hook()
    try:
        with lm.in_batches_of(batch_size):
            texts = lm.generate_until(asked)
        seen = lm.cache_hook.seen
    finally:
        lm.cache_hook = before
    assert {kind for kind, _, _ in seen} == {"generate_until"}
    by_arguments = {id(arguments): text for _, arguments, text in seen}
    assert len(seen) == len(by_arguments) == len(asked)
    assert [by_arguments[id(one.args)] for one in asked] == texts


def test_an_answer_is_handed_on_before_a_longer_one_beside_it_is_done() -> None:
    lm = teller(False)
    before, lm.cache_hook = lm.cache_hook, Hook()
    try:
        answers(lm, [("p<|script4|>", {}), ("q<|script0|>", {"until": ["e"]}), ("r<|script6|>", {})], 3)
        assert [text for _, _, text in lm.cache_hook.seen] == ["", "h", "x" * 40]
    finally:
        lm.cache_hook = before


# ---------------------------------------------------------------- networks

WINDOW = 32
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"query_pre_attn_scalar": 8, "sliding_window": 8, "sliding_window_pattern": 2},
    "mamba": RECURRENT["mamba"],
}
SHARED = "Question: what is the answer? "
REAL: tuple[Asked, ...] = (
    (SHARED + "the quick", {"max_gen_toks": 12}),
    (SHARED + "brown fox", {"max_gen_toks": 5, "until": ["\n"]}),
    (SHARED + "brown fox", {"max_gen_toks": 12, "until": ["e", "q"]}),
    ("Answer", {"max_gen_toks": 20, "repetition_penalty": 1.5}),
    ("Answer", {"max_gen_toks": 20}),
    ("", {"max_gen_toks": 6}),
    ("é", {"max_gen_toks": 6, "temperature": 0.8, "top_p": 0.9}),
    ("é", {"max_gen_toks": 9, "temperature": 1.2, "top_k": 12, "repetition_penalty": 1.2}),
    (SHARED + "lazy", {"max_gen_toks": 10, "do_sample": True, "until": [" "]}),
    # the prompt is cut on its left, the limit lowered where it is as long as the window
    ("the lazy dog. " * 12, {"max_gen_toks": 10}),
    ("the lazy dog. " * 12, {"max_gen_toks": WINDOW - 1, "until": ["a"]}),
    ("the lazy dog. " * 12, {"max_gen_toks": WINDOW}),
    ("the lazy", {"max_gen_toks": 500, "temperature": 1.0}),
)


@functools.cache
def model_of(kind: str) -> Any:
    return network() if kind == "llama" else tiny_model(kind, VOCAB, **KINDS[kind])


@functools.cache
def real(kind: str, name: str, speculate: str) -> Any:
    tokenizer: Any = TOKENIZERS[name]
    return MLXEvalLM(loaded(model_of(kind), tokenizer(), window=WINDOW), speculate=speculate)


@functools.cache
def real_alone(kind: str, name: str) -> list[str]:
    return [answers(real(kind, name, "off"), [one], 1)[0] for one in REAL]


@pytest.mark.parametrize(
    ("kind", "name", "speculate"),
    [
        ("llama", "bos", "off"),
        ("llama", "spm", "off"),
        ("llama", "bos", "4"),
        ("gemma3_text", "plain", "off"),
        ("mamba", "eos only", "off"),
    ],
)
def test_networks_answer_a_mixed_call_as_each_request_alone(kind: str, name: str, speculate: str) -> None:
    """In any order, in batches that refill as rows end, the greedy rows of a speculating run drafted."""
    lm, expected = real(kind, name, speculate), real_alone(kind, name)
    order = list(range(len(REAL)))
    for batch_size in (3, 8):
        random.Random(batch_size).shuffle(order)
        found = answers(lm, [REAL[index] for index in order], batch_size)
        assert found == [expected[index] for index in order]


def test_prompts_that_are_cut_are_continued_as_the_model_continues_what_is_left() -> None:
    lm = real("llama", "bos", "off")
    found = answers(lm, REAL, 4)
    for index, limit in ((0, 12), (9, 10), (11, WINDOW // 2)):
        prompt = lm.tok_encode(REAL[index][0])[-(WINDOW - limit) :]
        expected, margin = oracle_generate(network(), prompt, limit, [lm.eot_token_id])
        assert margin > NEAR_TIE, "choose another seed: the oracle itself is not sure"
        assert found[index] == lm.tok_decode(expected)


def test_what_a_mixed_call_had_to_cut_is_counted() -> None:
    lm = real("llama", "bos", "off")
    lm.statistics.notes.clear()
    answers(lm, REAL, 8)
    assert lm.statistics.notes == {
        "the prompt and its answer do not fit; prompt truncated on the left": 3,
        "max_gen_toks is as large as the window; the answer's limit was lowered": 2,
    }
