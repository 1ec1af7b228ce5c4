"""Task names and what is said of them, on task files made here; lm-eval's own index only where it counts."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mlx_eval.errors import (
    InputError,
    InvalidOptionError,
    MissingDependencyError,
    TaskError,
    UnknownNameError,
)
from mlx_eval.harness import index
from mlx_eval.harness.tasks import DEMO_TASKS, TaskInfo, describe_tasks, resolve_tasks, task_manager

pytest.importorskip("lm_eval")
if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

FILES = {
    "base_yaml": "output_type: multiple_choice\ndataset_path: nowhere/none\ntest_split: test\n",
    "one.yaml": "include: base_yaml\ntask: fruit_one\ntag: [fruit_tag]\nmetric_list:\n  - metric: acc\n",
    "two.yaml": "include: base_yaml\ntask: fruit_two\ntag: fruit_tag\nnum_fewshot: 0\n",
    "roll.yaml": "task: page_text\noutput_type: loglikelihood_rolling\n",
    "gen.yaml": (
        "task: fruit_write\nnum_fewshot: 4\nmetric_list:\n  - metric: !function code.score\n"
        "  - metric: exact_match\n"
    ),
    "code.py": "raise RuntimeError('listing must not run this')\n",
    "inner.yaml": (
        "group: fruit_inner\ntask: [fruit_one, fruit_two]\naggregate_metric_list:\n  - metric: acc\n"
    ),
    "outer.yaml": (
        "group: all_outer\ntask:\n  - fruit_inner\n  - task: fruit_write\n"
        "  - group: written_out\n    task: [page_text]\n"
    ),
}


def write(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tasks"), FILES)


@pytest.fixture(scope="module")
def manager(folder: Path) -> TaskManager:
    return task_manager(folder, include_defaults=False)


@pytest.mark.parametrize(
    ("names", "resolved"),
    [
        ("fruit_one", ["fruit_one"]),
        (["fruit_one"], ["fruit_one"]),
        ("fruit_two, fruit_one,", ["fruit_two", "fruit_one"]),
        (["fruit_two", "page_text,fruit_two"], ["fruit_two", "page_text"]),
        ("all_outer", ["all_outer"]),
        ("fruit_tag", ["fruit_tag"]),
        ("page_*", ["page_text"]),
        ("fruit_t[aw]*", ["fruit_tag", "fruit_two"]),
        # the group stands for what is in it
        ("fruit_*", ["fruit_inner", "fruit_write"]),
        ("fruit_i*,fruit_*", ["fruit_inner", "fruit_write"]),
        ("fruit_*,all_*", ["all_outer"]),
        ("fruit_*,all_outer", ["all_outer"]),
        ("*", ["all_outer"]),
    ],
)
def test_names_are_resolved(names: str | list[str], resolved: list[str], manager: TaskManager) -> None:
    found = resolve_tasks(names, manager)
    assert [name for name in found if not name.startswith("demo")] == resolved


def test_a_task_named_twice_is_refused(manager: TaskManager) -> None:
    with pytest.raises(InvalidOptionError, match="'fruit_one' is named twice, by 'all_outer'"):
        resolve_tasks("all_outer,fruit_one", manager)
    with pytest.raises(InvalidOptionError, match="twice"):
        resolve_tasks("fruit_inner,all_outer", manager)
    with pytest.raises(InvalidOptionError, match="twice"):
        resolve_tasks("all_*,fruit_one", manager)
    # a tag is no group: lm-eval runs its tasks once
    assert resolve_tasks("fruit_tag,fruit_one", manager) == ["fruit_tag", "fruit_one"]


def test_unknown_names_give_the_nearest(manager: TaskManager) -> None:
    for name in ("fruit_wun", "fruit_thre*"):
        with pytest.raises(UnknownNameError, match=r"did you mean .*fruit_") as error:
            resolve_tasks(["page_text", name], manager)
        assert repr(name) in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(UnknownNameError, match="fruit_"):
        describe_tasks(manager, "fruit_wun")


@pytest.mark.parametrize("names", ["", " , ", [], [""]])
def test_no_name_at_all(names: str | list[str], manager: TaskManager) -> None:
    with pytest.raises(InvalidOptionError, match="no task"):
        resolve_tasks(names, manager)


def test_files_become_absolute_paths(
    folder: Path, manager: TaskManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    one, two = str(folder / "one.yaml"), str(folder / "two.yaml")
    assert resolve_tasks("one.yaml", manager) == [one]
    assert resolve_tasks("t*.yaml,./one.yaml,fruit_write", manager) == [two, one, "fruit_write"]
    entry = manager._index["fruit_one"]
    assert Path(one).samefile(entry.yaml_path)


def test_a_folder_stands_for_its_tasks(folder: Path, manager: TaskManager) -> None:
    names = {"one", "two", "roll", "gen", "inner", "outer"}
    assert resolve_tasks(str(folder), manager) == sorted(str(folder / f"{name}.yaml") for name in names)


def test_bad_files(tmp_path: Path, manager: TaskManager) -> None:
    (tmp_path / "broken.yaml").write_text("task: [unclosed\n")
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "astray.yaml").write_text("include: missing_yaml\ntask: x\n")
    (tmp_path / "empty.yaml").write_text("dataset_path: x\n")
    for name, kind, said in (
        ("absent", InputError, "no task file"),
        ("broken", InputError, "not a YAML task file"),
        ("list", InputError, "not a YAML task file"),
        ("astray", InputError, "cannot be read"),
        ("empty", TaskError, "holds no task"),
    ):
        with pytest.raises(kind, match=said) as error:
            resolve_tasks(str(tmp_path / f"{name}.yaml"), manager)
        assert name in str(error.value)
        assert "\n" not in str(error.value)
    bare = tmp_path / "bare"
    bare.mkdir()
    with pytest.raises(InputError, match="holds no task"):
        resolve_tasks(str(bare), manager)


def test_broken_files_in_an_include_path_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "broken.yaml").write_text("task: [unclosed\n")
    with caplog.at_level(logging.WARNING, logger="mlx_eval.harness.tasks"):
        task_manager([str(tmp_path)], include_defaults=False)
    assert "broken.yaml" in caplog.text


def test_broken_files_of_others_are_not_the_users_business(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "theirs", {"broken.yaml": "task: [unclosed\n", "one.yaml": "task: one\n"})
    monkeypatch.setattr(index, "own_folder", lambda: tmp_path / "theirs")
    with caplog.at_level(logging.WARNING):
        assert "one" in task_manager().task_index
    assert caplog.text == ""


def test_a_task_that_goes_before_lm_evals_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "theirs", {"a.yaml": "task: one\ntag: few\n", "b.yaml": "task: two\ntag: few\n"})
    write(tmp_path / "own", {"c.yaml": "task: one\ntag: few\n"})
    monkeypatch.setattr(index, "own_folder", lambda: tmp_path / "theirs")
    with caplog.at_level(logging.WARNING):
        manager = task_manager(tmp_path / "own")
    assert str(manager.task_index["one"].yaml_path) == str(tmp_path / "own" / "c.yaml")
    (said,) = caplog.records
    assert said.getMessage() == (
        f"one is read from {tmp_path}/own/c.yaml, which goes before {tmp_path}/theirs/a.yaml"
    )


def test_a_manager_loads_tasks_as_lm_evals_own(folder: Path) -> None:
    from lm_eval.tasks import TaskManager

    plain = TaskManager(include_path=[DEMO_TASKS, folder], include_defaults=False, metadata={"key": "value"})
    manager = task_manager(folder, include_defaults=False, metadata={"key": "value"})
    assert vars(manager).keys() == vars(plain).keys()
    assert manager.include_path == plain.include_path
    assert manager.metadata == plain.metadata
    assert manager.task_index == plain.task_index
    loaded, expected = (one.load(["demo"]) for one in (manager, plain))
    assert loaded["group_map"] == expected["group_map"]
    assert list(loaded["tasks"]) == list(expected["tasks"])
    for name, task in expected["tasks"].items():
        assert loaded["tasks"][name].dump_config() == task.dump_config()
        assert task.dump_config()["metadata"]["key"] == "value"


def test_an_include_path_must_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="nowhere"):
        task_manager(tmp_path / "nowhere", include_defaults=False)


def test_tasks_are_described(manager: TaskManager) -> None:
    one, two, write, page = describe_tasks(manager, ["fruit_one", "fruit_two,fruit_write", "page_text"])
    assert one == TaskInfo("fruit_one", "task", "multiple_choice", None, ("acc",))
    # without a list lm-eval takes the metrics of the output type
    assert two == TaskInfo("fruit_two", "task", "multiple_choice", 0, ("acc", "acc_norm"))
    assert write == TaskInfo("fruit_write", "task", "generate_until", 4, ("score", "exact_match"))
    assert page.metrics == ("word_perplexity", "byte_perplexity", "bits_per_byte")


def test_groups_and_tags_bring_what_is_in_them(manager: TaskManager) -> None:
    outer = describe_tasks(manager, "all_outer")
    names = [info.name for info in outer]
    assert names == ["all_outer", "fruit_inner", "fruit_one", "fruit_two", "fruit_write"]
    assert outer[0].members == ("fruit_inner", "fruit_write", "all_outer::written_out")
    assert (outer[1].kind, outer[1].metrics, outer[1].num_fewshot) == ("group", ("acc",), None)
    tag, *members = describe_tasks(manager, "fruit_tag")
    assert (tag.kind, tag.metrics, tag.members) == ("tag", (), ("fruit_one", "fruit_two"))
    assert [info.name for info in members] == ["fruit_one", "fruit_two"]


def test_words_and_patterns_list_each_name_once(manager: TaskManager) -> None:
    assert [info.name for info in describe_tasks(manager, ["writ", "*_write"])] == ["fruit_write"]
    everything = [info.name for info in describe_tasks(manager)]
    assert everything == manager.all_tasks
    assert {"fruit_one", "all_outer", "fruit_tag"} <= set(everything)


def test_without_lm_eval_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "lm_eval.tasks", raising=False)
    with pytest.raises(MissingDependencyError, match=r"pip install 'mlx-eval\[harness\]'"):
        task_manager(include_defaults=False)
