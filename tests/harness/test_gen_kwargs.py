from __future__ import annotations

from typing import Any

import pytest

from mlx_eval.errors import InvalidOptionError, UnknownNameError
from mlx_eval.harness.gen_kwargs import (
    INSTEAD,
    WITHOUT_EFFECT,
    GenerationOptions,
    parse_gen_kwargs,
    request_seed,
)
from mlx_eval.records import Sampling


def parse(**gen_kwargs: Any) -> GenerationOptions:
    return parse_gen_kwargs(gen_kwargs, default_max_tokens=256, seed=5)


def test_nothing_given() -> None:
    assert parse() == GenerationOptions(256, (), Sampling())


@pytest.mark.parametrize(
    ("until", "stop"),
    [
        ("ab", ("ab",)),
        (["a", "b", "a"], ("a", "b")),
        (("a",), ("a",)),
        ([], ()),
        (None, ()),
        ("", ()),
        (["", "\n"], ("\n",)),
        ([" "], (" ",)),
    ],
)
def test_until(until: Any, stop: tuple[str, ...]) -> None:
    """A string is one stop and not its characters."""
    assert parse(until=until).stop == stop


@pytest.mark.parametrize("until", [[1], [None], 7])
def test_until_that_is_no_text(until: Any) -> None:
    with pytest.raises(InvalidOptionError, match="until="):
        parse(until=until)


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        ({"max_gen_toks": 3}, 3),
        ({"max_new_tokens": 3}, 3),
        ({"max_tokens": "3"}, 3),
        ({"max_completion_tokens": 3.0}, 3),
        ({"max_gen_toks": None, "max_tokens": 4}, 4),
        ({"max_completion_tokens": 5, "max_tokens": 4, "max_new_tokens": 3, "max_gen_toks": 2}, 2),
    ],
)
def test_limits(given: dict[str, Any], limit: int) -> None:
    assert parse(**given).max_tokens == limit


@pytest.mark.parametrize(
    ("given", "sampling"),
    [
        ({"temperature": 0.0}, Sampling()),
        ({"do_sample": False, "temperature": 0.8, "top_p": 0.5}, Sampling()),
        ({"do_sample": True, "temperature": 0.0}, Sampling()),
        ({"temperature": 0.8}, Sampling(0.8, seed=5)),
        ({"do_sample": True}, Sampling(1.0, seed=5)),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "seed": 9},
            Sampling(0.6, 0.95, 20, 0.1, 9),
        ),
        ({"do_sample": True, "top_k": -1, "top_p": None, "min_p": None}, Sampling(1.0, seed=5)),
        ({"repetition_penalty": 1.2}, Sampling(repetition_penalty=1.2)),
        (
            {"do_sample": False, "temperature": 1, "repetition_penalty": "1.2"},
            Sampling(repetition_penalty=1.2),
        ),
        ({"temperature": 0.8, "repetition_penalty": 0.9}, Sampling(0.8, seed=5, repetition_penalty=0.9)),
        ({"repetition_penalty": 1}, Sampling()),
        ({"repetition_penalty": None}, Sampling()),
    ],
)
def test_sampling(given: dict[str, Any], sampling: Sampling) -> None:
    assert parse(**given).sampling == sampling


@pytest.mark.parametrize(
    "given",
    [
        {"max_gen_toks": 0},
        {"max_gen_toks": "many"},
        {"max_gen_toks": 2.5},
        {"temperature": -1},
        {"temperature": "hot"},
        {"temperature": 1, "top_p": 2},
        {"temperature": 1, "top_k": 1.5},
        {"temperature": 1, "min_p": -0.1},
        {"temperature": 1, "seed": -1},
        {"temperature": float("nan")},
        {"do_sample": "maybe"},
        {"repetition_penalty": 0},
        {"repetition_penalty": -1.2},
        {"repetition_penalty": "strong"},
        {"repetition_penalty": float("inf")},
        {"repetition_penalty": float("nan")},
    ],
)
def test_values_that_make_no_sense_are_named(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError, match=f"{list(given)[-1]}="):
        parse(**given)


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_arguments_of_other_backends_are_taken_where_they_do_nothing_and_refused_where_not(name: str) -> None:
    assert parse(**{name: WITHOUT_EFFECT[name]}) == parse(**{name: None}) == parse()
    for value in (7, "most", [1]):
        with pytest.raises(
            InvalidOptionError, match=f"{name}=.* would change the answers and is not supported"
        ):
            parse(**{name: value})


def test_arguments_that_change_no_answer_are_taken() -> None:
    """Those of beam search as well: without beams nothing reads them."""
    assert parse(use_cache=False, pad_token_id=0, early_stopping=True, length_penalty=0.5) == parse()


@pytest.mark.parametrize(("name", "instead"), INSTEAD.items())
def test_arguments_of_other_backends_that_have_a_name_of_their_own_here_say_so(
    name: str, instead: str
) -> None:
    with pytest.raises(InvalidOptionError, match=f"^{name}=5 is not supported: .*{instead[-12:]}$"):
        parse(**{name: 5})


def test_what_lm_evals_tasks_ask_for_is_understood() -> None:
    """Every argument that a task of lm-eval 0.4.13 has, with values that stand in one."""
    greedy = {"until": ["\n"], "do_sample": False, "temperature": 1, "num_beams": 1, "max_new_tokens": 16}
    assert parse(**greedy) == GenerationOptions(16, ("\n",), Sampling())
    sampled = {"until": [], "do_sample": True, "temperature": 0.2, "top_p": 0.95, "max_gen_toks": 1024}
    assert parse(**sampled) == GenerationOptions(1024, (), Sampling(0.2, 0.95, seed=5))


@pytest.mark.parametrize(
    ("name", "near"), [("untill", "until"), ("max_gen_tok", "max_gen_toks"), ("penalty", "")]
)
def test_unknown_arguments_are_named(name: str, near: str) -> None:
    with pytest.raises(UnknownNameError, match=f"unknown generation argument '{name}'.*{near}"):
        parse(**{name: 1})


def test_every_repeat_has_a_seed_of_its_own() -> None:
    seeds = {request_seed(seed, "p", repeat) for seed in range(20) for repeat in range(20)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed(1, "p", 2) == request_seed(1, "p", 2)
    assert request_seed(1, "p", 2) != request_seed(1, "q", 2)
