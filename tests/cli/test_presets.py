"""The sub-command `presets`, without the program around it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from mlx_eval.cli import presets
from mlx_eval.errors import InputError
from mlx_eval.harness.presets import PRESETS


def _run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    presets.add_parser(parser.add_subparsers())
    args = parser.parse_args(["presets", *arguments])
    result: int = args.func(args)
    return result


def test_the_table_has_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run() == 0
    lines = capsys.readouterr().out.splitlines()
    cells = {line.split("|")[1].strip(): line for line in lines[2:] if line.startswith("|")}
    assert set(cells) == set(PRESETS)
    assert "| 25 " in cells["arc_challenge"]
    assert "apply_chat_template=True" in cells["demo"]


def test_json_has_lm_evals_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--json") == 0
    records = {record["name"]: record for record in json.loads(capsys.readouterr().out)}
    assert set(records) == set(PRESETS)
    assert records["hellaswag"]["num_fewshot"] == 10
    assert records["hellaswag"]["tasks"] == ["hellaswag"]
    assert "limit" not in records["hellaswag"]


def test_a_file_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.toml"
    path.write_text("[presets.mmlu]\ntask = 'mmlu_anatomy'\n[presets.own]\ntask = 'piqa'\nlimit = 7\n")
    assert _run("--preset_file", str(path), "--json") == 0
    records = {record["name"]: record for record in json.loads(capsys.readouterr().out)}
    assert records["own"]["limit"] == 7
    assert records["mmlu"]["tasks"] == ["mmlu_anatomy"]
    assert set(records) == {*PRESETS, "own"}


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        _run("--preset_file", str(tmp_path / "missing.toml"))
