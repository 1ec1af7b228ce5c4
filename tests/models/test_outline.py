"""A model without its weights has the shapes of the model."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_eval.errors import ModelError
from mlx_eval.models.load import load_model
from mlx_eval.models.outline import load_outline
from tests.tiny import write_directory


def test_shapes_types_and_tokenizer_are_those_of_the_model(tmp_path: Path) -> None:
    write_directory(tmp_path)
    whole, outline = load_model(tmp_path), load_outline(tmp_path)
    assert outline.num_parameters == whole.num_parameters
    assert outline.num_bytes == whole.num_bytes
    assert outline.dtype == whole.dtype
    assert outline.max_length == whole.max_length
    assert outline.tokenizer.encode("the quick") == whole.tokenizer.encode("the quick")
    assert outline.tokenizer.eos_token_ids == whole.tokenizer.eos_token_ids


def test_weights_need_not_be_there(tmp_path: Path) -> None:
    write_directory(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert load_outline(tmp_path).num_parameters > 0
    with pytest.raises(ModelError, match=r"no model\*\.safetensors"):
        load_model(tmp_path)


def test_nothing_is_computed(tmp_path: Path) -> None:
    write_directory(tmp_path)
    config = (tmp_path / "config.json").read_text(encoding="utf-8")
    large = config.replace('"num_hidden_layers": 2', '"num_hidden_layers": 200')
    assert large != config
    (tmp_path / "config.json").write_text(large, encoding="utf-8")
    before = mx.get_active_memory()
    outline = load_outline(tmp_path)
    assert outline.num_bytes > 2**22
    assert mx.get_active_memory() - before < 2**20


def test_the_asked_type_is_that_of_the_outline(tmp_path: Path) -> None:
    write_directory(tmp_path)
    assert load_outline(tmp_path, dtype="bfloat16").dtype == "bfloat16"
    assert load_outline("demo", dtype="auto").dtype == load_model("demo", dtype="auto").dtype


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        load_outline(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"nowhere\.gguf"):
        load_outline(tmp_path / "nowhere.gguf")
