"""Type-checks Metal source with clang: device, constant and threadgroup are real address spaces there.

Needs the package `libclang`, version 18. Knows what `cpp/clang/declarations.h` declares; it runs nothing.
"""

from __future__ import annotations

import functools
import re
from typing import Any, Final

from tests.msl.build import CPP
from tests.msl.declarations import attributes, group_declarations
from tests.msl.lexer import Edit, Token, closing, edited, tokens
from tests.msl.translate import float_literal

_ARGUMENTS: Final = (
    "-xc++",
    "-std=c++14",  # what Metal 3 is made from; later features that Metal takes as extensions are warnings
    "--target=x86_64-linux-gnu",
    "-nostdinc",
    "-nostdinc++",
    "-fno-exceptions",
    "-fno-rtti",
    "-include",
    str(CPP / "clang" / "declarations.h"),
    "-ferror-limit=50",
    "-Werror=conditional-uninitialized",
    "-Werror=double-promotion",
    "-Werror=return-stack-address",
    "-Werror=return-type",
    "-Werror=shift-count-overflow",
    "-Werror=uninitialized",
    "-Werror=vla",
    "-Werror=vla-extension",
)
_VECTOR: Final = re.compile(r"(char|uchar|short|ushort|int|uint|long|ulong|half|bfloat|float)[234]")


def clang_findings(source: str) -> list[str]:
    """What clang says against a Metal source, a line each; empty where all is well.

    Raises:
        SourceError: the source cannot be read.
    """
    name = "kernel.cpp"
    text = edited(source, _edits(source))
    from clang import cindex  # from libclang, which only machines that run the emulation have

    unit = _index().parse(name, args=list(_ARGUMENTS), unsaved_files=[(name, text)])
    return [
        f"line {diagnostic.location.line}: {diagnostic.spelling}"
        for diagnostic in unit.diagnostics
        if diagnostic.severity >= cindex.Diagnostic.Error
    ]


def _edits(source: str) -> list[Edit]:
    all_tokens = tokens(source)
    # Automatic variables lie in the default address space only; those of structures have constructors only there.
    edits = [Edit(found.start, found.start, "extern ") for found in group_declarations(source)]
    edits += [Edit(start, end, "") for start, end in attributes(all_tokens)]
    for index, token in enumerate(all_tokens):
        literal = float_literal(token.text) if token.kind == "number" else None
        if literal is not None:
            edits.append(Edit(token.start, token.end, literal))
        elif _VECTOR.fullmatch(token.text) and _has_parts(all_tokens, index + 1):
            edits.append(Edit(token.start, token.end, f"msl_vector<{token.text}>"))
    return edits


def _has_parts(of: list[Token], index: int) -> bool:
    """Is there a bracket with a comma in it, as in float2(a, b)?"""
    if of[index].text != "(":
        return False
    depth = 0
    for token in of[index : closing(of, index)]:
        depth += (token.text in "([{") - (token.text in ")]}")
        if token.text == "," and depth == 1:
            return True
    return False


@functools.cache
def _index() -> Any:
    from clang import cindex

    return cindex.Index.create()
