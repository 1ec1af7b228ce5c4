"""Finds the place where an answer ends: stop texts, thinking sections, split characters.

Knows a decode function from ids to text and nothing else of the tokenizer or the model. Stops are looked for in
the decoded text, so it does not matter which tokens spell them or how they are split over tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

Decode = Callable[[Sequence[int]], str]
"""Ids to text, special tokens left out."""

INCOMPLETE: Final = "\ufffd"
"""What a decoder writes for bytes that are no character yet, some for a whole run of bytes that ends with such."""
KEPT_TOKENS: Final = 8
"""Tokens that stay to be decoded with new ones, at least: more than a decoder looks back when it joins and tidies."""
MOST_TOKENS: Final = 32
"""Tokens at which the oldest are let go. Decoding so many takes hardly longer than decoding one."""


class Thinking(NamedTuple):
    """How a model marks its thinking section."""

    start: str | None
    """Text that opens it; None: not known, so that stops count only after the end, should it come."""
    end: str
    """Text that closes it."""
    end_ids: tuple[int, ...] = ()
    """Ids that close it, for models that spell the end with a special token, which decoding leaves out."""
    start_ids: tuple[int, ...] = ()
    """Likewise for what opens it."""


class Answer(NamedTuple):
    """The text of a finished row."""

    text: str
    unfinished_thinking: bool


class _Place(NamedTuple):
    """Where a text, or the end of one, stands."""

    begin: int
    """Where the answer begins in it, if no section is open."""
    opened: bool
    """Whether a thinking section is open at its end."""
    after_section: bool
    """Whether nothing but white space has come since a section was closed: it is no part of the answer."""


class AnswerText:
    """The growing text of one row.

    A new token can complete a stop only at the end of the text. So what was decoded long ago is let go but for its
    last characters, and a token costs the same wherever it stands:

        text so far     |-- let go --|-- tail --|-- decoded anew --|
                                      longest    of the window's
                                      marker - 1 tokens
    """

    def __init__(
        self,
        decode: Decode,
        stop: Sequence[str] = (),
        thinking: Thinking | None = None,
        in_thinking: bool = False,
    ) -> None:
        """Start with an empty text.

        Args:
            decode: ids to text, special tokens left out.
            stop: texts that end the answer, each not empty.
            thinking: the model's markers, None when it has none.
            in_thinking: whether the prompt has opened the section already.
        """
        self._decode = decode
        self._stop = tuple(stop)
        self._thinking = thinking
        markers = [*self._stop, *((thinking.start or "", thinking.end) if thinking else ())]
        self._reach = max(map(len, markers), default=1) - 1
        self._ids: list[int] = []
        opened = thinking is not None and (in_thinking or thinking.start is None)
        self._start(_Place(0, opened, after_section=False))

    def _start(self, place: _Place) -> None:
        """Begin a text at the next token, where `place` is."""
        self._first = len(self._ids)
        self._first_place = place
        self._window: list[int] = []  # the last tokens, those left out that are never any text
        self._recent = ""  # their text
        self._tail = ""  # the end of the text before
        self._tail_place = place

    def push(self, token: int) -> bool:
        """Add one token; whether the answer is complete with it."""
        self._ids.append(token)
        if self._thinking is not None:
            opens = self._ends_with(self._thinking.start_ids)
            if opens or self._ends_with(self._thinking.end_ids):
                self._start(_Place(0, opens, after_section=not opens))
                return False
        if not self._stop:
            return False
        self._window.append(token)
        now = self._decode(self._window)
        if now == self._recent and now and self._is_silent(token):
            self._window.pop()
            return False
        self._recent = now
        # the window's text may differ from the whole one where a decoder does unforeseen things: it says when to look
        if self._cut(self._tail + now, self._tail_place) is not None:
            return self._cut(self._whole_text(), self._first_place) is not None
        patience = KEPT_TOKENS if now.endswith(INCOMPLETE) else 0
        if len(self._window) >= MOST_TOKENS + patience:
            self._let_go()
        return False

    def finish(self) -> Answer:
        """The answer: after the thinking section, before the first stop."""
        text = self._whole_text()
        place = self._end_place(text, self._first_place)
        if place.opened and self._thinking is not None and self._thinking.start is not None:
            return Answer("", unfinished_thinking=True)
        # a section without a known start may never have been opened: the text counts, as in lm-eval
        return Answer(text[place.begin : self._first_stop(text, place.begin)], unfinished_thinking=False)

    def _let_go(self) -> None:
        """Move the text of the window's first tokens to the tail.

        A cut is taken where the text of what is left is the end of the whole window's, so that no character is torn,
        and a space that a decoder drops at a beginning stays in the tail.
        """
        for first in range(len(self._window) - KEPT_TOKENS, 0, -1):
            left = self._decode(self._window[first:])
            if self._recent.endswith(left):
                break
        else:  # bytes that are no text: any place is as good
            first = len(self._window) - KEPT_TOKENS
            left = self._decode(self._window[first:])
        tail = self._tail + self._recent[: max(0, len(self._recent) - len(left))]
        place = self._end_place(tail, self._tail_place)
        start = max(0, len(tail) - self._reach)
        self._tail, self._tail_place = tail[start:], place._replace(begin=max(0, place.begin - start))
        self._window, self._recent = self._window[first:], left

    def _is_silent(self, token: int) -> bool:
        """Whether the window's last token, which has added nothing to the text before it, adds nothing to any.

        A piece of a character does so when it comes twice, a space that a decoder drops at an end when text follows.
        """
        if self._decode([token, token]):
            return False
        before = self._window[:-1]
        return self._decode([*before, token, *before]) == self._decode([*before, *before])

    def _whole_text(self) -> str:
        return self._decode(self._ids[self._first :])

    def _ends_with(self, ids: tuple[int, ...]) -> bool:
        return bool(ids) and tuple(self._ids[-len(ids) :]) == ids

    def _end_place(self, text: str, place: _Place) -> _Place:
        """Where `text` stands that stood at `place` when it began, as far as it does not say otherwise."""
        if self._thinking is None:
            return place
        begin, opened, after_section = place
        end = text.rfind(self._thinking.end)
        if end >= 0:
            begin, opened, after_section = end + len(self._thinking.end), False, True
        if self._thinking.start is not None and text.find(self._thinking.start, begin) >= 0:
            opened = True
        if after_section:
            begin = len(text) - len(text[begin:].lstrip())
            after_section = begin == len(text)
        return _Place(begin, opened, after_section)

    def _cut(self, text: str, place: _Place) -> int | None:
        """Where the first stop text of the answer begins in `text`, see `_end_place`; None without one."""
        place = self._end_place(text, place)
        return None if place.opened else self._first_stop(text, place.begin)

    def _first_stop(self, text: str, begin: int) -> int | None:
        found = [place for stop in self._stop if (place := text.find(stop, begin)) >= 0]
        return min(found, default=None)
