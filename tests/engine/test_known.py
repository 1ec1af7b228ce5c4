"""What a self-test found is found again, and never for another model or program."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_eval import config
from mlx_eval.cache import write_cached
from mlx_eval.engine import known
from mlx_eval.models.head import RowHead
from mlx_eval.models.loaded import LoadedModel
from tests.tiny import bpe_tokenizer, loaded, tiny_model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_EVAL_CACHE", str(tmp_path))


@pytest.fixture
def tests_run(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows with every self-test."""
    seen: list[Any] = []
    original = known.find_sharing

    def counted(model: Any, head: RowHead) -> Any:
        seen.append(model)
        return original(model, head)

    monkeypatch.setattr(known, "find_sharing", counted)
    return seen


def some_model(seed: int = 0) -> tuple[LoadedModel, RowHead]:
    model = loaded(tiny_model(seed=seed), bpe_tokenizer())
    return model, RowHead(model.model, config.LOGITS_BYTES)


def test_equal_weights_are_tested_once(tests_run: list[Any]) -> None:
    first, second, third = (known.sharing_of(*some_model(seed)) for seed in (0, 0, 1))
    assert first == second == third
    assert len(tests_run) == 2


def test_another_version_tests_again(tests_run: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    known.sharing_of(*some_model())
    original = known.version
    monkeypatch.setattr(known, "version", lambda name: original(name) + ("x" if name == "mlx-lm" else ""))
    known.sharing_of(*some_model())
    assert len(tests_run) == 2


def test_equal_weights_with_another_configuration_are_tested_again(tests_run: list[Any]) -> None:
    """A window leaves no trace in the weights, but decides which caches mlx-lm makes."""
    model, head = some_model()
    known.sharing_of(model, head)
    windowed = replace(model, config={**model.config, "sliding_window": 8})
    assert windowed.fingerprint() == model.fingerprint()
    known.sharing_of(windowed, head)
    assert len(tests_run) == 2


def test_a_document_of_another_shape_is_as_good_as_none(tests_run: list[Any]) -> None:
    model, head = some_model()
    identity = known.model_identity(model, model.fingerprint())
    for document in ([], {}, {"way": {"level": "NONE"}}, {"way": 3}):
        write_cached(known._name(identity), known._key(identity), document)
        assert known.known_sharing(identity) is None
    known.sharing_of(model, head)
    assert len(tests_run) == 1


def test_sources_are_known_by_files_and_loading(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    file = folder / "model.safetensors"
    config = folder / "config.json"
    for changed in (file, config):
        changed.write_bytes(b"1")
        known.remember_source(str(folder), {"dtype": "float32"}, "abc")
        assert known.identity_of_source(str(folder), {"dtype": "float32"}) == "abc"
        assert known.identity_of_source(str(folder), {"dtype": "bfloat16"}) is None
        changed.write_bytes(b"12")
        assert known.identity_of_source(str(folder), {"dtype": "float32"}) is None
    (folder / "model-2.safetensors").symlink_to(tmp_path / "gone")
    known.remember_source(str(folder), {"dtype": "float32"}, "abc")
    assert known.identity_of_source(str(folder), {"dtype": "float32"}) is None
    known.remember_source("owner/name", {}, "abc")
    assert known.identity_of_source("owner/name", {}) is None
