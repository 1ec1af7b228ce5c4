"""One evaluation from end to end, through lm-eval, on task files over local data."""

from __future__ import annotations

import copy
import math
import os
from pathlib import Path
from typing import Any

import pytest

from mlx_eval.errors import InvalidOptionError, UnknownNameError
from mlx_eval.harness.adapter import LmEvalAdapter, run_preset
from mlx_eval.harness.lm import MLXEvalLM
from mlx_eval.harness.presets import EvalPreset
from mlx_eval.harness.register import register
from mlx_eval.harness.tasks import task_manager
from mlx_eval.models.loaded import LoadedModel
from tests.harness.offline_tasks import CHOICES, PROMPTS, TEXTS, write_tasks
from tests.tiny import (
    bpe_tokenizer,
    loaded,
    oracle_generate,
    oracle_score,
    request,
    tiny_model,
    write_directory,
)

TASKS = ["tiny_choice", "tiny_text", "tiny_write"]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return loaded(tiny_model(), bpe_tokenizer())


@pytest.fixture
def quick(folder: Path) -> Any:
    """A task manager without lm-eval's own 14,000 files, which take seconds to read."""
    return task_manager(folder, include_defaults=False)


@pytest.fixture
def adapter(model: LoadedModel) -> Any:
    return LmEvalAdapter(model, batch_size=2)


def test_results_are_those_of_the_oracle(adapter: Any, quick: Any, model: LoadedModel) -> None:
    results = adapter.evaluate(TASKS, task_manager=quick, bootstrap_iters=0)
    lm = adapter.lm
    right = 0
    for sample in results["samples"]["tiny_choice"]:
        row = CHOICES[sample["doc_id"]]
        scores = []
        for choice, (answer,) in zip(row["choices"], sample["resps"], strict=True):  # type: ignore[call-overload]
            pair = lm._encode_pair(row["question"], f" {choice}")
            score, greedy, _ = oracle_score(model.model, *pair)
            assert answer == (pytest.approx(score, abs=1e-4), greedy)
            scores.append(score)
        right += scores.index(max(scores)) == row["answer"]
    assert results["results"]["tiny_choice"]["acc,none"] == pytest.approx(right / len(CHOICES))
    total = sum(lm.loglikelihood_rolling([request(row["text"])])[0] for row in TEXTS)
    num_bytes = sum(len(row["text"].encode()) for row in TEXTS)
    assert results["results"]["tiny_text"]["bits_per_byte,none"] == pytest.approx(
        -total / num_bytes / math.log(2)
    )
    for sample in results["samples"]["tiny_write"]:
        ids, margin = oracle_generate(model.model, lm.tok_encode(PROMPTS[sample["doc_id"]]["question"]), 5)
        assert margin > 1e-4
        assert sample["resps"] == [[lm.tok_decode(ids).split(".")[0]]]
    assert results["config"]["model_fingerprint"] == model.fingerprint()


def test_lm_eval_itself_evaluates_by_our_name(folder: Path, quick: Any, tmp_path: Path) -> None:
    write_directory(tmp_path)
    register()
    from lm_eval import simple_evaluate

    results = simple_evaluate(
        model="mlx",
        model_args=f"pretrained={tmp_path},max_length=64",
        tasks=["tiny_choice"],
        task_manager=quick,
        batch_size=2,
        device="cuda:0",
        bootstrap_iters=0,
    )
    lm: Any = MLXEvalLM.create_from_arg_string(f"pretrained={tmp_path},max_length=64")
    own = LmEvalAdapter(lm).evaluate(
        ["tiny_choice"], task_manager=task_manager(folder, include_defaults=False), bootstrap_iters=0
    )
    assert results["results"]["tiny_choice"] == own["results"]["tiny_choice"]


def test_groups_and_limits(adapter: Any, quick: Any) -> None:
    results = adapter.evaluate("tiny_group", task_manager=quick, limit=2, bootstrap_iters=0)
    assert set(results["results"]) == {"tiny_group", "tiny_choice", "tiny_text"}
    assert results["n-samples"]["tiny_choice"]["effective"] == 2


def test_use_cache_answers_a_second_run_without_computing(
    model: LoadedModel, folder: Path, tmp_path: Path
) -> None:
    cache = str(tmp_path / "answers")

    def run() -> tuple[Any, Any]:
        adapter = LmEvalAdapter(model)
        manager = task_manager(folder, include_defaults=False)
        results = adapter.evaluate(TASKS, task_manager=manager, use_cache=cache, bootstrap_iters=0)
        return results["results"], adapter.lm.statistics

    first, counted = run()
    assert counted.forwards > 0
    assert counted.decoding.generated_tokens > 0
    second, counted = run()
    assert second == first
    assert counted.forwards == 0
    assert counted.decoding.generated_tokens == 0
    assert not counted.requests


def test_cache_requests_gives_the_same_and_depends_on_the_template(folder: Path) -> None:
    def run(template: str, **arguments: Any) -> Any:
        tokenizer = copy.deepcopy(bpe_tokenizer())
        tokenizer.chat_template = template
        manager = task_manager(folder, include_defaults=False)
        results = LmEvalAdapter(loaded(tiny_model(), tokenizer)).evaluate(
            ["tiny_write"], task_manager=manager, apply_chat_template=True, bootstrap_iters=0, **arguments
        )
        return [sample["arguments"][0][0] for sample in results["samples"]["tiny_write"]]

    plain = run(TEMPLATE)
    assert run(TEMPLATE, cache_requests=True) == plain
    kept = os.listdir(os.environ["LM_HARNESS_CACHE_PATH"])
    assert len(kept) == 1
    assert run(TEMPLATE, cache_requests=True) == plain
    assert os.listdir(os.environ["LM_HARNESS_CACHE_PATH"]) == kept
    assert run(f"new {TEMPLATE}", cache_requests=True) == [f"new {prompt}" for prompt in plain]


@pytest.mark.parametrize("multiturn", [None, True, False])
def test_chat_templates_system_messages_and_examples_reach_the_prompt(
    folder: Path, quick: Any, multiturn: bool | None
) -> None:
    tokenizer = copy.deepcopy(bpe_tokenizer())
    tokenizer.chat_template = TEMPLATE
    results = LmEvalAdapter(loaded(tiny_model(), tokenizer, window=256)).evaluate(
        ["tiny_write"],
        task_manager=quick,
        apply_chat_template=True,
        system_instruction="be brief",
        num_fewshot=1,
        fewshot_as_multiturn=multiturn,
        bootstrap_iters=0,
    )
    prompt = results["samples"]["tiny_write"][0]["arguments"][0][0]
    assert prompt.startswith("[system]be brief[user]")
    assert prompt.endswith(f"{PROMPTS[0]['question']}[a]")
    # lm-eval's default with a template is multi-turn
    assert ("[assistant]" in prompt) == (multiturn is not False)


def test_a_chat_template_that_is_not_there_is_named_before_the_run(adapter: Any) -> None:
    with pytest.raises(InvalidOptionError, match="no chat template"):
        adapter.evaluate(["no such task"], apply_chat_template=True)


def test_unknown_arguments_and_options_are_named(adapter: Any, model: LoadedModel) -> None:
    with pytest.raises(UnknownNameError, match="'num_fewshots'; did you mean num_fewshot"):
        adapter.evaluate(TASKS, num_fewshots=1)
    with pytest.raises(UnknownNameError, match="'batchsize'; did you mean batch_size"):
        LmEvalAdapter(model, batchsize=3)


def test_gen_kwargs_of_the_run_go_over_those_of_the_task(adapter: Any, quick: Any) -> None:
    results = adapter.evaluate(
        ["tiny_write"], task_manager=quick, gen_kwargs={"max_gen_toks": 1}, bootstrap_iters=0
    )
    assert adapter.lm.statistics.decoding.generated_tokens == len(PROMPTS)
    assert all(len(sample["resps"][0]) == 1 for sample in results["samples"]["tiny_write"])


def test_a_backend_made_before_is_used_as_it_is(model: LoadedModel, quick: Any) -> None:
    lm = MLXEvalLM(model, batch_size=3)
    adapter = LmEvalAdapter(lm)
    assert adapter.lm is lm
    adapter.evaluate(["tiny_text"], task_manager=quick, bootstrap_iters=0)
    assert lm.batch_size == 3


def test_a_preset_with_changes(model: LoadedModel, quick: Any) -> None:
    preset = EvalPreset(
        name="mine",
        task=("tiny_choice", "tiny_text"),
        num_fewshot=0,
        extra={"task_manager": quick, "bootstrap_iters": 0},
    )
    results = run_preset(preset, model, limit=1, batch_size=2)
    assert set(results["results"]) == {"tiny_choice", "tiny_text"}
    assert results["n-samples"]["tiny_choice"]["effective"] == 1
    assert results["config"]["batch_size"] == 2
    with pytest.raises(UnknownNameError, match="arceasi"):
        run_preset("arceasi", model)
