"""`lm-eval`: lm-eval's own command line with this backend registered as `--model mlx`."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_eval.cli.parser import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Add the command to the list; its arguments go to `run_lm_eval` unparsed."""
    parser = subparsers.add_parser(
        "lm-eval",
        help="lm-eval's own command line, with --model mlx",
        description="lm-eval's own command line, with --model mlx --model_args pretrained=MODEL,dtype=…",
    )
    parser.set_defaults(func=lambda _arguments: run_lm_eval(["--help"]))


def run_lm_eval(words: Sequence[str]) -> int:
    """Hand `words` to lm-eval's command line.

    Raises:
        ImportError: lm_eval is not installed.
        TaskError: lm-eval refuses its arguments, or cannot load or run a task.
    """
    from mlx_eval.harness.register import run_command_line

    run_command_line(words)
    return 0
