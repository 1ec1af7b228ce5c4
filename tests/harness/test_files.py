"""lm-eval's own files in our folder, and the errors that its writer only logs."""

from __future__ import annotations

import json
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
    with pytest.raises(OutputError, match=r"samples_tiny_text_.* could not be written"):
        write_results(tracker, results, tmp_path, log_samples=True)
    assert [path.name for path in tmp_path.iterdir()] == [f"results_{tracker.date_id}.json"], "it is whole"


def test_remains_of_a_killed_run_do_no_harm(tasks: Path, tmp_path: Path) -> None:
    tracker, results = evaluate(tasks, tmp_path, ("tiny_text",))
    for name in (".writing", ".writing-1-dead"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results_old.json").write_text("{}", encoding="utf-8")
    written = write_results(tracker, results, tmp_path, log_samples=True)
    assert [path.name for path in written] == [
        f"results_{tracker.date_id}.json",
        f"samples_tiny_text_{tracker.date_id}.jsonl",
    ]


def test_a_folder_that_may_not_be_written(tasks: Path, tmp_path: Path) -> None:
    """A file stands where the writer makes its folder: unlike permissions, that stops root too."""
    tracker, results = evaluate(tasks, tmp_path, ("tiny_text",))
    in_the_way = Path(tracker.output_path)
    in_the_way.write_text("", encoding="utf-8")
    with pytest.raises(OutputError, match=r"results_.*\.json could not be written"):
        write_results(tracker, results, tmp_path, log_samples=False)
    assert list(tmp_path.iterdir()) == [in_the_way]


def test_a_folder_that_is_a_file(tasks: Path, tmp_path: Path) -> None:
    tracker, results = evaluate(tasks, tmp_path / "file", ("tiny_text",))
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(OutputError, match="could not be written"):
        write_results(tracker, results, tmp_path / "file", log_samples=False)
