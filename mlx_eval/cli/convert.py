"""`convert`: write a model as a directory that mlx-lm loads, and transformers too when it is not quantised."""

from __future__ import annotations

import argparse
import sys

from mlx_eval.cli.parser import Subparsers, add_loading_arguments, add_model_argument, loading_options
from mlx_eval.errors import InvalidOptionError

EXAMPLES = """\
examples:
  python -m mlx_eval convert model.gguf ./model
  python -m mlx_eval convert HuggingFaceTB/SmolLM2-135M-Instruct ./smollm2-4bit --quantize 4
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "convert",
        usage="python -m mlx_eval convert SRC DST [options]",
        help="write a model as a directory for mlx-lm and transformers",
        description="Write a model as a directory that mlx-lm loads, and transformers too when not quantised.",
        epilog=EXAMPLES,
    )
    add_model_argument(parser)
    parser.add_argument(
        "destination", nargs="?", metavar="DST", help="a folder that does not exist yet or is empty"
    )
    add_loading_arguments(parser)
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    """Do it."""
    names = [arguments.model, arguments.model_argument, arguments.destination]
    given = [name for name in names if name is not None]
    if len(given) != 2:
        raise InvalidOptionError("convert takes a model and a folder: python -m mlx_eval convert SRC DST")
    source, destination = given
    from mlx_eval.app.convert import convert

    path = convert(source, destination, loading_options(arguments))
    print(f"wrote {path}", file=sys.stderr)
    return 0
