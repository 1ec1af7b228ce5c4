"""Presets: validation, lm-eval's arguments, and that lm-eval knows every name."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from mlx_eval.errors import InvalidOptionError, UnknownNameError
from mlx_eval.harness.presets import (
    ARCEASY_PRESET,
    EXTRA_ARGUMENTS,
    FIELD_NAMES,
    MMLU_PRESET,
    PRESETS,
    WIKITEXT_PRESET,
    EvalPreset,
    get_preset,
)

# Shots that published scores use (Open LLM Leaderboard v1 and v2, papers); beside None those that the
# task's own file has to have.
PUBLISHED_SHOTS = {
    "mmlu": 5,
    "arc_easy": 0,
    "wikitext": 0,
    "hellaswag": 10,
    "arc_challenge": 25,
    "gsm8k": 5,
    "ifeval": 0,
    "mmlu_pro": 5,
    "gpqa_diamond_zeroshot": 0,
    "hendrycks_math500": 0,
    "humaneval": 0,
    "bbh": 3,
    "aime24": 0,
    "aime25": 0,
    "truthfulqa": 0,
    "winogrande": 5,
    "piqa": 0,
    "boolq": 0,
}


def test_arguments_hold_only_what_is_set() -> None:
    assert EvalPreset("p", "arc_easy").to_lm_eval_kwargs() == {"tasks": ["arc_easy"]}
    assert MMLU_PRESET.to_lm_eval_kwargs() == {"tasks": ["mmlu"], "num_fewshot": 5}


def test_arguments_hold_everything_that_is_set() -> None:
    preset = EvalPreset(
        name="all",
        task=("a", "b"),
        num_fewshot=0,
        batch_size="auto",
        limit=0.5,
        apply_chat_template="tool_use",
        fewshot_as_multiturn=False,
        system_instruction="",
        gen_kwargs={"temperature": 0.5},
        extra={"bootstrap_iters": 0, "metadata": None},
    )
    assert preset.to_lm_eval_kwargs() == {
        "tasks": ["a", "b"],
        "num_fewshot": 0,
        "batch_size": "auto",
        "limit": 0.5,
        "apply_chat_template": "tool_use",
        "fewshot_as_multiturn": False,
        "system_instruction": "",
        "gen_kwargs": {"temperature": 0.5},
        "bootstrap_iters": 0,
    }


@pytest.mark.parametrize(
    ("task", "tasks"),
    [
        ("a", ("a",)),
        (("a", "b"), ("a", "b")),
        (["a"], ("a",)),
        ("a, b,", ("a", "b")),
        (("a,b", "c"), ("a", "b", "c")),
    ],
)
def test_tasks_are_names_one_by_one(task: str | tuple[str, ...] | list[str], tasks: tuple[str, ...]) -> None:
    assert EvalPreset("p", task).tasks == tasks


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("name", "  "),
        ("name", None),
        ("task", ""),
        ("task", ()),
        ("task", (" ", ",")),
        ("task", 3),
        ("task", ("a", 3)),
        ("num_fewshot", -1),
        ("num_fewshot", 2.0),
        ("num_fewshot", True),
        ("num_fewshot", "5"),
        ("batch_size", 0),
        ("batch_size", "many"),
        ("batch_size", 1.5),
        ("batch_size", float("inf")),
        ("limit", 0),
        ("limit", -3),
        ("limit", 1.5),
        ("limit", float("nan")),
        ("limit", float("inf")),
        ("limit", True),
        ("limit", "ten"),
        ("apply_chat_template", None),
        ("apply_chat_template", ""),
        ("fewshot_as_multiturn", "yes"),
        ("system_instruction", 1),
        ("gen_kwargs", 1),
        ("extra", 1),
        ("extra", {"model": "hf"}),
        ("extra", {"tasks": ["a"]}),
        ("extra", {"limit": 3}),
        ("description", None),
    ],
)
def test_a_bad_value_is_one_clear_line(field: str, value: object) -> None:
    with pytest.raises(InvalidOptionError) as error:
        EvalPreset(**({"name": "p", "task": "a"} | {field: value}))  # type: ignore[arg-type]
    text = str(error.value)
    assert "\n" not in text
    assert "preset" in text
    named = next(iter(value)) if isinstance(value, dict) else field
    assert str(named) in text


def test_an_unknown_extra_argument_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="bootstrap_iters"):
        EvalPreset("p", "a", extra={"bootstrap_iter": 0})


@pytest.mark.parametrize(("given", "kept"), [(1, 1), (1.0, 1), (20.0, 20), (0.25, 0.25)])
def test_limit_is_a_count_or_a_share(given: float, kept: float) -> None:
    limit = EvalPreset("p", "a", limit=given).limit
    assert limit == kept
    assert isinstance(limit, int) == (kept >= 1)


def test_presets_are_frozen_and_own_what_they_hold() -> None:
    extra = {"bootstrap_iters": 0}
    preset = EvalPreset("p", "a", extra=extra, gen_kwargs={"top_k": 1})
    extra["bootstrap_iters"] = 9
    arguments = preset.to_lm_eval_kwargs()
    arguments["gen_kwargs"]["top_k"] = 7
    assert preset.to_lm_eval_kwargs() == {"tasks": ["a"], "gen_kwargs": {"top_k": 1}, "bootstrap_iters": 0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        preset.name = "q"  # type: ignore[misc]
    assert not hasattr(preset, "__dict__")
    assert hash(preset) == hash(preset.replace())


def test_replace_validates() -> None:
    assert MMLU_PRESET.replace(num_fewshot=0).num_fewshot == 0
    assert dataclasses.replace(MMLU_PRESET, limit=3).limit == 3
    assert MMLU_PRESET.num_fewshot == 5
    with pytest.raises(InvalidOptionError):
        MMLU_PRESET.replace(limit=0)
    with pytest.raises(UnknownNameError, match="num_fewshot"):
        MMLU_PRESET.replace(num_fewshots=0)


def test_get_preset() -> None:
    own = EvalPreset("mmlu", "mmlu_anatomy")
    assert get_preset("mmlu") is MMLU_PRESET
    assert get_preset("arc_easy") is ARCEASY_PRESET
    assert get_preset("wikitext") is WIKITEXT_PRESET
    assert get_preset("mmlu", {"mmlu": own}) is own
    with pytest.raises(UnknownNameError, match="did you mean hellaswag") as error:
        get_preset("helaswag")
    assert "\n" not in str(error.value)
    with pytest.raises(UnknownNameError, match="my_own"):
        get_preset("my_owm", {"my_own": own})


def test_no_preset_confirms_unsafe_code() -> None:
    assert all("confirm_run_unsafe_code" not in preset.to_lm_eval_kwargs() for preset in PRESETS.values())


def test_presets_are_by_name_and_cannot_be_added_to() -> None:
    assert all(name == preset.name for name, preset in PRESETS.items())
    assert set(PRESETS) == {*PUBLISHED_SHOTS, "demo"}
    assert get_preset("demo").apply_chat_template is True
    with pytest.raises(TypeError):
        PRESETS["x"] = MMLU_PRESET  # type: ignore[index]


def test_extra_arguments_are_those_of_lm_eval() -> None:
    evaluator = pytest.importorskip("lm_eval.evaluator")
    parameters = set(inspect.signature(evaluator.simple_evaluate).parameters)
    assert parameters >= EXTRA_ARGUMENTS
    ours = {*FIELD_NAMES} - {"name", "task", "extra", "description"}
    loading = {"device", "max_batch_size", "model_args"}  # of a model that is given already
    of_a_run = {"evaluation_tracker", "log_samples", "verbosity"}
    assert parameters - EXTRA_ARGUMENTS == {"model", "tasks", *ours, *loading, *of_a_run}


def test_lm_eval_knows_every_preset_and_its_shots() -> None:
    pytest.importorskip("lm_eval")
    from mlx_eval.harness.tasks import describe_tasks, resolve_tasks, task_manager

    manager = task_manager()
    for preset in PRESETS.values():
        assert resolve_tasks(preset.tasks, manager) == list(preset.tasks)
        (info, *_) = describe_tasks(manager, preset.tasks)
        if preset.name == "demo":
            assert len(info.members) >= 3
        elif preset.num_fewshot is None:
            assert info.num_fewshot == PUBLISHED_SHOTS[preset.name], preset.name
        else:
            # a number of ours would be ignored, or go against the task's own examples
            assert info.num_fewshot is None, preset.name
            assert preset.num_fewshot == PUBLISHED_SHOTS[preset.name]
