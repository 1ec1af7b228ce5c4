from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_eval.errors import ModelError
from mlx_eval.models import huggingface
from mlx_eval.models.load import load_model
from tests.models.tiny_transformers import TOKENS, tiny, torch_logits
from tests.tiny import bpe_tokenizer, write_directory


@pytest.mark.parametrize(
    "name", ["llama", "llama-tied", "llama-scaled", "mistral", "qwen2", "qwen3", "gemma2", "gpt2"]
)
def test_a_directory_that_transformers_wrote_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from mlx_lm.models.cache import make_prompt_cache

    theirs = tiny(name)
    theirs.save_pretrained(str(tmp_path))
    bpe_tokenizer().save_pretrained(str(tmp_path))
    import mlx.core as mx

    model = load_model(tmp_path, dtype="float32").model
    found = np.array(model(mx.array(TOKENS), cache=make_prompt_cache(model)))
    # logits of some units, three layers of float32
    np.testing.assert_allclose(found, torch_logits(theirs), atol=2e-4, rtol=0)


def test_which_sources_are_directories(tmp_path: Path) -> None:
    write_directory(tmp_path / "model")
    assert huggingface.local_directory(str(tmp_path / "model")) == tmp_path / "model"
    assert huggingface.local_directory("owner/name.v1-2") is None
    assert huggingface.local_directory("gpt2") is None
    for source in ("/no/where", "./x", "~/nowhere-at-all", "a b/c", "a/b/c"):
        with pytest.raises(ModelError, match="does not exist"):
            huggingface.local_directory(source)


@pytest.mark.parametrize(
    ("text", "found"),
    [('{"eos_token_id": [1, 2]}', {"eos_token_id": [1, 2]}), ("{", {}), ("[1]", {}), (None, {})],
)
def test_the_generation_config_is_read_when_it_can_be(
    tmp_path: Path, text: str | None, found: dict[str, Any]
) -> None:
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text, encoding="utf-8")
    assert huggingface.read_generation_config(tmp_path) == found


def hub_errors() -> list[Exception]:
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    return [
        HFValidationError("Repo id must be in the form 'namespace/name'"),
        LocalEntryNotFoundError("cannot find the files\nin the cache"),
        OfflineModeIsEnabled("offline mode is enabled"),
        OSError("connection reset"),
        ConnectionError(""),
    ]


@pytest.mark.parametrize("place", range(5))
def test_what_the_hub_refuses_is_said_in_one_line(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise hub_errors()[place]

    monkeypatch.setattr("mlx_lm.utils._download", refuse)
    with pytest.raises(ModelError, match="owner/name is n") as error:
        huggingface.find_directory("owner/name", None)
    assert "\n" not in str(error.value)


def test_the_revision_reaches_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []

    def download(hub_id: str, revision: str | None = None, allow_patterns: list[str] | None = None) -> Path:
        seen.append((hub_id, revision, allow_patterns))
        return tmp_path

    monkeypatch.setattr("mlx_lm.utils._download", download)
    assert huggingface.find_directory("owner/name", "v2") == tmp_path
    assert huggingface.find_description("owner/name", "v2") == tmp_path
    assert seen == [("owner/name", "v2", None), ("owner/name", "v2", huggingface.DESCRIPTION)]
    assert not any("safetensors" in pattern for pattern in huggingface.DESCRIPTION)


def test_python_files_of_a_directory_run_only_when_trusted(tmp_path: Path) -> None:
    """A model file of its own named in config.json is refused without trust_remote_code."""
    write_directory(tmp_path, model_file="own.py")
    (tmp_path / "own.py").write_text("from mlx_lm.models.llama import Model, ModelArgs\n", encoding="utf-8")
    with pytest.raises(ModelError, match="trust_remote_code"):
        load_model(tmp_path)
    assert load_model(tmp_path, trust_remote_code=True).num_parameters > 0


def test_a_head_in_the_weights_unties_a_configuration_that_does_not_say(tmp_path: Path) -> None:
    """transformers' default for llama is untied, mlx-lm's is tied."""
    write_directory(tmp_path)
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text())
    del settings["tie_word_embeddings"]
    path.write_text(json.dumps(settings), encoding="utf-8")
    model = load_model(tmp_path).model
    assert not np.array_equal(np.array(model.lm_head.weight), np.array(model.model.embed_tokens.weight))
