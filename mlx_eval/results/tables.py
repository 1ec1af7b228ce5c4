"""Tables as text. Knows headers and cells, not what they mean."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]], align: str = "") -> str:
    """A Markdown table whose columns line up in a terminal too; leading spaces in cells are kept.

    Args:
        headers: one text a column.
        rows: one text a column each.
        align: a letter a column, `l` or `r`; all to the left when empty.
    """
    from tabulate import tabulate

    return tabulate(
        [[_cell(text) for text in row] for row in rows],
        headers=[_cell(text) for text in headers],
        tablefmt="pipe",
        colalign=["right" if letter == "r" else "left" for letter in align or "l" * len(headers)]
        if rows
        else None,  # tabulate cannot align columns of no rows
        disable_numparse=True,  # a number stays as it was written
        preserve_whitespace=True,
    )


def _cell(text: str) -> str:
    """Text that does not end its cell or its line."""
    return text.replace("|", "\\|").replace("\r", " ").replace("\n", " ")
