"""`tasks`: list what can be evaluated. Knows how to print it, not where it comes from."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_eval.harness.tasks import TaskInfo

EXAMPLES = """examples:
  python -m mlx_eval tasks demo                 a group and what is in it
  python -m mlx_eval tasks 'arc_*' wikitext     a pattern and a name
  python -m mlx_eval tasks german --kind task   names that contain a word
  python -m mlx_eval tasks my_task --include_path my_tasks/

The first time, reading lm-eval's task files takes some seconds. No data are downloaded.
"""

SHOTS_NOTE = (
    "Shots: what the task's file asks for, nothing where it leaves them to --num_fewshot (0 without it). "
    "A task's 0 cannot be changed."
)


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the sub-command to those of the command line."""
    parser = subparsers.add_parser(
        "tasks",
        help="list tasks, groups and tags with their shots and metrics",
        description="List the tasks, groups and tags that lm-eval, this package and your own folders have.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "patterns",
        nargs="*",
        metavar="PATTERN",
        help="names, patterns such as 'arc_*', or words that names contain; all without it",
    )
    parser.add_argument(
        "--include_path",
        action="append",
        metavar="DIR",
        help="folder of task files of your own; repeatable",
    )
    parser.add_argument("--kind", choices=("task", "group", "tag"), help="list only these")
    parser.add_argument("--limit", type=int, metavar="N", help="list at most N")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print what the patterns mean; how many were left out goes to stderr."""
    import json
    from dataclasses import asdict

    from mlx_eval.errors import InvalidOptionError
    from mlx_eval.harness.tasks import describe_tasks, task_manager
    from mlx_eval.results.tables import markdown_table

    if args.limit is not None and args.limit < 1:
        raise InvalidOptionError(f"--limit must be a whole number of 1 or more, not {args.limit}")
    found = describe_tasks(task_manager(args.include_path), args.patterns)
    found = [info for info in found if args.kind in (None, info.kind)]
    shown = found[: args.limit]
    if args.json:
        print(json.dumps([asdict(info) for info in shown], indent=2, ensure_ascii=False))
    else:
        print(
            markdown_table(
                ["Name", "Kind", "Output type", "Shots", "Metrics"], [_row(info) for info in shown]
            )
        )
        print(f"\n{SHOTS_NOTE}")
    if len(shown) < len(found):
        print(f"{len(found) - len(shown)} more were left out by --limit {args.limit}", file=sys.stderr)
    return 0


def _row(info: TaskInfo) -> list[str]:
    shots = "" if info.num_fewshot is None else str(info.num_fewshot)
    return [info.name, info.kind, info.output_type or "", shots, ", ".join(info.metrics)]
