"""The exceptions and their texts."""

from __future__ import annotations

import pytest

from mlx_eval import errors
from mlx_eval.errors import (
    MissingDependencyError,
    MlxEvalError,
    UnknownNameError,
    nearest_names,
    unknown_name,
)

NAMES = ["arc_easy", "arc_challenge", "hellaswag", "mmlu"]
MANY = [f"task_{number}" for number in range(21)]


@pytest.mark.parametrize(
    ("name", "known", "hint", "text"),
    [
        ("hellaswagg", NAMES, "", "unknown task 'hellaswagg'; did you mean hellaswag?"),
        (
            "arc_eas",
            ["arc_easy", "arc_ease"],
            "",
            "unknown task 'arc_eas'; did you mean arc_easy or arc_ease?",
        ),
        ("zzz", ["mmlu", "boolq"], "", "unknown task 'zzz'; known: boolq, mmlu"),
        ("zzz", MANY, "", "unknown task 'zzz'"),
        ("zzz", MANY, "see the list", "unknown task 'zzz'; see the list"),
        (
            "hellaswagg",
            NAMES,
            "see the list",
            "unknown task 'hellaswagg'; did you mean hellaswag?; see the list",
        ),
        ("", ["mmlu"], "", "unknown task ''; known: mmlu"),
    ],
)
def test_an_unknown_name_says_which_are_near_or_known(
    name: str, known: list[str], hint: str, text: str
) -> None:
    error = unknown_name("task", name, known, hint)
    assert isinstance(error, UnknownNameError)
    assert str(error) == text


def test_twenty_names_are_listed_and_one_more_is_not() -> None:
    assert "; known: " in str(unknown_name("task", "zzz", MANY[:20]))
    assert "; known" not in str(unknown_name("task", "zzz", MANY))


def test_known_names_may_be_any_iterable() -> None:
    assert str(unknown_name("preset", "mmlv", iter(NAMES))) == "unknown preset 'mmlv'; did you mean mmlu?"


def test_the_nearest_name_comes_first_and_none_is_far() -> None:
    assert nearest_names("arc_easi", NAMES)[0] == "arc_easy"
    assert nearest_names("task_1", MANY, count=2)[0] == "task_1"
    assert len(nearest_names("task_1", MANY, count=2)) == 2
    assert nearest_names("xylophone", NAMES) == []


def test_the_tree_is_the_one_that_the_docstring_draws() -> None:
    classes = {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    drawn = [line.split() for line in (errors.__doc__ or "").splitlines() if line.startswith("    ")]
    below = {words[1] for words in drawn if words[0] in ("├──", "└──")}
    assert below | {"MlxEvalError", "MissingDependencyError"} == set(classes)
    for name in below:
        assert issubclass(classes[name], MlxEvalError), name
        assert classes[name].__doc__
    also_value_errors = {words[1] for words in drawn if "ValueError)" in words}
    assert also_value_errors == {name for name in below if issubclass(classes[name], ValueError)}


def test_a_missing_package_is_an_import_error_that_says_how_to_install_it() -> None:
    error = MissingDependencyError("lm-eval", "Evaluating tasks", "harness")
    assert isinstance(error, ImportError)
    assert not isinstance(error, MlxEvalError), "the two are caught side by side"
    assert error.name == "lm-eval"
    expected = "Evaluating tasks needs lm-eval, which is not installed: pip install 'mlx-eval[harness]'"
    assert str(error) == expected


def test_catching_the_base_catches_what_is_raised() -> None:
    with pytest.raises(MlxEvalError):
        raise unknown_name("task", "a", ["b"])
    with pytest.raises(ValueError, match="unknown task 'a'"):
        raise unknown_name("task", "a", ["b"])
