"""`perplexity`: how well a model predicts a text file."""

from __future__ import annotations

import argparse
import json

from mlx_eval.cli.parser import (
    Subparsers,
    add_loading_arguments,
    add_model_argument,
    loading_options,
    model_of,
    rows,
    window,
)
from mlx_eval.cli.run import say

EXAMPLES = """\
examples:
  python -m mlx_eval perplexity demo --text README.md
  python -m mlx_eval perplexity ./model --text novel.txt --max_length 2048 --json
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "perplexity",
        help="how well a model predicts a text file",
        description="Score a text file in windows of the model's length, each token predicted once.",
        epilog=EXAMPLES,
    )
    add_model_argument(parser)
    add_loading_arguments(parser)
    group = parser.add_argument_group("text")
    group.add_argument("--text", required=True, metavar="FILE", help="a text file in UTF-8")
    group.add_argument("--max_length", type=window, metavar="N", help="context window in tokens")
    group.add_argument(
        "--batch_size",
        type=rows,
        metavar="N",
        help="the most windows computed together (default: auto, what fits)",
    )
    group.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    """Do it and print the figures."""
    source = model_of(arguments)
    from mlx_eval.app.perplexity import read_text, text_perplexity

    text = read_text(arguments.text)
    from mlx_eval.harness.lm import MLXEvalLM
    from mlx_eval.models.load import load_model

    options = {name: getattr(arguments, name) for name in ("batch_size", "max_length")}
    options = {name: value for name, value in options.items() if value is not None}
    assert source is not None
    lm = MLXEvalLM(load_model(source, **loading_options(arguments)), **options)
    result = text_perplexity(lm, text, say)
    if arguments.json:
        print(json.dumps(result.as_dict(), indent=2))
        return 0
    print(f"tokens          {result.num_tokens:,}")
    print(f"bytes           {result.num_bytes:,}")
    print(f"nats            {result.nats:,.3f}")
    print(f"perplexity      {result.perplexity:,.4f}")
    print(f"bits per byte   {result.bits_per_byte:.4f}")
    print(f"bits per token  {result.bits_per_token:.4f}")
    return 0
