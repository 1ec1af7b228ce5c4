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
"""What a decoder writes for bytes that are no whole character yet."""
MAX_HELD: Final = 8
"""Tokens after which an incomplete character is taken for broken: none has more than four bytes."""


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


class AnswerText:
    """The growing text of one row."""

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
        self._in_thinking = in_thinking
        self._ids: list[int] = []
        self._answer_start = 0  # index of the first id after the last opening or closing ids
        self._text = ""  # of the ids from _answer_start to _read
        self._window = 0  # decoding starts here, so that a joining decoder sees what came before
        self._read = 0

    def push(self, token: int) -> bool:
        """Add one token; whether the answer is complete with it."""
        self._ids.append(token)
        opens = self._thinking is not None and self._ends_with(self._thinking.start_ids)
        if opens or (self._thinking is not None and self._ends_with(self._thinking.end_ids)):
            self._answer_start = self._window = self._read = len(self._ids)
            self._text = ""
            self._in_thinking = opens
            return False
        before = self._decode(self._ids[self._window : self._read])
        now = self._decode(self._ids[self._window :])
        if now.startswith(before):
            new = now[len(before) :]
            candidate = self._text + new
        else:  # the decoder tidies up: this token has changed the text before it
            new = candidate = self._whole_text()
        if not new.endswith(INCOMPLETE) or len(self._ids) - self._read > MAX_HELD:
            self._text = candidate
            self._window, self._read = self._read, len(self._ids)
        # the windowed text may differ from the whole one by a space or so: it only says when to look closely
        return bool(new) and self._cut(candidate) is not None and self._cut(self._whole_text()) is not None

    def finish(self) -> Answer:
        """The answer: after the thinking section, before the first stop."""
        text = self._whole_text()
        begin = self._section_end(text)
        if begin is None and self._thinking is not None and self._thinking.start is None:
            begin = 0  # whether a section was ever opened is not known: the text counts, as in lm-eval
        if begin is None:
            return Answer("", unfinished_thinking=True)
        cut = self._first_stop(text, begin)
        answer = text[begin : len(text) if cut is None else cut]
        return Answer(answer.lstrip() if begin or self._answer_start else answer, unfinished_thinking=False)

    def _whole_text(self) -> str:
        return self._decode(self._ids[self._answer_start :])

    def _ends_with(self, ids: tuple[int, ...]) -> bool:
        return bool(ids) and tuple(self._ids[-len(ids) :]) == ids

    def _section_end(self, text: str) -> int | None:
        """Where the answer begins in `text`; None while a thinking section is open."""
        if self._thinking is None:
            return 0
        end = text.rfind(self._thinking.end)
        begin = 0 if end < 0 else end + len(self._thinking.end)
        if self._thinking.start is None:
            opened = end < 0 and not self._answer_start
        else:
            opened = text.find(self._thinking.start, begin) >= 0 or (end < 0 and self._in_thinking)
        return None if opened else begin

    def _cut(self, text: str) -> int | None:
        """Where the first stop text of the answer begins in `text`; None without one."""
        begin = self._section_end(text)
        return None if begin is None else self._first_stop(text, begin)

    def _first_stop(self, text: str, begin: int) -> int | None:
        found = [place for stop in self._stop if (place := text.find(stop, begin)) >= 0]
        return min(found, default=None)
