"""The sub-command `summarize`, without the program around it."""

from __future__ import annotations

import argparse
import csv
import io
import json
from pathlib import Path

import pytest

from mlx_eval.cli import summarize
from mlx_eval.errors import InputError


def _run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    summarize.add_parser(parser.add_subparsers())
    args = parser.parse_args(["summarize", *arguments])
    result: int = args.func(args)
    return result


def _write(folder: Path, value: float) -> Path:
    folder.mkdir(parents=True)
    path = folder / "results_2025-01-01T00-00-00.json"
    path.write_text(json.dumps({"results": {"t": {"acc,none": value, "acc_stderr,none": "N/A"}}}))
    return path


def test_one_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _write(tmp_path / "run" / "model", 0.25)
    for place in (path, path.parent, tmp_path / "run"):
        assert _run(str(place)) == 0
        out = capsys.readouterr().out
        assert out.startswith("| Task")
        assert "0.2500" in out
    assert _run(str(path), "--format", "json") == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert (record["task"], record["value"], record["stderr"]) == ("t", 0.25, None)
    assert _run(str(path), "--format", "csv") == 0
    (line,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (line["task"], line["value"], line["stderr"]) == ("t", "0.25", "")


def test_several_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = str(_write(tmp_path / "a", 0.25)), str(_write(tmp_path / "b", 0.5))
    assert _run(first, second) == 0
    out = capsys.readouterr().out
    assert out.index(first) < out.index("0.2500") < out.index(second) < out.index("0.5000")
    assert _run(first, second, "--format", "csv") == 0
    lines = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert [(line["run"], line["value"]) for line in lines] == [(first, "0.25"), (second, "0.5")]


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file or folder"):
        _run(str(tmp_path / "missing"))
    with pytest.raises(InputError, match="no results_"):
        _run(str(tmp_path))
    (tmp_path / "empty.json").touch()
    with pytest.raises(InputError, match="empty"):
        _run(str(tmp_path / "empty.json"))
    with pytest.raises(SystemExit):
        _run()
