"""Where an answer ends, against a slow oracle: the whole text decoded anew and cut at its first stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_eval.engine.stops import MAX_HELD, AnswerText, Thinking
from mlx_eval.harness.encoding import Encoder
from tests.tiny import THINK, THINK_END, bpe_tokenizer, script_tokenizer, spm_tokenizer

THINKING = Thinking("<think>", "</think>")
TOKENIZERS = {"bytes": script_tokenizer, "bpe": bpe_tokenizer, "spm": spm_tokenizer}


def decoder(name: str) -> Any:
    return Encoder(TOKENIZERS[name]()).decode


def encode(name: str, text: str) -> list[int]:
    ids: list[int] = TOKENIZERS[name]().encode(text, add_special_tokens=False)
    return ids


def run(answer: AnswerText, ids: Sequence[int]) -> int:
    """Push ids until one ends the answer; how many were pushed."""
    for count, token in enumerate(ids, 1):
        if answer.push(token):
            return count
    return len(ids)


def answer_of(
    name: str, text: str, stop: Sequence[str] = (), thinking: Thinking | None = None, **kwargs: Any
) -> str:
    answer = AnswerText(decoder(name), stop, thinking, **kwargs)
    run(answer, encode(name, text))
    return answer.finish().text


@pytest.mark.parametrize("name", TOKENIZERS)
def test_without_stops_the_text_is_the_decoded_text(name: str) -> None:
    text = "The answer is 42, é 😀 done."
    assert answer_of(name, text) == decoder(name)(encode(name, text))


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("stop", ["quick", "k b", "é", "😀", "\n\n", " ", "."])
def test_the_text_is_cut_before_the_first_stop_and_ends_with_the_token_that_completes_it(
    name: str, stop: str
) -> None:
    """Stops split over tokens and inside a token, whichever tokens spell them."""
    ids = encode(name, "Answer: the quick brown é fox 😀.\n\nAnswer")
    decode = decoder(name)
    answer = AnswerText(decode, [stop])
    pushed = run(answer, ids)
    first = next(count for count in range(1, len(ids) + 1) if stop in decode(ids[:count]))
    assert pushed == first
    assert answer.finish().text == decode(ids[:first]).split(stop)[0]


def test_a_stop_inside_one_token() -> None:
    (token,) = encode("bpe", "Answer")
    answer = AnswerText(decoder("bpe"), ["sw"])
    assert answer.push(token)
    assert answer.finish().text == "An"


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_text_and_stops_agree_with_the_oracle(name: str, data: st.DataObject) -> None:
    alphabet = st.sampled_from("ab é😀\nn\u4e2d Answer the")
    text = data.draw(st.text(alphabet, min_size=1, max_size=20))
    stops = data.draw(st.lists(st.text(alphabet, min_size=1, max_size=3), max_size=3))
    ids = encode(name, text)
    decode = decoder(name)
    expected_count = next(
        (count for count in range(1, len(ids) + 1) if any(stop in decode(ids[:count]) for stop in stops)),
        len(ids),
    )
    whole = decode(ids[:expected_count])
    cut = min((whole.find(stop) for stop in stops if stop in whole), default=len(whole))
    answer = AnswerText(decode, stops)
    assert run(answer, ids) == expected_count
    assert answer.finish().text == whole[:cut]


def test_a_character_split_over_tokens_is_whole_in_the_text_and_no_stop_before_its_end() -> None:
    ids = encode("bytes", "a😀b")
    answer = AnswerText(decoder("bytes"), ["😀"])
    assert [answer.push(token) for token in ids[:5]] == [False, False, False, False, True]
    assert answer.finish().text == "a"


def test_broken_bytes_do_not_hide_a_stop_for_ever() -> None:
    answer = AnswerText(decoder("bytes"), ["stop"])
    ids = [0xE2] * (MAX_HELD + 5) + list(b"xstop")
    assert run(answer, ids) == len(ids)
    assert answer.finish().text.endswith("x")


def test_the_work_for_each_token_does_not_grow_with_the_text() -> None:
    """Not even where bytes are broken for ever: the window that is decoded anew stays short."""
    lengths: list[int] = []
    decode = decoder("bytes")

    def watched(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        text: str = decode(ids)
        return text

    run(AnswerText(watched, ["stop"]), [0xE2] * 200 + list(b"plain text, a long one" * 10))
    assert max(lengths) <= 2 * (MAX_HELD + 2)


@pytest.mark.parametrize("stops", [["r", "s"], ["s", "r"], ["er", "nsw", "swe"]])
def test_the_first_stop_in_the_text_counts_and_not_the_first_in_the_list(stops: list[str]) -> None:
    (token,) = encode("bpe", "Answer")
    answer = AnswerText(decoder("bpe"), stops)
    assert answer.push(token)
    assert answer.finish().text == min(("Answer".split(stop, maxsplit=1)[0] for stop in stops), key=len)


def tidy(ids: Sequence[int]) -> str:
    """A decoder that removes spaces before some marks, as transformers' clean-up does."""
    return "".join(map(chr, ids)).replace(" .", ".").replace(" n't", "n't")


def test_a_decoder_that_tidies_up_what_came_before() -> None:
    answer = AnswerText(tidy, ["."])
    assert run(answer, list(b"hello . more")) == len("hello .")
    assert answer.finish().text == "hello"
    answer = AnswerText(tidy, ["o n't"])
    assert run(answer, list(b"do n't go")) == len("do n't go"), "a stop that is not in the text"
    assert answer.finish().text == "don't go"


def test_special_tokens_are_no_part_of_the_text() -> None:
    answer = AnswerText(decoder("bytes"))
    run(answer, [*b"ab", 258, *b"cd", 256])
    assert answer.finish().text == "abcd"


# ---------------------------------------------------------------- thinking


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_a_stop_inside_the_section_does_not_count_and_the_section_is_removed(name: str) -> None:
    text = "<think>first\n\nsecond</think>\n\nThe answer\n\nmore"
    assert answer_of(name, text, ["answer"], THINKING) == "The "
    assert answer_of(name, text, ["fir"], THINKING) == "The answer\n\nmore"


def test_a_section_opened_by_the_prompt() -> None:
    text = "first\n\nsecond</think>The answer\n\nmore"
    assert answer_of("bytes", text, ["\n\n"], THINKING, in_thinking=True) == "The answer"


def test_an_answer_without_a_section_is_kept() -> None:
    assert answer_of("bytes", "The answer\n\nmore", ["\n\n"], THINKING) == "The answer"


@pytest.mark.parametrize(("text", "opened"), [("<think>never ends\n\n", False), ("never ends\n\n", True)])
def test_an_unfinished_section_leaves_no_text_and_says_so(text: str, opened: bool) -> None:
    answer = AnswerText(decoder("bytes"), ["\n\n"], THINKING, opened)
    assert run(answer, encode("bytes", text)) == len(text)
    assert answer.finish() == ("", True)


def test_a_second_section_is_removed_too() -> None:
    text = "<think>one</think>half <think>two\n\n</think> whole\n\nmore"
    assert answer_of("bytes", text, ["\n\n"], THINKING) == "whole"


def test_the_end_as_a_special_token() -> None:
    thinking = Thinking("<|think|>", "<|endthink|>", (THINK_END,), (THINK,))
    answer = AnswerText(decoder("bytes"), ["\n"], thinking)
    ids = [THINK, *b"one\ntwo", THINK_END, *b"\xc3\xa9n\nmore"]
    assert run(answer, ids) == ids.index(THINK_END) + 5
    assert answer.finish() == ("én", False)


def test_the_start_and_end_as_special_tokens_unfinished() -> None:
    """The start is left out of the decoded text too: the section must still be seen."""
    thinking = Thinking("<|think|>", "<|endthink|>", (THINK_END,), (THINK,))
    answer = AnswerText(decoder("bytes"), ["\n"], thinking)
    ids = [THINK, *b"one\ntwo"]
    assert run(answer, ids) == len(ids)
    assert answer.finish() == ("", True)


def test_an_end_without_a_known_start_holds_from_the_first_token() -> None:
    thinking = Thinking(None, "DONE")
    assert answer_of("bytes", "a\nbDONE c\nd", ["\n"], thinking) == "c"
