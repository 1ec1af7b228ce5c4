"""Merges for a SentencePiece vocabulary: which pieces join, and in which order. Knows no file.

SentencePiece's BPE joins, again and again, the two neighbours whose joint piece has the highest score,
the leftmost of equals. A fast tokenizer joins the two whose pair stands first in a list. So the list has
every pair of pieces that makes a piece, ordered by that piece's score.
"""

from __future__ import annotations

from collections.abc import Sequence


def merges_of_pieces(
    pieces: Sequence[str], scores: Sequence[float], mergeable: Sequence[bool]
) -> list[tuple[str, str]]:
    """Every pair of mergeable pieces whose concatenation is mergeable too, best score first.

    Args:
        pieces: the vocabulary in the order of its ids.
        scores: of each piece; the higher, the earlier it is made.
        mergeable: False for pieces that no merge may use or make: control tokens and bytes, and user-defined
            pieces, which are cut out of the text before. SentencePiece splits an unused piece again that
            its merges made; here they do not make it.
    """
    usable = {piece for piece, flag in zip(pieces, mergeable, strict=True) if flag and piece}
    longest_left = max(map(len, usable), default=0)
    found: list[tuple[float, int, str, str]] = []
    for piece_id, piece in enumerate(pieces):
        if piece not in usable:
            continue
        for cut in range(1, min(len(piece), longest_left + 1)):
            left, right = piece[:cut], piece[cut:]
            if left in usable and right in usable:
                found.append((-scores[piece_id], piece_id, left, right))
    found.sort(key=lambda each: each[:2])
    return [(left, right) for _, _, left, right in found]
