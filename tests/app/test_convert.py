from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mlx_eval.app.convert import convert
from mlx_eval.errors import ModelError, OutputError
from mlx_eval.models.load import load_model
from tests.tiny import oracle_logits, write_directory

IDS = [1, 5, 300, 7]


@pytest.fixture
def source(tmp_path: Path) -> str:
    write_directory(tmp_path / "source", eos_token_id=[1, 2])
    return str(tmp_path / "source")


def test_a_directory_becomes_one_that_gives_the_same(source: str, tmp_path: Path) -> None:
    target = convert(source, str(tmp_path / "copy"), {})
    assert target == tmp_path / "copy"
    first, second = load_model(source), load_model(target)
    assert second.fingerprint() == first.fingerprint()
    np.testing.assert_array_equal(oracle_logits(second.model, IDS), oracle_logits(first.model, IDS))
    assert second.tokenizer.encode("Answer é") == first.tokenizer.encode("Answer é")
    assert second.tokenizer.eos_token_ids == first.tokenizer.eos_token_ids == {1, 2}


def test_loading_options_are_obeyed(source: str, tmp_path: Path) -> None:
    target = convert(source, str(tmp_path / "small"), {"dtype": "bfloat16"})
    assert load_model(target, dtype="auto").dtype == "bfloat16"


def test_a_destination_that_is_not_empty_is_refused_before_the_model_is_loaded(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_eval.app.convert.load_model", pytest.fail)
    with pytest.raises(OutputError) as error:
        convert(source, source, {})
    assert "\n" not in str(error.value)


def test_a_source_that_is_no_model_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        convert("./nowhere", str(tmp_path / "new"), {})
    assert not (tmp_path / "new").exists()
