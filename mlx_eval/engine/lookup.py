"""Guesses how a text goes on from where its last tokens stood before. Knows the token ids of one text, nothing else.

    text     5 6 7 8 9 1 2 6 7 8          the last three tokens, 6 7 8, were there before:
               ^^^^^ └ source             the text may go on 9 1 2 6 ...

While the guess is right, the same place is read on, and the match grows. A copy may overlap what it makes, so a text
that repeats itself is drafted over any number of rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

LONGEST: Final = 16
"""Tokens that a match is compared for: whether more agree makes no difference."""

PLACES: Final = 32
"""Earlier places of the last two tokens that are compared, newest first. This bounds the work of a token."""


class Lookup:
    """One growing text, indexed by its pairs of tokens."""

    def __init__(self, ids: Sequence[int]) -> None:
        """Index a text: about half a microsecond a token.

        Args:
            ids: the text so far.
        """
        self._ids: list[int] = []
        self._newest: dict[tuple[int, int], int] = {}
        self._earlier: list[
            int
        ] = []  # for each position, where its pair with the token before it stood last; 0: nowhere
        self._source = 0
        self._length = 0
        for token_id in ids:
            self._add(token_id)
        self._find()

    @property
    def length(self) -> int:
        """Tokens of the match, `LONGEST` where there are more; 0: the last two tokens were nowhere before."""
        return min(self._length, LONGEST)

    def push(self, token_id: int) -> bool:
        """Add a token.

        Returns:
            Whether it was the first one that `draft` gave.
        """
        is_right = self._length > 0 and self._ids[self._source] == token_id
        self._add(token_id)
        if is_right:
            self._source += 1
            self._length += 1
        else:
            self._find()
        return is_right

    def draft(self, count: int) -> list[int]:
        """The tokens that may follow.

        Args:
            count: how many.

        Returns:
            As many, or none where there is no match.
        """
        if not self._length:
            return []
        source = self._source
        round_ids = self._ids[source : source + count]
        return (round_ids * (-(-count // len(round_ids))))[:count]

    def _add(self, token_id: int) -> None:
        ids = self._ids
        end = len(ids)
        ids.append(token_id)
        earlier = 0
        if end:
            pair = (ids[end - 1], token_id)
            earlier = self._newest.get(pair, 0)
            self._newest[pair] = end
        self._earlier.append(earlier)

    def _find(self) -> None:
        """Look for the longest of the newest matches."""
        ids, last = self._ids, len(self._ids) - 1
        self._length = 0
        place = self._earlier[last] if ids else 0
        for _ in range(PLACES):
            if not place:
                break
            length = self._agreeing(place)
            if length > self._length:
                self._length, self._source = length, place + 1
                if length >= LONGEST:
                    break
            place = self._earlier[place]

    def _agreeing(self, place: int) -> int:
        """How many tokens up to a place and up to the end are the same, at most `LONGEST`."""
        ids, last = self._ids, len(self._ids) - 1
        for count in range(2, min(LONGEST, place + 1)):
            if ids[place - count] != ids[last - count]:
                return count
        return min(LONGEST, place + 1)
