"""Finds in Metal source what C++ has no word for: threadgroup variables, attributes, kernel functions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from tests.msl.lexer import Token, closing, split_by_comma, tokens


class SourceError(ValueError):
    """The source is not Metal, or is beyond what the emulation reads."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A threadgroup variable."""

    type: str
    name: str
    dimensions: str
    """`[4][8]`; empty for a scalar."""


@dataclass(frozen=True, slots=True)
class GroupDeclaration:
    """A declaration of threadgroup storage, from the word `threadgroup` to the semicolon."""

    start: int
    end: int
    line: int
    variables: tuple[Variable, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a kernel function."""

    attribute: str | None
    """`thread_position_in_grid` and the like; None: a buffer."""
    is_pointer: bool


def attributes(of: Sequence[Token]) -> list[tuple[int, int]]:
    """Where [[...]] stand: offsets of their start and end."""
    spans, index = [], 0
    while index < len(of):
        if of[index].text == "[[":
            end = closing(of, index)
            spans.append((of[index].start, of[end].end))
            index = end
        index += 1
    return spans


def group_declarations(source: str) -> list[GroupDeclaration]:
    """The threadgroup variables of a source. Pointers, references, casts and parameters are none.

    Raises:
        SourceError: a variable has an initialiser, or `threadgroup` stands amid a declaration.
    """
    all_tokens = tokens(source)
    found = []
    for index, token in enumerate(all_tokens):
        if token.text == "threadgroup" and _declares_storage(all_tokens, index):
            end = next(i for i in range(index, len(all_tokens)) if all_tokens[i].text in (";", "=", "{"))
            if all_tokens[end].text != ";":
                raise SourceError(f"line {token.line}: threadgroup variables cannot have an initialiser")
            variables = _variables(source, all_tokens[index + 1 : end])
            found.append(GroupDeclaration(token.start, all_tokens[end].end, token.line, variables))
    return found


def kernels(source: str) -> dict[str, tuple[Parameter, ...]]:
    """The kernel functions of a source and their parameters."""
    all_tokens = tokens(source)
    found = {}
    for index, token in enumerate(all_tokens):
        if token.text != "kernel":
            continue
        has_brackets = index > 0 and all_tokens[index - 1].text == "[["
        after = 1 + (closing(all_tokens, index - 1) if has_brackets else index)
        if [found.text for found in all_tokens[after : after + 3 : 2]] != ["void", "("]:
            continue
        inside = all_tokens[after + 3 : closing(all_tokens, after + 2)]
        found[all_tokens[after + 1].text] = tuple(_parameter(part) for part in split_by_comma(inside))
    return found


def _declares_storage(of: Sequence[Token], index: int) -> bool:
    """Is the word `threadgroup` at `index` the start of a variable?"""
    before = of[index - 1].text if index else ";"
    if before == "[[":
        return False
    depth, has_star = 0, False
    for token in of[index + 1 :]:
        if depth == 0 and token.text in (";", ")", "{", "=", ","):
            break
        depth += (token.text in ("<", "(", "[")) - (token.text in (">", ")", "]"))
        has_star |= depth == 0 and token.text in ("*", "&")  # those in [BM * LD] multiply
    is_method = before == ")" or (before == "const" and of[index + 1].text in ("{", ";", ":"))
    if has_star or is_method:
        return False
    if before not in (";", "{", "}"):
        raise SourceError(f"line {of[index].line}: threadgroup must come first in a declaration")
    return True


def _variables(source: str, declaration: Sequence[Token]) -> tuple[Variable, ...]:
    """`float a[4], b` -> a and b, each with the type and its dimensions."""
    first, *others = split_by_comma(declaration)
    depth, name_at = 0, -1
    for index, token in enumerate(first):
        depth += (token.text == "<") - (token.text == ">")
        if depth == 0 and token.text == "[":
            break
        name_at = index
    type_text = source[first[0].start : first[name_at].start].strip()
    return tuple(
        Variable(type_text, part[0].text, source[part[0].end : part[-1].end].strip())
        for part in (first[name_at:], *others)
    )


def _parameter(of: Sequence[Token]) -> Parameter:
    texts = [token.text for token in of]
    named = [after for before, after in itertools.pairwise(texts) if before == "[["]
    attribute = named[-1] if named else "buffer"
    return Parameter(None if attribute == "buffer" else attribute, "*" in texts)
