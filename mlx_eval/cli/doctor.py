"""`doctor`: what this machine has, what is missing, and what a model is."""

from __future__ import annotations

import argparse

from mlx_eval.cli.parser import (
    Subparsers,
    add_loading_arguments,
    add_model_argument,
    loading_options,
    model_of,
)

EXAMPLES = """\
examples:
  python -m mlx_eval doctor
  python -m mlx_eval doctor ./SmolLM2-135M-Instruct
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="what this machine has and what is missing",
        description="Show chip, memory, versions and BLAS, and say what is wrong; with a model, what it is.",
        epilog=EXAMPLES,
    )
    add_model_argument(parser, required=False)
    add_loading_arguments(parser)
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; status 1 when something is wrong."""
    from mlx_eval.app.doctor import examine

    examination = examine(model_of(arguments), loading_options(arguments))
    width = max(len(name) for name, _ in examination.facts)
    for name, value in examination.facts:
        print(f"{name:<{width}}  {value}")
    print()
    for problem in examination.problems:
        print(f"problem: {problem}")
    if not examination.problems:
        print("nothing is wrong")
    return 1 if examination.problems else 0
