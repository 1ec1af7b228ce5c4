"""What can be said against a kernel without running it: rules of Metal, and clang's types and address spaces."""

from __future__ import annotations

from mlx_eval_kernels.launch import Dispatch

from tests.msl.clang_pass import clang_findings
from tests.msl.declarations import SourceError
from tests.msl.rules import rule_findings
from tests.msl.signature import generated


def findings(dispatch: Dispatch) -> list[str]:
    """Of the text that MLX generates for a dispatch: a line each, empty where all is well."""
    return text_findings(generated(dispatch).text)


def text_findings(source: str) -> list[str]:
    """Of a whole Metal source."""
    try:
        return rule_findings(source) + clang_findings(source)
    except SourceError as error:
        return [str(error)]
