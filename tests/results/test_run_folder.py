"""The folder of a run and `run.json`."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from mlx_eval.errors import OutputError
from mlx_eval.results.run_folder import RUN_FILE, open_folder, write_run_file


def test_a_folder_is_made_with_its_parents_and_nothing_in_it(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "runs" / "a")
    assert folder == tmp_path / "runs" / "a"
    assert folder.is_dir()
    assert list(folder.iterdir()) == []


def test_a_folder_that_exists_keeps_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}", encoding="utf-8")
    assert open_folder(str(tmp_path)) == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_folder("~/runs") == tmp_path / "runs"
    assert (tmp_path / "runs").is_dir()


@pytest.mark.parametrize("below", ["", "deeper", "deeper/still"])
def test_a_file_in_the_way(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    path = tmp_path / "file" / below
    with pytest.raises(OutputError) as caught:
        open_folder(path, option="--somewhere")
    message = str(caught.value)
    assert message.startswith(f"cannot write to {path}: ")
    assert message.endswith("; give another --somewhere")
    assert "\n" not in message
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


def test_a_folder_that_takes_no_file_is_found_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("mlx_eval.results.run_folder.tempfile.TemporaryFile", full)
    with pytest.raises(OutputError, match=r"No space left on device; give another --output_path"):
        open_folder(tmp_path)


def test_a_record_is_written_as_readable_json(tmp_path: Path) -> None:
    written = write_run_file(tmp_path, {"model": "modèle", "device": tmp_path, "seconds": {"score": 1.5}})
    assert written == tmp_path / RUN_FILE
    text = written.read_text(encoding="utf-8")
    assert json.loads(text) == {"model": "modèle", "device": str(tmp_path), "seconds": {"score": 1.5}}
    assert "modèle" in text
    assert text.endswith("}\n")
    assert list(tmp_path.iterdir()) == [written], "nothing else is left"


def test_a_later_record_takes_the_place_of_the_first(tmp_path: Path) -> None:
    write_run_file(tmp_path, {"run": 1, "more": "x" * 1000})
    write_run_file(tmp_path, {"run": 2})
    assert json.loads((tmp_path / RUN_FILE).read_text(encoding="utf-8")) == {"run": 2}


def test_a_record_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run_file(tmp_path, {"run": 1})

    def half(path: Path, text: str, encoding: str) -> None:
        path.write_bytes(text.encode(encoding)[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OutputError, match=r"cannot write .*run\.json: No space left on device"):
        write_run_file(tmp_path, {"run": 2})
    assert [path.name for path in tmp_path.iterdir()] == [RUN_FILE]
    assert json.loads((tmp_path / RUN_FILE).read_text(encoding="utf-8")) == {"run": 1}


def test_something_else_has_the_name(tmp_path: Path) -> None:
    (tmp_path / RUN_FILE).mkdir()
    with pytest.raises(OutputError, match=r"cannot write .*run\.json"):
        write_run_file(tmp_path, {"run": 1})
    assert [path.name for path in tmp_path.iterdir()] == [RUN_FILE]


def test_the_folder_has_gone(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"cannot write .*run\.json: No such file or directory"):
        write_run_file(tmp_path / "gone", {"run": 1})
    assert list(tmp_path.iterdir()) == []
