"""Where an answer ends, against a slow oracle: the whole text decoded anew and cut at its first stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_eval.engine import stops as stops_module
from mlx_eval.engine.stops import KEPT_TOKENS, MOST_TOKENS, Answer, AnswerText, Thinking
from mlx_eval.harness.encoding import Encoder
from tests.tiny import SCRIPT_BOS, THINK, THINK_END, bpe_tokenizer, script_tokenizer, spm_tokenizer

THINKING = Thinking("<think>", "</think>")
TOKENIZERS: dict[str, Any] = {"bytes": script_tokenizer, "bpe": bpe_tokenizer, "spm": spm_tokenizer}


def decoder(name: str) -> Any:
    return Encoder(TOKENIZERS[name]()).decode


def encode(name: str, text: str) -> list[int]:
    ids: list[int] = TOKENIZERS[name]().encode(text, add_special_tokens=False)
    return ids


def watched(decode: Any, lengths: list[int]) -> Any:
    """A decoder that writes down how many ids it is given."""

    def decode_and_note(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        text: str = decode(ids)
        return text

    return decode_and_note


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
    ids = [0xE2] * 50 + list(b"xstop")
    assert run(answer, [*ids, *b"more"]) == len(ids)
    assert answer.finish().text.endswith("x")


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("bytes", list(b"plain text, a long one" * 20)),
        ("bytes", [0xE2] * 400),
        ("bytes", list("中😀é".encode() * 50)),
        ("bytes", [*b"text", *[SCRIPT_BOS] * 400]),
        ("bytes", [SCRIPT_BOS] * 400),
        ("spm", [1, *[3] * 400]),
    ],
)
@pytest.mark.parametrize("thinking", [None, THINKING])
def test_the_work_for_each_token_does_not_grow_with_the_text(
    name: str, ids: list[int], thinking: Thinking | None
) -> None:
    """Not even where bytes are broken for ever, or nothing is ever text: what is decoded anew stays short."""
    lengths: list[int] = []
    assert run(AnswerText(watched(decoder(name), lengths), ["stop", "\n\n"], thinking), ids) == len(ids)
    assert max(lengths) <= 2 * MOST_TOKENS
    assert len(lengths) <= 4 * len(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("before", range(4))
def test_a_stop_after_many_characters_that_are_spelled_in_bytes(name: str, before: int) -> None:
    """A decoder with bytes for rare characters shows none of a run of them while the last is incomplete."""
    ids = encode(name, "a" * before + "中" * 40 + "文")
    answer = AnswerText(decoder(name), ["中" * 12 + "文"])
    assert run(answer, [*ids, *ids]) == len(ids)
    assert answer.finish().text == decoder(name)(ids)[:-13]


def test_without_stops_nothing_is_decoded_until_the_end() -> None:
    lengths: list[int] = []
    answer = AnswerText(watched(decoder("bytes"), lengths), thinking=THINKING)
    assert run(answer, list(b"x" * 300)) == 300
    assert not lengths
    assert answer.finish().text == "x" * 300


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


def trimmed(ids: Sequence[int]) -> str:
    """A decoder that drops spaces at both ends."""
    return "".join(map(chr, ids)).strip()


def test_a_decoder_that_drops_what_stands_at_the_end_until_more_follows() -> None:
    ids = list(b"word" + b"\n" * 5 + b"word" + b" " * 4 + b"\n\nx")
    answer = AnswerText(trimmed, ["\n\nx"])
    assert run(answer, [*ids, *b"more"]) == len(ids)
    assert answer.finish().text == trimmed(ids).split("\n\nx")[0]
    assert run(AnswerText(trimmed, ["d\n\n"]), ids) == len("word\n\n\n\n\nw"), "not before it is in the text"


def headed(ids: Sequence[int]) -> str:
    """A decoder that makes the first letter large, so that no part of a text can be decoded by itself."""
    return "".join(map(chr, ids)).capitalize()


def test_a_stop_that_only_a_part_of_the_text_has_does_not_end_the_answer() -> None:
    ids = list(b"thequickbrownfoxjumpsoverthelazydog" * 3)
    for letter in "ABCDEFGHIJKLMNOPQRSUVWXYZ":
        assert run(AnswerText(headed, [letter]), ids) == len(ids)
    assert run(AnswerText(headed, ["T"]), ids) == 1
    assert run(AnswerText(headed, ["dogthe"]), ids) == len("thequickbrownfoxjumpsoverthelazydogthe")


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


@pytest.mark.parametrize("thinking", [THINKING, Thinking(None, "</think>")])
@pytest.mark.parametrize("space", ["\n\n", "\n" * 60, " \n\n "])
def test_white_space_after_the_section_is_no_stop_as_it_is_no_part_of_the_answer(
    thinking: Thinking, space: str
) -> None:
    text = f"<think>first</think>{space}The answer\n\nmore"
    lengths: list[int] = []
    answer = AnswerText(watched(decoder("bytes"), lengths), ["\n\n"], thinking)
    assert run(answer, encode("bytes", text)) == len(text) - len("more")
    assert sum(length > 2 * MOST_TOKENS for length in lengths) <= 1
    assert answer.finish() == ("The answer", False)


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
    ids = [THINK, *b"one\ntwo", THINK_END, *b"\n\n\xc3\xa9n\nmore"]
    assert run(answer, ids) == ids.index(THINK_END) + 7
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


# ---------------------------------------------------------------- anything, against the oracle

BY_IDS = Thinking("<|think|>", "<|endthink|>", (THINK_END,), (THINK,))
BY_TEXT_AND_IDS = Thinking("<think>", "</think>", (THINK_END, ord("!")), (THINK,))
ANYWHERE = Thinking(None, "DONE")
PIECES = (
    "<think>", "</think>", "<thi", "nk>", "</th", "DONE", "\n\n", "\n", " ", ".", " .", " n't", "é", "😀", "中",
    "Answer", " quick", " the", "stop", "st", "op", "\ufffd", "</think></think>", "ab" * 30, "中" * 20,
)  # fmt: skip


def oracle(
    decode: Any, ids: Sequence[int], stops: Sequence[str], thinking: Thinking | None, in_thinking: bool
) -> tuple[int, Answer]:
    """After each token everything is decoded anew and cut at its first stop."""
    first, by_ids = 0, in_thinking
    for count in range(1, len(ids) + 1):
        for marker, opens in ((thinking.start_ids, True), (thinking.end_ids, False)) if thinking else ():
            if marker and tuple(ids[max(0, count - len(marker)) : count]) == marker:
                first, by_ids = count, opens
        text = decode(ids[first:count])
        answer, is_open, begins_late = text, False, first > 0
        if thinking:
            _, end, answer = text.rpartition(thinking.end)
            is_open = (by_ids or (thinking.start is None and not first)) and not end
            is_open = is_open or (thinking.start is not None and thinking.start in answer)
            begins_late = begins_late or bool(end)
        answer = answer.lstrip() if begins_late else answer
        cut = min((answer.find(stop) for stop in stops if stop in answer), default=None)
        if (cut is not None and not is_open) or count == len(ids):
            if is_open and thinking and thinking.start is not None:
                return count, Answer("", unfinished_thinking=True)
            return count, Answer(
                answer[:cut].lstrip() if begins_late else answer[:cut], unfinished_thinking=False
            )
    raise AssertionError("no tokens")


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(("kept", "most"), [(4, 9), (KEPT_TOKENS, MOST_TOKENS)])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_long_texts_with_everything_in_them_agree_with_the_oracle(
    name: str, kept: int, most: int, data: st.DataObject
) -> None:
    """With the shortest window in which a whole character has room, and with the one that is used."""
    decode = decoder(name)
    special = {"bytes": [SCRIPT_BOS, THINK, THINK_END], "bpe": [0, 1, 2], "spm": [1, 2]}[name]
    # one broken byte makes the last one's decoder change all bytes before it, however many: not here
    any_token = range(259, 340) if name == "spm" else range(3, 256)
    pieces = data.draw(st.lists(st.sampled_from(PIECES), min_size=1, max_size=5))
    chunks = data.draw(
        st.lists(
            st.sampled_from([encode(name, piece) for piece in pieces])
            | st.sampled_from(special).map(lambda token: [token])
            | st.sampled_from(any_token).map(lambda token: [token])
            | st.integers(1, 40).map(lambda count: special[:1] * count),
            min_size=1,
            max_size=40,
        )
    )
    ids = [token for chunk in chunks for token in chunk]
    text = decode(ids)
    places = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 12))
    stop = st.sampled_from(PIECES) | places.map(lambda place: text[place[0] :][: place[1]] or "x")
    stops = data.draw(st.lists(stop, min_size=1, max_size=3))
    thinking = data.draw(st.sampled_from([None, THINKING, BY_IDS, BY_TEXT_AND_IDS, ANYWHERE]))
    in_thinking = thinking is not None and thinking.start is not None and data.draw(st.booleans())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stops_module, "KEPT_TOKENS", kept)
        patched.setattr(stops_module, "MOST_TOKENS", most)
        lengths: list[int] = []
        answer = AnswerText(watched(decode, lengths), stops, thinking, in_thinking)
        count = run(answer, ids)
        assert sum(length > 2 * (most + kept) for length in lengths) <= 1, (
            "the whole text, before it is complete"
        )
        found = (count, answer.finish())
    assert found == oracle(decode, ids, stops, thinking, in_thinking)
