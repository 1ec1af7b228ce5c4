"""Rules of Metal that no C++ compiler knows, looked for in the tokens of a source. Knows no types."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tests.msl.declarations import SourceError, group_declarations, kernels
from tests.msl.lexer import Token, closing, split_by_comma, tokens

SPACES: Final = frozenset({"device", "constant", "threadgroup", "thread"})
"""Address spaces: every pointer and every reference names one."""
_BANNED: Final = {
    "double": "double",
    "wchar_t": "wide characters",
    "goto": "goto",
    "try": "exceptions",
    "catch": "exceptions",
    "throw": "exceptions",
    "noexcept": "exceptions",
    "new": "memory from a heap",
    "delete": "memory from a heap",
    "malloc": "memory from a heap",
    "free": "memory from a heap",
    "dynamic_cast": "run-time types",
    "typeid": "run-time types",
    "virtual": "virtual functions",
    "thread_local": "thread_local",
    "register": "register",
    "asm": "inline assembly",
    "std": "the C++ standard library",
    "printf": "printf",
    "assert": "assert",
    "co_await": "coroutines",
    "co_yield": "coroutines",
    "co_return": "coroutines",
}
_NO_VARIABLE: Final = frozenset(
    {
        "using",
        "typedef",
        "struct",
        "class",
        "union",
        "enum",
        "template",
        "static_assert",
        "friend",
        "extern",
        "namespace",
    }
)
_NO_TYPE: Final = frozenset(
    {"return", "delete", "case", "else", "auto", "using", "typedef", "typename", "sizeof"}
)


@dataclass(frozen=True, slots=True)
class _Function:
    name: str
    start: int
    """Index of its opening brace."""
    end: int
    """Index of its closing brace."""


@dataclass(frozen=True, slots=True)
class _Statement:
    tokens: tuple[Token, ...]
    """Up to the semicolon or the opening brace."""
    in_function: bool
    in_class: bool
    end: str
    """`;` or `{`."""

    @property
    def texts(self) -> list[str]:
        return [token.text for token in self.tokens]

    def says(self, message: str) -> str:
        return f"line {self.tokens[0].line}: {message}"


def rule_findings(source: str) -> list[str]:
    """What Metal would reject in a source, a line each; empty where no rule is broken.

    Raises:
        SourceError: the source cannot be read.
    """
    all_tokens = tokens(source)
    statements, functions = _outline(all_tokens)
    findings = [*_words(all_tokens)]
    for statement in statements:
        findings += _in_statement(statement)
    findings += _storage_outside_kernels(source, all_tokens, functions)
    findings += _recursion(all_tokens, functions)
    return findings


def _words(of: Sequence[Token]) -> Iterator[str]:
    """Words and marks that are wrong wherever they stand."""
    for index, token in enumerate(of):
        before = of[index - 1].text if index else ""
        after = of[index + 1].text if index + 1 < len(of) else ""
        wrong = None
        if token.kind == "name" and token.text in _BANNED and before not in (".", "->"):
            wrong = _BANNED[token.text]
        elif token.text == "long" and after in ("long", "double"):
            wrong = f"long {after}"
        elif token.text == "[" and before in ("=", "(", ",", "return", "{", "?", ":"):
            wrong = "lambdas"
        elif token.kind == "string" and token.text.startswith('"') and before not in ("(", "extern"):
            wrong = "strings"
        elif token.kind == "number" and re.fullmatch(r"[\d.]*\.[\d.eE+-]*[lL]", token.text):
            wrong = "long double"
        elif token.kind == "directive" and re.match(r"\s*#\s*include\s*<(?!metal_)", token.text):
            wrong = "headers of C++"
        if wrong is not None:
            yield f"line {token.line}: not in Metal: {wrong} ({token.text.strip()})"


def _outline(of: Sequence[Token]) -> tuple[list[_Statement], list[_Function]]:
    """The statements of a source and the functions it defines."""
    statements: list[_Statement] = []
    functions: list[_Function] = []
    open_blocks: list[str] = []
    index = start = 0
    while index < len(of):
        text = of[index].text
        in_function = "function" in open_blocks
        if text in ("[[", "("):
            index = closing(of, index)
        elif of[index].kind == "directive":
            start = index + 1
        elif text in (";", "{"):
            if index > start:
                found = tuple(of[start:index])
                statements.append(_Statement(found, in_function, "class" in open_blocks, text))
            if text == "{":
                open_blocks.append(_block(statements[-1] if index > start else None, in_function))
                if open_blocks[-1] == "function":
                    functions.append(_Function(_function_name(of[start:index]), index, closing(of, index)))
            start = index + 1
        elif text == "}":
            if open_blocks:
                open_blocks.pop()
            start = index + 1
        index += 1
    return statements, functions


def _block(head: _Statement | None, in_function: bool) -> str:
    """What an opening brace opens, by the statement before it."""
    texts = head.texts if head is not None else []
    if in_function or not texts:
        return "block"
    if "namespace" in texts:
        return "namespace"
    if "(" in texts and "=" not in texts[: texts.index("(")]:
        return "function"
    return "class" if {"struct", "class", "union", "enum"} & set(texts) else "block"


def _function_name(head: Sequence[Token]) -> str:
    texts = [token.text for token in head]
    at = texts.index("(")
    while at < len(texts) and (texts[at] != "(" or head[at - 1].kind != "name"):
        at += 1
    return texts[at - 1]


def _in_statement(statement: _Statement) -> Iterator[str]:
    texts = statement.texts
    if not statement.in_function and "(" in texts and "=" not in texts[: texts.index("(")]:
        yield from _parameters(statement)
    if not statement.in_function and statement.end == ";":
        yield from _program_scope(statement)
    if statement.in_function:
        yield from _local(statement)


def _parameters(statement: _Statement) -> Iterator[str]:
    """Those of a function outside of functions."""
    of = statement.tokens
    at = next(index for index, token in enumerate(of) if token.text == "(")
    for parameter in split_by_comma(of[at + 1 : closing(of, at)]):
        texts = [token.text for token in parameter]
        if {"*", "&", "&&"} & set(texts) and not SPACES & set(texts):
            yield statement.says(f"a pointer or reference without address space: {' '.join(texts)}")


def _program_scope(statement: _Statement) -> Iterator[str]:
    texts = statement.texts
    before = texts[: texts.index("=")] if "=" in texts else texts
    is_variable = "(" not in before and not _NO_VARIABLE & set(before)
    is_member = statement.in_class and not {"static", "constexpr"} & set(before)
    if is_variable and not is_member and "constant" not in before:
        yield statement.says(f"a variable of the program must lie in constant: {' '.join(before)}")


def _local(statement: _Statement) -> Iterator[str]:
    of, texts = statement.tokens, statement.texts
    # `for (float* p = ...` declares too
    if texts[0] == "for" and len(texts) > 1:
        texts, of = texts[2:], of[2:]
    head = texts[: texts.index("=")] if "=" in texts else texts
    if "static" in head and "constant" not in head:
        yield statement.says(f"not in Metal: static local variables ({' '.join(head)})")
    shape = re.fullmatch(
        r"(?:const )?(\w+(?: :: \w+)*)(?: < .* >)?(?: const)? [*&] (?:const )?\w+.*", " ".join(head)
    )
    declares = shape is not None and shape[1] not in _NO_TYPE and ("=" in texts or statement.end == ";")
    if declares and not SPACES & set(head) and "(" not in head[:3]:
        yield statement.says(f"a pointer or reference without address space: {' '.join(head)}")
    yield from _function_pointers(statement)


def _function_pointers(statement: _Statement) -> Iterator[str]:
    joined = " ".join(statement.texts)
    if re.search(r"\w \( \* \w+ \) \(", joined) and not re.search(r"[=+\-*/(] \w+ \( \*", joined):
        yield statement.says("not in Metal: function pointers")


def _storage_outside_kernels(
    source: str, of: Sequence[Token], functions: Sequence[_Function]
) -> Iterator[str]:
    names = kernels(source)
    try:
        declarations = group_declarations(source)
    except SourceError as error:
        yield str(error)
        return
    for declaration in declarations:
        owners = [f.name for f in functions if of[f.start].start < declaration.start < of[f.end].start]
        if not owners or owners[0] not in names:
            variable = declaration.variables[0].name
            yield f"line {declaration.line}: threadgroup variable {variable} outside of a kernel function"


def _recursion(of: Sequence[Token], functions: Sequence[_Function]) -> Iterator[str]:
    """Functions that call themselves, by way of others too. Overloads are left out: no token tells them apart."""
    all_names = [function.name for function in functions]
    names = {name for name in all_names if all_names.count(name) == 1}
    calls: dict[str, set[str]] = {name: set() for name in names}
    defined = [function for function in functions if function.name in names]
    for function in defined:
        inside = of[function.start : function.end]
        calls[function.name] |= {
            token.text
            for token, after in itertools.pairwise(inside)
            if token.text in names and after.text == "("
        }
    for function in defined:
        reached, waiting = set(), list(calls[function.name])
        while waiting:
            name = waiting.pop()
            if name not in reached:
                reached.add(name)
                waiting += calls[name]
        if function.name in reached:
            yield f"line {of[function.start].line}: {function.name} calls itself"
