"""Documents between runs: whole or not at all, and never an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_eval.cache import cache_folder, read_cached, write_cached

DOCUMENT = {"words": ["ä", "b\n"], "number": 2**60, "share": 0.1, "nothing": None}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLX_EVAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_document_comes_back_as_it_was_written(folder: Path) -> None:
    assert read_cached("one.json", "key") is None
    write_cached("one.json", "key", {"old": 1})
    write_cached("one.json", "key", DOCUMENT)
    assert read_cached("one.json", "key") == DOCUMENT
    assert read_cached("two.json", "key") is None
    assert [path.name for path in folder.iterdir()] == ["one.json"]


def test_another_key_is_another_document(folder: Path) -> None:
    write_cached("one.json", "version 1", DOCUMENT)
    assert read_cached("one.json", "version 2") is None


def test_whatever_byte_is_damaged_nothing_is_read(folder: Path) -> None:
    write_cached("one.json", "key", DOCUMENT)
    good = (folder / "one.json").read_bytes()
    for place in range(len(good)):
        changed = bytes([good[place] ^ 1])
        (folder / "one.json").write_bytes(good[:place] + changed + good[place + 1 :])
        assert read_cached("one.json", "key") is None, place
        (folder / "one.json").write_bytes(good[:place])
        assert read_cached("one.json", "key") is None, place


@pytest.mark.parametrize("body", [b"", b"\n", b"[]\n{}", b"null\nnull", b"\xff\xfe", b"[" * 100_000])
def test_other_files_are_no_documents(folder: Path, body: bytes) -> None:
    folder.mkdir()
    (folder / "one.json").write_bytes(body)
    assert read_cached("one.json", "key") is None


def test_a_folder_that_cannot_be_written_to_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    monkeypatch.setenv("MLX_EVAL_CACHE", str(tmp_path / "file" / "below"))
    write_cached("one.json", "key", DOCUMENT)
    assert read_cached("one.json", "key") is None


def test_a_full_disk_leaves_the_old_document_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cached("one.json", "key", DOCUMENT)

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    write_cached("one.json", "key", {"new": 1})
    assert read_cached("one.json", "key") == DOCUMENT
    assert [path.name for path in folder.iterdir()] == ["one.json"]


def test_ctrl_c_while_writing_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_cached("one.json", "key", DOCUMENT)
    assert list(folder.iterdir()) == []


def test_processes_that_write_at_once_leave_a_whole_document(folder: Path) -> None:
    code = (
        "import sys\n"
        "from mlx_eval.cache import read_cached, write_cached\n"
        "for turn in range(60):\n"
        "    write_cached('one.json', 'key', [sys.argv[1]] * (turn * 97 % 1000 + 1))\n"
        "    found = read_cached('one.json', 'key')\n"
        "    assert found and len(set(found)) == 1, found\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", code, name], env={**os.environ}) for name in ("one", "two")
    ]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert [path.name for path in folder.iterdir()] == ["one.json"]


def test_the_folder_is_the_systems_place_for_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MLX_EVAL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    assert cache_folder() == tmp_path / ".cache" / "mlx_eval"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / ".cache" / "mlx_eval"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "mlx_eval"
    monkeypatch.setattr("sys.platform", "darwin")
    assert cache_folder() == tmp_path / "Library" / "Caches" / "mlx_eval"
    monkeypatch.setenv("MLX_EVAL_CACHE", "~/elsewhere")
    assert cache_folder() == tmp_path / "elsewhere"
