"""`summarize`: print the scores in results files. Knows the options, not the files."""

from __future__ import annotations

import argparse
from typing import Any

EXAMPLES = """examples:
  python -m mlx_eval summarize runs/first
  python -m mlx_eval summarize runs/*/ --format csv > scores.csv
  python -m mlx_eval summarize results_2025-01-31T12-00-00.json --format json
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the sub-command to those of the command line."""
    parser = subparsers.add_parser(
        "summarize",
        help="print the scores of finished evaluations",
        description="Print the scores in results files of lm-eval, whichever backend wrote them. Several "
        "paths give a table each; as CSV and JSON, one list with a column `run`.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a results_*.json, or a folder: the newest one in it or below counts",
    )
    parser.add_argument("--format", choices=("markdown", "csv", "json"), default="markdown")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the summary of one path, or of several side by side."""
    from mlx_eval.results.summary import summarize

    summary = summarize(args.paths[0] if len(args.paths) == 1 else args.paths)
    text = {"markdown": summary.markdown, "csv": summary.csv, "json": summary.json}[args.format]()
    print(text.rstrip("\n"))
    return 0
