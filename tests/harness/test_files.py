"""lm-eval's own files in our folder, and the errors that its writer only logs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mlx_eval.errors import OutputError
from mlx_eval.harness.adapter import LmEvalAdapter
from mlx_eval.harness.files import STAGING, new_tracker, write_results
from mlx_eval.harness.tasks import task_manager
from tests.harness.offline_tasks import write_tasks
from tests.tiny import bpe_tokenizer, loaded, tiny_model


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tasks(tmp_path_factory.mktemp("tasks"))
    # a task whose name begins as another's file does
    twin = (folder / "text.yaml").read_text().replace("tiny_text", "tiny_choice_2b")
    (folder / "twin.yaml").write_text(twin, encoding="utf-8")
    return folder


def evaluate(
    tasks: Path, output: Path, names: tuple[str, ...] = ("tiny_choice", "tiny_choice_2b")
) -> tuple[Any, Any]:
    tracker = new_tracker(output)
    results = LmEvalAdapter(loaded(tiny_model(), bpe_tokenizer())).evaluate(
        names,
        task_manager=task_manager(tasks, include_defaults=False),
        evaluation_tracker=tracker,
        bootstrap_iters=0,
    )
    return tracker, results


def test_results_and_samples_are_written_where_asked(tasks: Path, tmp_path: Path) -> None:
    tracker, results = evaluate(tasks, tmp_path)
    files = write_results(tracker, results, tmp_path, log_samples=True)
    assert files[0].name.startswith("results_")
    assert sorted(path.name.rsplit("_", 1)[0] for path in files[1:]) == [
        "samples_tiny_choice",
        "samples_tiny_choice_2b",
    ]
    assert sorted(tmp_path.iterdir()) == sorted(files), "nothing else is left in the folder"
    written = json.loads(files[0].read_text(encoding="utf-8"))
    assert written["results"]["tiny_choice"]["acc,none"] == results["results"]["tiny_choice"]["acc,none"]
    assert "samples" not in written
    for path, count in zip(sorted(files[1:]), (3, 2), strict=True):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert len(rows) == count
        assert all("resps" in row for row in rows)
    assert "samples" in results, "the caller's results are left as they were"


def test_without_log_samples_only_the_results_are_written(tasks: Path, tmp_path: Path) -> None:
    tracker, results = evaluate(tasks, tmp_path, ("tiny_text",))
    (file,) = write_results(tracker, results, tmp_path, log_samples=False)
    assert file.parent == tmp_path
    assert list(tmp_path.iterdir()) == [file]


def test_two_runs_share_a_folder(tasks: Path, tmp_path: Path) -> None:
    for _ in range(2):
        tracker, results = evaluate(tasks, tmp_path, ("tiny_text",))
        write_results(tracker, results, tmp_path, log_samples=False)
    assert len(list(tmp_path.glob("results_*.json"))) == 2


def test_what_the_writer_cannot_write_is_an_error_and_leaves_nothing(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker, results = evaluate(tasks, tmp_path, ("tiny_text",))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OutputError, match="could not be written") as error:
        write_results(tracker, results, tmp_path, log_samples=False)
    assert "\n" not in str(error.value)
    assert not (tmp_path / STAGING).exists()
    assert list(tmp_path.iterdir()) == []


def test_samples_that_are_cut_short_are_an_error(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker, results = evaluate(tasks, tmp_path, ("tiny_text",))
    write = type(tracker).save_results_samples

    def cut(self: Any, task_name: str, samples: Any) -> None:
        write(self, task_name, samples[:1])

    monkeypatch.setattr(type(tracker), "save_results_samples", cut)
    with pytest.raises(OutputError, match="holds 1 of 2 rows"):
        write_results(tracker, results, tmp_path, log_samples=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(tasks: Path, tmp_path: Path) -> None:
    tracker, results = evaluate(tasks, tmp_path, ("tiny_text",))
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(OutputError, match="could not be written"):
            write_results(tracker, results, tmp_path, log_samples=False)
    finally:
        tmp_path.chmod(0o700)


def test_a_folder_that_is_a_file(tasks: Path, tmp_path: Path) -> None:
    tracker, results = evaluate(tasks, tmp_path / "file", ("tiny_text",))
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(OutputError, match="could not be written"):
        write_results(tracker, results, tmp_path / "file", log_samples=False)
