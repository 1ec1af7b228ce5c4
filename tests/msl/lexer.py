"""Splits Metal source into tokens, and carries edits out. Knows no grammar."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_TOKEN = re.compile(
    r"""
    (?P<comment> //[^\n]* | /\*.*?\*/ )
  | (?P<directive> (?:(?<=\n)|\A)[ \t]*\#(?:[^\n\\]|\\.|\\\n)* )
  | (?P<string> "(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*' )
  | (?P<number> (?:0[xX][0-9a-fA-F']+ | (?:\d[\d']*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)[a-zA-Z]* )
  | (?P<name> [A-Za-z_]\w* )
  | (?P<mark> \[\[ | \]\] | <<= | >>= | -> | \+\+ | -- | << | <= | >= | == | != | && | \|\|
      | [-+*/%&|^]= | :: | \S )
  | (?P<space> \s+ )
    """,
    re.X | re.S,
)
_PAIRS = {"(": ")", "[": "]", "{": "}", "[[": "]]", "<": ">"}


class Token(NamedTuple):
    """A word, number, mark, string or preprocessor line; never space or a comment."""

    kind: str
    text: str
    start: int
    """Offset in the source."""
    line: int
    """From 1."""

    @property
    def end(self) -> int:
        """The offset after it."""
        return self.start + len(self.text)


class Edit(NamedTuple):
    """Puts `text` in the place of source[start:end]."""

    start: int
    end: int
    text: str


def tokens(source: str) -> list[Token]:
    """The tokens of a source, in order."""
    found, line = [], 1
    for match in _TOKEN.finditer(source):
        kind = match.lastgroup or ""
        if kind not in ("space", "comment"):
            found.append(Token(kind, match.group(), match.start(), line))
        line += match.group().count("\n")
    return found


def closing(of: Sequence[Token], start: int) -> int:
    """The index of the token that closes the bracket at index `start`; the last index if nothing does."""
    opens, closes = of[start].text, _PAIRS[of[start].text]
    depth = 0
    for index in range(start, len(of)):
        depth += (of[index].text == opens) - (of[index].text == closes)
        if depth == 0:
            return index
    return len(of) - 1


def split_by_comma(of: Sequence[Token]) -> list[list[Token]]:
    """Parameters or declarators: the parts between the commas that lie in no bracket."""
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in of:
        depth += token.text in _PAIRS
        depth -= token.text in _PAIRS.values()
        if token.text == "," and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return [part for part in parts if part]


def edited(source: str, edits: Iterable[Edit]) -> str:
    """The source after edits that do not overlap. Every line keeps its number."""
    for edit in sorted(edits, reverse=True):
        old = source[edit.start : edit.end]
        missing = "\n" * (old.count("\n") - edit.text.count("\n"))
        source = source[: edit.start] + edit.text + missing + source[edit.end :]
    return source
