"""The argument parser: spelling of options, values, the nearest name for a wrong one."""

from __future__ import annotations

import argparse

import pytest

from mlx_eval.cli import parser as cli
from mlx_eval.errors import InvalidOptionError


@pytest.fixture
def parser() -> cli.Parser:
    parser = cli.Parser(prog="prog")
    cli.add_model_argument(parser)
    cli.add_loading_arguments(parser)
    return parser


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["--num-fewshot", "5"], ["--num_fewshot", "5"]),
        (["--num-fewshot=a-b"], ["--num_fewshot=a-b"]),
        (["my-model", "-x", "a--b"], ["my-model", "-x", "a--b"]),
        (["--a-b", "--", "--c-d"], ["--a_b", "--", "--c-d"]),
        (["--a_b-c"], ["--a_b_c"]),
    ],
)
def test_dashes_in_option_names_are_underscores(given: list[str], read: list[str]) -> None:
    assert cli.with_underscores(given) == read


def test_an_unknown_option_names_the_nearest(parser: cli.Parser, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.parse(parser, {}, ["--quantise", "4"])
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "'--quantise', did you mean --quantize?" in err


def test_an_unknown_option_far_from_all_names_none(
    parser: cli.Parser, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.parse(parser, {}, ["--xyzzyx=4"])
    assert "did you mean" not in capsys.readouterr().err


def test_an_option_is_never_abbreviated(parser: cli.Parser) -> None:
    with pytest.raises(SystemExit):
        cli.parse(parser, {}, ["--quant", "4"])


@pytest.mark.parametrize("words", [["m"], ["--model", "m"], ["m", "--model", "m"]])
def test_the_model_by_option_or_first(parser: cli.Parser, words: list[str]) -> None:
    assert cli.model_of(parser.parse_args(words)) == "m"


def test_two_models_or_none(parser: cli.Parser) -> None:
    with pytest.raises(InvalidOptionError, match="two models are given, b and a"):
        cli.model_of(parser.parse_args(["a", "--model", "b"]))
    with pytest.raises(InvalidOptionError, match="no model is given"):
        cli.model_of(parser.parse_args([]))
    optional = cli.Parser()
    cli.add_model_argument(optional, required=False)
    assert cli.model_of(optional.parse_args([])) is None


def test_loading_options_are_those_given(parser: cli.Parser) -> None:
    assert cli.loading_options(parser.parse_args(["m"])) == {}
    words = ["m", "--dtype", "float16", "--quantize", "4", "--dequantize", "no", "--trust_remote_code"]
    assert cli.loading_options(parser.parse_args(words)) == {
        "dtype": "float16",
        "quantize": 4,
        "dequantize": False,
        "trust_remote_code": True,
    }
    assert cli.loading_options(parser.parse_args(["m", "--dequantize"])) == {"dequantize": True}


def test_widths_are_those_of_the_quantiser() -> None:
    from mlx_eval.models.precision import BITS

    assert tuple(cli.bits(str(width)) for width in BITS) == BITS
    for width in set(map(str, range(-1, 17))) - set(map(str, BITS)):
        with pytest.raises(argparse.ArgumentTypeError, match="is none of"):
            cli.bits(width)


@pytest.mark.parametrize(
    ("text", "value"), [("1", 1), ("250", 250), ("2.0", 2), ("0.5", 0.5), ("1e2", 100), ("0.001", 0.001)]
)
def test_limits(text: str, value: float) -> None:
    limit = cli.document_limit(text)
    assert limit == value
    assert type(limit) is type(value)


@pytest.mark.parametrize("text", ["0", "-1", "-0.5", "1.5", "nan", "inf", "many", ""])
def test_limits_that_make_no_sense(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="neither a whole number of documents"):
        cli.document_limit(text)


def test_numbers() -> None:
    assert (cli.not_negative("0"), cli.window("2"), cli.rows("1")) == (0, 2, 1)
    assert (cli.rows("auto"), cli.rows("auto:4")) == ("auto", "auto:4")
    wrong = [
        (cli.not_negative, "-1"),
        (cli.window, "1"),
        (cli.rows, "0"),
        (cli.rows, "automatic"),
        (cli.rows, ""),
    ]
    for kind, text in wrong:
        with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number of"):
            kind(text)


def test_truth_values() -> None:
    assert [cli.boolean(text) for text in ("true", "Yes", "1", "false", "NO", "0")] == [True] * 3 + [
        False
    ] * 3
    with pytest.raises(argparse.ArgumentTypeError, match="neither true nor false"):
        cli.boolean("maybe")


def test_key_values() -> None:
    assert cli.key_values("a=1,b=0.5,c=x,d=true,e=None,f=") == {
        "a": 1,
        "b": 0.5,
        "c": "x",
        "d": True,
        "e": None,
        "f": "",
    }
    assert cli.key_values(' {"until": ["a,b", "c=d"]} ') == {"until": ["a,b", "c=d"]}
    assert cli.key_values("") == {}
    for text in ("a", "=1", "{1}", '{"a": 1'):
        with pytest.raises(argparse.ArgumentTypeError):
            cli.key_values(text)


def test_seeds() -> None:
    assert cli.seeds("7") == (7, 7, 7, 7)
    assert cli.seeds("1,2, 3,None") == (1, 2, 3, None)
    for text in ("1,2", "a", "-1", "1,2,3,4,5", "1.5"):
        with pytest.raises(argparse.ArgumentTypeError):
            cli.seeds(text)
