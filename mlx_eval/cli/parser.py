"""The argument parser: underscores or dashes, the nearest option for an unknown one. Knows no sub-command."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final, NoReturn, Protocol

from mlx_eval.errors import InvalidOptionError, nearest_names

FOREIGN: Final = {
    "--model_args": "is lm-eval's: name the model first and its options after it, or use "
    "python -m mlx_eval lm-eval run --model mlx --model_args …",
    "--device": "is not needed: MLX uses the GPU where there is one",
}
"""Options that users of lm-eval know, and what to do instead."""


class Subparsers(Protocol):
    """What argparse's `add_subparsers` gives."""

    def add_parser(self, name: str, **kwargs: Any) -> argparse.ArgumentParser:
        """Add a sub-command."""


class Parser(argparse.ArgumentParser):
    """argparse's parser with this project's habits."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            **{"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **kwargs}
        )

    def error(self, message: str) -> NoReturn:
        """One line on stderr and exit status 2, without the usage text."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def option_names(self) -> list[str]:
        """Every long option."""
        return [name for name in self._option_string_actions if name.startswith("--")]


def parse(
    parser: Parser, commands: dict[str, argparse.ArgumentParser], argv: Sequence[str]
) -> argparse.Namespace:
    """Parse a command line; an unknown option is an error that names the nearest one."""
    arguments, unknown = parser.parse_known_args(with_underscores(argv))
    if unknown:
        current = commands.get(getattr(arguments, "command", None) or "", parser)
        assert isinstance(current, Parser)
        name = unknown[0].partition("=")[0]
        if name in FOREIGN:
            current.error(f"{name} {FOREIGN[name]}")
        near = nearest_names(name, current.option_names(), count=1) if name.startswith("-") else []
        hint = f", did you mean {near[0]}?" if near else ""
        current.error(f"unknown argument {unknown[0]!r}{hint}")
    return arguments


def with_underscores(argv: Iterable[str]) -> list[str]:
    """`--num-fewshot` as `--num_fewshot`; values stay as they are."""
    words: list[str] = []
    verbatim = False
    for word in argv:
        verbatim = verbatim or word == "--"
        if not verbatim and word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            words.append(f"--{name.replace('-', '_')}{equals}{value}")
        else:
            words.append(word)
    return words


def add_model_argument(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """The model as `--model M` or as the first argument."""
    group = parser.add_argument_group("model")
    group.add_argument("model_argument", nargs="?", metavar="MODEL", help=argparse.SUPPRESS)
    need = "" if required else " (optional here)"
    group.add_argument(
        "--model",
        metavar="MODEL",
        help=f"a Hugging Face or MLX directory, a .gguf file, a hub id, or demo; also as the first argument{need}",
    )
    parser.set_defaults(model_required=required)


def model_of(arguments: argparse.Namespace) -> str | None:
    """The model that the command line names.

    Raises:
        InvalidOptionError: none where one is needed, or two.
    """
    given = [name for name in (arguments.model, arguments.model_argument) if name is not None]
    if len(given) > 1 and given[0] != given[1]:
        raise InvalidOptionError(f"two models are given, {given[0]} and {given[1]}: give one")
    if not given and arguments.model_required:
        raise InvalidOptionError("no model is given: name a directory, a .gguf file, a hub id or demo")
    return given[0] if given else None


def add_loading_arguments(parser: argparse.ArgumentParser) -> None:
    """How a model is loaded."""
    group = parser.add_argument_group("loading")
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="type of the weights; auto: the checkpoint's own (default: auto on Metal, float32 on the CPU)",
    )
    group.add_argument(
        "--quantize", type=bits, metavar="BITS", help="quantise to 2, 3, 4, 5, 6 or 8 bits a weight"
    )
    group.add_argument(
        "--dequantize",
        nargs="?",
        const=True,
        type=boolean,
        metavar="BOOL",
        help="turn quantised weights into --dtype (default: on the CPU only)",
    )
    group.add_argument("--tokenizer", metavar="SOURCE", help="take the tokenizer from here; bytes: raw bytes")
    group.add_argument("--revision", help="branch, tag or commit of a hub id")
    group.add_argument(
        "--trust_remote_code", action="store_true", help="let Python files of the model's directory run"
    )


def loading_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Arguments for `load_model`, those given only."""
    names = ("dtype", "quantize", "dequantize", "tokenizer", "revision")
    options = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if arguments.trust_remote_code:
        options["trust_remote_code"] = True
    return options


def boolean(text: str) -> bool:
    """`true`, `yes`, `1`, … as a truth value."""
    values = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return values[text.lower()]


def not_negative(text: str) -> int:
    """A whole number of 0 or more."""
    return _whole(text, 0)


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    return _whole(text, 1)


def positives(text: str) -> tuple[int, ...]:
    """Whole numbers of 1 or more with commas between them, each once."""
    return tuple(dict.fromkeys(positive(part.strip()) for part in text.split(",")))


def answer_length(text: str) -> int:
    """Tokens of an answer of which the first is not timed: a whole number of 2 or more."""
    return _whole(text, 2)


def window(text: str) -> int:
    """Tokens of a context window: a whole number of 2 or more."""
    return _whole(text, 2)


def rows(text: str) -> int | str:
    """Rows of a batch: a whole number of 1 or more, or `auto` (`auto:4` too, as lm-eval spells it)."""
    return text if text.partition(":")[0] == "auto" else _whole(text, 1, ", or auto")


def bits(text: str) -> int:
    """Bits of a quantised weight."""
    if text not in ("2", "3", "4", "5", "6", "8"):  # those of models/precision.py, which imports mlx
        raise argparse.ArgumentTypeError(f"{text} is none of 2, 3, 4, 5, 6 and 8 bits")
    return int(text)


def _whole(text: str, least: int, otherwise: str = "") -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of {least} or more{otherwise}")
    return number


def document_limit(text: str) -> int | float:
    """A number of documents, 1 or more, or a share between 0 and 1."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if 0 < number < 1:
        return number
    if not math.isfinite(number) or number < 1 or number != int(number):
        raise argparse.ArgumentTypeError(
            f"{text} is neither a whole number of documents, 1 or more, nor a share between 0 and 1"
        )
    return int(number)


def key_values(text: str) -> dict[str, Any]:
    """`key=value,key=value` or a JSON object, as a dictionary."""
    text = text.strip()
    if text.startswith("{"):
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is no JSON object: {error}") from error
        assert isinstance(values, dict)
        return values
    pairs: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise argparse.ArgumentTypeError(f"{part!r} is not of the form key=value; JSON is taken too")
        pairs[key.strip()] = _value(value.strip())
    return pairs


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.lower() == "none":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def seeds(text: str) -> tuple[int | None, int | None, int | None, int | None]:
    """One seed for all, or four: Python's, numpy's, torch's and the few-shot sampler's; `None` leaves one unset."""
    parts = text.split(",")
    if len(parts) not in (1, 4):
        raise argparse.ArgumentTypeError(f"{text!r}: give one seed, or four with commas")
    try:
        numbers = [None if part.strip() == "None" else not_negative(part.strip()) for part in parts]
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: a seed is a whole number of 0 or more, or None"
        ) from error
    first, second, third, fourth = numbers * 4 if len(numbers) == 1 else numbers
    return first, second, third, fourth


def print_error(message: object) -> None:
    """One line on stderr."""
    print(f"mlx_eval: {message}", file=sys.stderr)
