"""The sub-command `convert`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_eval import load_model
from mlx_eval.app import convert


@pytest.mark.parametrize("words", [["demo"], ["--model", "demo"]])
def test_a_directory_that_loads_as_the_same_model(command: Any, tmp_path: Path, words: list[str]) -> None:
    target = tmp_path / "new" / "model"
    status, out, err = command("convert", *words, target, "--dtype", "float32")
    assert (status, out, err) == (0, "", f"wrote {target}\n")
    assert json.loads((target / "config.json").read_text())["model_type"] == "llama"
    original = load_model("demo", dtype="float32")
    assert load_model(target, dtype="float32").fingerprint() == original.fingerprint()


def test_a_quantised_one(command: Any, tmp_path: Path) -> None:
    assert command("convert", "demo", tmp_path / "q", "--quantize", "4").status == 0
    loaded = load_model(tmp_path / "q", dequantize=False)
    assert loaded.quantization is not None
    assert loaded.quantization.startswith("4-bit")


def test_the_destination_is_checked_before_anything_is_loaded(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(convert, "load_model", load)
    (tmp_path / "file").touch()
    for place, part in [(tmp_path, "is not empty"), (tmp_path / "file", "is no directory")]:
        status, out, err = command("convert", "demo", place)
        assert (status, out, err.count("\n")) == (1, "", 1)
        assert part in err
    status, _, err = command("convert", "demo", tmp_path / "file" / "below")
    assert (status, err.count("\n")) == (1, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("words", [[], ["demo"], ["demo", "b", "--model", "c"]])
def test_source_and_destination_are_needed(command: Any, words: list[str]) -> None:
    status, out, err = command("convert", *words)
    assert (status, out) == (1, "")
    assert "convert takes a model and a folder" in err
