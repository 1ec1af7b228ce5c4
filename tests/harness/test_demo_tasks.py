"""The demo tasks as lm-eval builds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import mlx_eval.harness

TASKS = Path(mlx_eval.harness.__file__).parent / "demo_tasks"


@pytest.fixture(scope="module")
def tasks() -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    # lm-eval's own thousands of tasks are left out: indexing them takes ten seconds
    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    loaded = manager.load(["demo"])
    assert loaded["group_map"] == {"demo": ["demo_choice", "demo_perplexity", "demo_sums"]}
    tasks: dict[str, Any] = loaded["tasks"]
    return tasks


def test_number_of_rows(tasks: dict[str, Any]) -> None:
    assert {name: len(list(task.test_docs())) for name, task in tasks.items()} == {
        "demo_choice": 40,
        "demo_perplexity": 12,
        "demo_sums": 24,
    }


def requests(task: Any, **options: Any) -> list[Any]:
    """The requests of the task's first row."""
    task.set_config("num_fewshot", options.pop("num_fewshot", 0))
    task.build_all_requests(limit=1, rank=0, world_size=1, **options)
    return list(task.instances)


def test_choice_asks_for_each_choice(tasks: dict[str, Any]) -> None:
    made = requests(tasks["demo_choice"])
    row = next(iter(tasks["demo_choice"].test_docs()))
    prompt = f"{row['story']}\nQ: {row['question']}\nA:"
    assert [request.args for request in made] == [(prompt, f" {choice}") for choice in row["choices"]]
    assert {request.request_type for request in made} == {"loglikelihood"}


def test_sums_stop_at_an_empty_line(tasks: dict[str, Any]) -> None:
    (request,) = requests(tasks["demo_sums"])
    row = next(iter(tasks["demo_sums"].test_docs()))
    prompt, options = request.args
    assert prompt == f"Q: {row['question']}\nA:"
    assert options["until"] == ["\n\n", "Q:"]
    assert options["max_gen_toks"] == 24
    assert tasks["demo_sums"].process_results(row, [row["answer"]]) == {"exact_match": 1.0}
    assert tasks["demo_sums"].process_results(row, [row["answer"].replace("=", "= 1")]) == {
        "exact_match": 0.0
    }


def test_perplexity_asks_for_whole_texts(tasks: dict[str, Any]) -> None:
    (request,) = requests(tasks["demo_perplexity"])
    row = next(iter(tasks["demo_perplexity"].test_docs()))
    assert request.args == (row["text"],)
    assert request.request_type == "loglikelihood_rolling"
    # some texts take more than one window of the demo model
    lengths = [len(row["text"].encode()) for row in tasks["demo_perplexity"].test_docs()]
    assert min(lengths) < 512 < max(lengths)


@pytest.mark.parametrize("name", ["demo_choice", "demo_sums"])
def test_examples_come_from_the_train_split(tasks: dict[str, Any], name: str) -> None:
    task = tasks[name]
    prompt = requests(task, num_fewshot=2)[0].args[0]
    *examples, last = prompt.split("\n\n")
    assert len(examples) == 2
    written = {f"{task.doc_to_text(row)} {answer_of(row)}" for row in task.training_docs()}
    assert set(examples) <= written
    assert last == task.doc_to_text(next(iter(task.test_docs())))


def answer_of(row: dict[str, Any]) -> str:
    return str(row["answer"] if "answer" in row else row["choices"][row["label"]])


def test_labels_point_at_every_place(tasks: dict[str, Any]) -> None:
    """A model that always takes the same place scores near chance."""
    labels = [row["label"] for row in tasks["demo_choice"].test_docs()]
    assert max(labels.count(place) for place in range(4)) <= 16
    assert all(len(set(row["choices"])) == 4 for row in tasks["demo_choice"].test_docs())
