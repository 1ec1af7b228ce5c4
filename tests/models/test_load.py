"""`load_model`: directories, tokenizers, precision; and the one line for each thing that is no model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_eval.errors import ModelError, UnknownNameError
from mlx_eval.models import huggingface
from mlx_eval.models.load import check_source, load_model, wrap_tokenizer
from mlx_eval.models.outline import load_outline
from tests.tiny import bpe_tokenizer, oracle_logits, tiny_model, write_directory


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_directory(tmp_path / "model")
    return tmp_path / "model"


def test_a_directory_gives_the_model_that_was_written(directory: Path) -> None:
    found = load_model(directory)
    ids = [1, 5, 300, 7]
    assert (oracle_logits(found.model, ids) == oracle_logits(tiny_model(), ids)).all()
    assert found.source == str(directory)
    assert found.max_length == 64
    assert found.dtype == "float32"
    assert found.tokenizer.encode("Answer") == bpe_tokenizer().encode("Answer")


def test_a_relative_path_and_a_home_directory(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory.parent)
    assert load_model("model").num_parameters > 0
    monkeypatch.setenv("HOME", str(directory.parent))
    assert load_model("~/model").num_parameters > 0


@pytest.mark.parametrize("load", [load_model, load_outline])
def test_a_path_in_this_folder_that_does_not_exist_is_no_hub_id(
    load: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory)
    monkeypatch.setattr(huggingface, "_download", lambda *_: pytest.fail("asked the hub"))
    with pytest.raises(ModelError, match=r"\./owner/name does not exist"):
        load("./owner/name")


@pytest.mark.parametrize(
    ("config_ids", "generation_ids", "expected"),
    [(5, None, {1, 5}), ([5, 6], None, {1, 5, 6}), (5, [7, 8], {1, 7, 8}), (None, 9, {1, 9})],
)
def test_every_end_of_sequence_id_of_the_generation_config_counts(
    tmp_path: Path, config_ids: Any, generation_ids: Any, expected: set[int]
) -> None:
    """The tokenizer's own, 1, and those of generation_config.json, else of config.json."""
    write_directory(tmp_path, eos_token_id=config_ids)
    if generation_ids is not None:
        text = json.dumps({"eos_token_id": generation_ids})
        (tmp_path / "generation_config.json").write_text(text, encoding="utf-8")
    assert load_model(tmp_path).tokenizer.eos_token_ids == expected


def test_another_tokenizer(directory: Path, tmp_path: Path) -> None:
    other = bpe_tokenizer(adds_bos=True)
    assert load_model(directory, tokenizer=other).tokenizer.encode("the")[0] == other.bos_token_id
    write_directory(tmp_path / "other", tokenizer=other)
    assert (
        load_model(directory, tokenizer=tmp_path / "other").tokenizer.encode("the")[0] == other.bos_token_id
    )
    assert load_model(directory, tokenizer="bytes").tokenizer.encode("é") == [0xC3, 0xA9]


def test_precision(directory: Path) -> None:
    assert load_model(directory, dtype="bfloat16").dtype == "bfloat16"
    assert load_model(directory, dtype="auto").dtype == "float32"
    with pytest.raises(UnknownNameError, match="float8"):
        load_model(directory, dtype="float8")


def test_a_wrapper_is_not_wrapped_again() -> None:
    wrapped = wrap_tokenizer(bpe_tokenizer(), [4, 5])
    assert wrapped.eos_token_ids == {1, 4, 5}
    assert wrap_tokenizer(wrapped, 9) is wrapped


def broken_directory(path: Path, damage: str) -> Path:
    write_directory(path)
    if damage == "no weights":
        (path / "model.safetensors").rename(path / "pytorch_model.bin")
    elif damage == "cut weights":
        data = (path / "model.safetensors").read_bytes()
        (path / "model.safetensors").write_bytes(data[: len(data) // 2])
    elif damage == "no safetensors":
        (path / "model.safetensors").write_bytes(b"version https://git-lfs")
    elif damage == "missing tensor":
        arrays = mx.load(str(path / "model.safetensors"))
        assert isinstance(arrays, dict)
        del arrays["model.norm.weight"]
        mx.save_safetensors(str(path / "model.safetensors"), arrays)
    elif damage == "damaged config":
        (path / "config.json").write_text("{", encoding="utf-8")
    elif damage == "no config":
        (path / "config.json").unlink()
    elif damage == "empty config":
        (path / "config.json").write_text("{}", encoding="utf-8")
    elif damage == "unknown architecture":
        text = (path / "config.json").read_text().replace('"llama"', '"lama9"')
        (path / "config.json").write_text(text, encoding="utf-8")
    elif damage == "other shapes":
        text = (path / "config.json").read_text().replace('"hidden_size": 32', '"hidden_size": 48')
        (path / "config.json").write_text(text, encoding="utf-8")
    elif damage == "no tokenizer":
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            (path / name).unlink(missing_ok=True)
    elif damage == "damaged tokenizer":
        (path / "tokenizer.json").write_text("{", encoding="utf-8")
    return path


DAMAGES = {
    "no weights": "holds no model.*safetensors; it has pytorch_model.bin",
    "cut weights": "damaged|cannot be read",
    "no safetensors": "damaged or no safetensors",
    "missing tensor": "model.norm.weight|cannot be loaded",
    "damaged config": "config.json",
    "no config": "no config.json",
    "empty config": "model_type",
    "unknown architecture": "lama9",
    "other shapes": "cannot be loaded|fit|shape",
    "no tokenizer": "no usable tokenizer.*tokenizer='bytes'",
    "damaged tokenizer": "no usable tokenizer",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_no_model_is_said_in_one_line(tmp_path: Path, damage: str) -> None:
    path = broken_directory(tmp_path / "broken", damage)
    with pytest.raises(ModelError, match=DAMAGES[damage]) as error:
        load_model(path)
    assert "\n" not in str(error.value)
    assert "broken" in str(error.value) or damage in (
        "unknown architecture",
        "other shapes",
        "missing tensor",
    )


@pytest.mark.parametrize("source", ["./nowhere", "/nowhere/at/all", "a/b/c", "what is this?", "nowhere.gguf"])
def test_a_path_that_is_not_there(source: str) -> None:
    with pytest.raises(ModelError, match="does not exist") as error:
        load_model(source)
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello", encoding="utf-8")
    with pytest.raises(ModelError, match=r"neither a model directory nor a \.gguf file"):
        load_model(tmp_path / "notes.txt")


def test_check_source_refuses_without_reading(directory: Path, tmp_path: Path) -> None:
    check_source(str(directory))
    check_source("demo")
    check_source("owner/name")
    for source in ("./nowhere", "nowhere/at/all", str(tmp_path)):
        with pytest.raises(ModelError):
            check_source(source)


def test_a_hub_id_without_network_is_named() -> None:
    """The tests run offline: nothing is fetched."""
    with pytest.raises(
        ModelError, match=r"owner/no-such-model is no path here and could not be fetched"
    ) as error:
        load_model("owner/no-such-model")
    assert "\n" not in str(error.value)
