"""`python -m mlx_eval`: finds the sub-command, turns errors into one line and an exit status."""

from __future__ import annotations

import argparse
import gc
import importlib
import io
import logging
import os
import sys
import time
from collections.abc import Sequence

from mlx_eval.cli.interrupt import INTERRUPTED, prompt_interrupt
from mlx_eval.cli.parser import Parser, parse, print_error
from mlx_eval.errors import MissingDependencyError, MlxEvalError

COMMANDS = ("run", "presets", "tasks", "summarize", "perplexity", "bench", "convert", "doctor", "lm_eval")
"""Modules of this package, in the order of the help text."""

PASSED_ON = ("lm-eval", "lm_eval")
"""The command whose arguments belong to another program."""

START = """\
mlx_eval evaluates language models on Apple silicon. To begin:

  python -m mlx_eval run --preset demo              evaluate the embedded model, without network
  python -m mlx_eval run MODEL --tasks arc_easy     evaluate a model from disk or the Hugging Face hub
  python -m mlx_eval doctor                         see what this machine has and what is missing

All commands: python -m mlx_eval --help"""

DEBUG = "MLX_EVAL_DEBUG"
"""Environment variable that brings the traceback of an error that nobody foresaw."""

COLLECTOR_THRESHOLD = 50_000
"""New objects between two passes of Python's garbage collector. With its own 700 it goes through the growing heap
again and again while modules are imported, for 0.7 s of a start, and finds next to nothing."""

OUT_OF_MEMORY = (
    "out of memory; give a smaller --batch_size or --max_length, or quantise the model (--quantize 4)"
)

NOTHING_SAVED = "interrupted; no results were written"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0 done, 1 an error, 2 wrong usage, 130 Ctrl-C."""
    arguments = argparse.Namespace(began=time.perf_counter())
    if argv is None:
        arguments.began -= time.process_time()  # Python had to start before any line of ours
        gc.set_threshold(COLLECTOR_THRESHOLD)
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv), arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # a reader that has gone shows itself here, not while Python shuts down
    except (MlxEvalError, MissingDependencyError) as error:
        print_error(error)
        return 1
    except MemoryError:
        print_error(OUT_OF_MEMORY)
        return 1
    except BrokenPipeError:
        # nobody reads on: what is still buffered goes nowhere, without a further complaint
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get(DEBUG):
            raise
        if isinstance(error, RuntimeError) and _is_out_of_memory(error):
            print_error(OUT_OF_MEMORY)
            return 1
        print_error(f"unexpected {type(error).__name__}: {error}; {DEBUG}=1 shows where it comes from")
        return 1
    except KeyboardInterrupt:
        print_error(interrupt_message(arguments))
        return INTERRUPTED


def _run(words: list[str], arguments: argparse.Namespace) -> int:
    """Run the sub-command that `words` name; its options are added to `arguments`."""
    if not words:
        print(START)
        return 0
    _quiet_other_libraries()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an arrow less rather than a result lost
    if words[0] in PASSED_ON:
        from mlx_eval.cli.lm_eval import run_lm_eval

        with prompt_interrupt(lambda: interrupt_message(arguments)):
            return run_lm_eval(words[1:])
    parser, commands = build_parser()
    vars(arguments).update(vars(parse(parser, commands, words)), words=words)
    with prompt_interrupt(lambda: interrupt_message(arguments)):
        status: int = arguments.func(arguments)
    return status


def build_parser() -> tuple[Parser, dict[str, argparse.ArgumentParser]]:
    """The parser of the whole command line and those of its sub-commands by name."""
    parser = Parser(
        prog="python -m mlx_eval",
        description="Evaluate language models on Apple silicon with MLX, through lm-evaluation-harness.",
        epilog="python -m mlx_eval COMMAND --help tells more of a command.",
    )
    parser.add_argument("--version", action="version", version=f"mlx_eval {_version()}")
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=Parser, title="commands"
    )
    for name in COMMANDS:
        importlib.import_module(f"mlx_eval.cli.{name}").add_parser(subparsers)
    return parser, dict(subparsers.choices)


def interrupt_message(arguments: argparse.Namespace) -> str:
    """What Ctrl-C leaves behind; a command that has something to hand over does so now."""
    if (hand_over := getattr(arguments, "interrupted", None)) is not None:
        text: str = hand_over()
        return text
    cache = getattr(arguments, "use_cache", None)
    database = f"{cache}_rank0.db"
    kept = f"; the answers so far are in {database}" if cache and os.path.exists(database) else ""
    return NOTHING_SAVED + kept


def _version() -> str:
    from importlib.metadata import version

    return version("mlx-eval")


def _quiet_other_libraries() -> None:
    """Warnings only, and progress bars on a terminal only: set before the libraries are imported."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    # lm-eval warns of every tag that a task file of the user's shares with one of its own
    logging.getLogger("lm_eval.tasks._index").setLevel(logging.ERROR)
    logging.getLogger(
        "huggingface_hub"
    ).propagate = False  # it has a handler of its own: each line came twice
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether MLX raised it, which is imported then."""
    from mlx_eval.engine.budget import is_out_of_memory

    return is_out_of_memory(error)
