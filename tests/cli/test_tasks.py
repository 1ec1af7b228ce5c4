"""The sub-command `tasks`, on task files made here; lm-eval's own, slow to read, are left out."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from mlx_eval.cli import tasks
from mlx_eval.errors import InvalidOptionError, UnknownNameError
from mlx_eval.harness import tasks as harness_tasks

pytest.importorskip("lm_eval")

FILES = {
    "one.yaml": "task: pond_frog\noutput_type: multiple_choice\nnum_fewshot: 3\ntag: pond_tag\n",
    "two.yaml": "task: pond_duck\noutput_type: generate_until\nmetric_list:\n  - metric: exact_match\n",
    "all.yaml": "group: pond\ntask: [pond_frog, pond_duck]\n",
}


@pytest.fixture(autouse=True)
def only_own_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = harness_tasks.task_manager
    monkeypatch.setattr(harness_tasks, "task_manager", lambda path: manager(path, include_defaults=False))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def _run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    tasks.add_parser(parser.add_subparsers())
    args = parser.parse_args(["tasks", *arguments])
    result: int = args.func(args)
    return result


def test_a_group_and_what_is_in_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("pond", "--include_path", str(folder)) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert table[0] == ["Name", "Kind", "Output type", "Shots", "Metrics"]
    assert table[2:] == [
        ["pond", "group", "", "", ""],
        ["pond_frog", "task", "multiple_choice", "3", "acc, acc_norm"],
        ["pond_duck", "task", "generate_until", "", "exact_match"],
    ]


def test_json_kind_and_limit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--include_path", str(folder), "--json")
    assert _run("pond_*", "--kind", "task", "--limit", "1", *where) == 0
    out, err = capsys.readouterr()
    (record,) = json.loads(out)
    assert (record["name"], record["kind"]) == ("pond_duck", "task")
    assert "1 more" in err
    assert _run("pond_*", *where) == 0
    out, err = capsys.readouterr()
    assert [record["kind"] for record in json.loads(out)] == ["task", "task", "tag"]
    assert err == ""


def test_without_a_pattern_everything_is_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--include_path", str(folder), "--json") == 0
    names = {record["name"] for record in json.loads(capsys.readouterr().out)}
    assert {"pond", "pond_frog", "pond_duck", "pond_tag"} <= names


def test_bad_input(folder: Path) -> None:
    with pytest.raises(UnknownNameError, match="pond_frog"):
        _run("pond_frgo", "--include_path", str(folder))
    with pytest.raises(InvalidOptionError, match="--limit"):
        _run("--limit", "0", "--include_path", str(folder))
    with pytest.raises(InvalidOptionError, match="include_path"):
        _run("--include_path", str(folder / "none"))
