"""What cannot be evaluated is found, and named in a line, before any model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlx_eval.errors import MissingDependencyError, TaskError, UnknownNameError
from mlx_eval.harness.prepare import PreparedTasks, prepare_tasks
from mlx_eval.harness.statistics import Stopwatch
from mlx_eval.harness.tasks import task_manager
from tests.harness.offline_tasks import write_tasks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tasks(tmp_path)


def prepare(folder: Path, names: Any, **arguments: Any) -> PreparedTasks:
    return prepare_tasks(names, manager=task_manager(folder, include_defaults=False), **arguments)


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_groups_are_resolved_to_their_tasks(folder: Path) -> None:
    tasks = prepare(folder, "tiny_group,tiny_write")
    assert tasks.names == ["tiny_group", "tiny_write"]
    assert sorted(tasks.load(None)["tasks"]) == ["tiny_choice", "tiny_text", "tiny_write"]


def test_its_stages_are_timed(folder: Path) -> None:
    stopwatch = Stopwatch()
    prepare(folder, "tiny_text", stopwatch=stopwatch)
    assert list(stopwatch.seconds) == ["imports", "index", "data"]
    with pytest.raises(UnknownNameError):
        prepare(folder, "tiny_none", stopwatch=(stopwatch := Stopwatch()))
    assert list(stopwatch.seconds) == ["imports", "index"]


def test_it_stands_in_for_a_task_manager(folder: Path) -> None:
    tasks = prepare(folder, ["tiny_text"])
    assert list(tasks.load(["whatever"])["tasks"]) == ["tiny_text"]
    assert "tiny_write" in tasks.all_tasks


def test_an_unknown_task_is_named_with_the_nearest(folder: Path) -> None:
    with pytest.raises(UnknownNameError, match="'tiny_chioce'; did you mean tiny_choice") as error:
        prepare(folder, "tiny_chioce")
    one_line(error)


def test_data_that_cannot_be_had_offline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'owner/name' on the Hub (OfflineModeIsEnabled)\nmore lines")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    with pytest.raises(
        TaskError, match="the data of task tiny_choice cannot be had: Couldn't reach"
    ) as error:
        prepare(folder, "tiny_choice")
    assert "local data" in one_line(error)


def test_a_data_file_that_is_not_there(folder: Path) -> None:
    (folder / "choice.jsonl").unlink()
    with pytest.raises(TaskError, match="the data of task tiny_choice cannot be had") as error:
        prepare(folder, "tiny_choice")
    one_line(error)


def test_data_that_is_no_json(folder: Path) -> None:
    (folder / "choice.jsonl").write_text("{broken\n", encoding="utf-8")
    with pytest.raises(TaskError, match=r"the data of task tiny_choice cannot be read: .*JSON") as error:
        prepare(folder, "tiny_choice")
    one_line(error)


def test_a_split_that_is_not_there(folder: Path) -> None:
    task = folder / "choice.yaml"
    task.write_text(task.read_text().replace("test_split: test", "test_split: validation"), encoding="utf-8")
    with pytest.raises(TaskError, match="tiny_choice") as error:
        prepare(folder, "tiny_choice")
    one_line(error)


def test_a_package_that_is_not_installed(folder: Path) -> None:
    (folder / "code.py").write_text(
        "import a_package_that_nobody_has\ndef f(doc): return ''\n", encoding="utf-8"
    )
    task = folder / "write.yaml"
    task.write_text(task.read_text().replace('"{{question}}"', "!function code.f"), encoding="utf-8")
    with pytest.raises(
        TaskError, match=r"tiny_write needs a package .*a_package_that_nobody_has.*pip install"
    ) as error:
        prepare(folder, "tiny_write")
    one_line(error)


def test_code_that_a_model_wrote_runs_only_when_confirmed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)
    task = folder / "write.yaml"
    task.write_text(task.read_text() + "unsafe_code: true\n", encoding="utf-8")
    with pytest.raises(
        TaskError, match=r"tiny_write runs code that the model wrote.*--confirm_run_unsafe_code"
    ):
        prepare(folder, "tiny_write")
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "0")
    assert prepare(folder, "tiny_write", confirm_run_unsafe_code=True).names == ["tiny_write"]


def test_without_lm_eval_the_install_command_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'mlx-eval\[harness\]'"):
        prepare_tasks("demo")
