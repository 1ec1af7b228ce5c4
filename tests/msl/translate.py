"""Turns Metal source into C++ that the headers in `cpp/` complete. Line numbers stay.

Knows the words of Metal that C++ lacks, not what they do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.msl.declarations import GroupDeclaration, SourceError, attributes, group_declarations, kernels
from tests.msl.lexer import Edit, edited, tokens

_ENTRY = """
extern "C" __attribute__((visibility("default"))) MSL_UNCHECKED void msl_entry(void** buffers, MslThread* self) {{
  (void)buffers; (void)self;
  {call}({arguments});
}}
"""
_ATTRIBUTES = {
    "thread_position_in_grid": "msl::Position{self->position_in_grid}",
    "thread_position_in_threadgroup": "msl::Position{self->position_in_group}",
    "threadgroup_position_in_grid": "msl::Position{self->group_position}",
    "threads_per_threadgroup": "msl::Position{self->group_size}",
    "dispatch_threads_per_threadgroup": "msl::Position{self->dispatched_group_size}",
    "threads_per_grid": "msl::Position{self->grid_size}",
    "grid_size": "msl::Position{self->grid_size}",
    "threadgroups_per_grid": "msl::Position{self->num_groups}",
    "grid_origin": "uint3(0)",
    "thread_index_in_threadgroup": "self->index_in_group",
    "thread_index_in_simdgroup": "self->lane",
    "simdgroup_index_in_threadgroup": "self->simdgroup",
    "simdgroups_per_threadgroup": "self->num_simdgroups",
    "dispatch_simdgroups_per_threadgroup": "self->dispatched_simdgroups",
    "thread_execution_width": "32u",
    "threads_per_simdgroup": "32u",
    "thread_index_in_quadgroup": "(self->lane & 3u)",
    "quadgroup_index_in_threadgroup": "(self->index_in_group / 4u)",
    "quadgroups_per_threadgroup": "(self->num_simdgroups * 8u)",
    "dispatch_quadgroups_per_threadgroup": "(self->dispatched_simdgroups * 8u)",
}
_FLOAT = re.compile(r"(\d[\d']*\.\d*|\.\d+|\d[\d']*(?=[eE]|h$|bf$))([eE][+-]?\d+)?(h|bf)?")


@dataclass(frozen=True, slots=True)
class Translated:
    """C++ of a source, and of the function that calls one of its kernels."""

    source: str
    entry: str
    num_buffers: int
    """Parameters of the kernel that are buffers."""


def translated(source: str, function: str, call: str) -> Translated:
    """C++ for a Metal source.

    Args:
        source: the Metal text.
        function: the kernel's name in it.
        call: the name with its template arguments.

    Raises:
        SourceError: the source is not Metal, or has no such kernel, or the kernel asks for an unknown attribute.
    """
    found = kernels(source)
    if function not in found:
        raise SourceError(f"no kernel {function} in the source, which has {', '.join(found) or 'none'}")
    arguments, num_buffers = [], 0
    for parameter in found[function]:
        if parameter.attribute is not None:
            if parameter.attribute not in _ATTRIBUTES:
                raise SourceError(f"[[{parameter.attribute}]] is unknown to the emulation")
            arguments.append(_ATTRIBUTES[parameter.attribute])
        else:
            kind = "Pointer" if parameter.is_pointer else "Reference"
            arguments.append(f"msl::{kind}{{buffers[{num_buffers}]}}")
            num_buffers += 1
    entry = _ENTRY.format(call=call, arguments=", ".join(arguments))
    return Translated(edited(source, _edits(source)), entry, num_buffers)


def float_literal(text: str) -> str | None:
    """A number as C++ has it, where Metal reads it otherwise: unsuffixed fractions are float; half, bfloat."""
    match = _FLOAT.fullmatch(text)
    if match is None:
        return None
    digits = match[1] + (match[2] or "")
    value = digits if "." in digits or match[2] else digits + "."
    return {"h": f"half({value}f)", "bf": f"bfloat({value}f)"}.get(match[3] or "", value + "f")


def _edits(source: str) -> list[Edit]:
    declarations = group_declarations(source)
    all_tokens = tokens(source)
    edits = _storage(declarations)
    edits += [Edit(start, end, "") for start, end in attributes(all_tokens)]
    for token in all_tokens:
        literal = float_literal(token.text) if token.kind == "number" else None
        if literal is not None and not any(d.start <= token.start < d.end for d in declarations):
            edits.append(Edit(token.start, token.end, literal))
    return edits


def _storage(declarations: list[GroupDeclaration]) -> list[Edit]:
    """Threadgroup variables become references to storage that the runtime owns, one for each place in the text."""
    edits, site = [], 0
    for declaration in declarations:
        texts = []
        for variable in declaration.variables:
            alias = f"msl_storage{site}"
            texts.append(
                f"using {alias} = {variable.type}{variable.dimensions}; "
                f'{alias}& {variable.name} = msl::group_variable<{alias}>({site}, "{variable.name}"); '
            )
            site += 1
        edits.append(Edit(declaration.start, declaration.end, "".join(texts)))
    return edits
