from __future__ import annotations

import errno
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_eval.errors import ModelError, OutputError
from mlx_eval.models import save
from mlx_eval.models.bytes import byte_tokenizer
from mlx_eval.models.layout import named_arrays
from mlx_eval.models.loaded import LoadedModel
from mlx_eval.models.precision import apply_precision
from mlx_eval.models.save import check_destination, save_directory

from .tiny_transformers import CONFIGS, mlx_logits, tiny, torch_logits

LOGIT_TOLERANCE = 1e-4
"""Float32 rounding of two implementations; anything written wrongly moves the logits by more than 0.01."""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
}


def llama(**changes: Any) -> LoadedModel:
    """A tiny random Llama with a byte tokenizer; no PyTorch needed."""
    from mlx_lm.models.llama import Model, ModelArgs
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    config = LLAMA | changes
    mx.random.seed(5)
    model = Model(ModelArgs.from_dict(config))
    model.eval()
    tokenizer = byte_tokenizer(bos_token_id=256, eos_token_id=257, vocab_size=300, chat_template=TEMPLATE)
    return LoadedModel(model, TokenizerWrapper(tokenizer, eos_token_ids=[258, 257]), config, "memory")


def quantized(loaded: LoadedModel) -> LoadedModel:
    config = apply_precision(loaded.model, loaded.config, dtype="float32", quantize=4)
    return LoadedModel(loaded.model, loaded.tokenizer, config, loaded.source)


def load_with_mlx_lm(path: Path) -> tuple[Any, Any]:
    from mlx_lm import load

    model, tokenizer = load(str(path))
    return model, tokenizer


# --- written and read again ------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(CONFIGS))
def test_round_trip_from_pytorch(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from transformers import AutoModelForCausalLM

    from mlx_eval.models.torch import convert_torch

    source = tiny(name)
    loaded = convert_torch(source, source.config, dtype="float32")
    save_directory(loaded, tmp_path / "out")
    again, _ = load_with_mlx_lm(tmp_path / "out")
    assert np.array_equal(mlx_logits(again), mlx_logits(loaded.model))
    peer, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    if name == "gemma":
        for layer in peer.model.layers:
            layer.mlp.act_fn = torch.nn.GELU()  # as in `tiny`
    expected = torch_logits(source)
    np.testing.assert_allclose(torch_logits(peer.eval()), expected, rtol=0, atol=LOGIT_TOLERANCE)
    assert peer.config.tie_word_embeddings == loaded.config["tie_word_embeddings"]


def test_written_twice_is_the_same(tmp_path: Path) -> None:
    """What is loaded from a written directory is written again bit by bit."""
    first = llama()
    save_directory(first, tmp_path / "first")
    model, tokenizer = load_with_mlx_lm(tmp_path / "first")
    config = json.loads((tmp_path / "first" / "config.json").read_text())
    save_directory(LoadedModel(model, tokenizer, config, "first"), tmp_path / "second")
    for name in ("model.safetensors", "config.json", "tokenizer.json", "model.safetensors.index.json"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_kept(dtype: str, tmp_path: Path) -> None:
    loaded = llama()
    config = apply_precision(loaded.model, loaded.config, dtype=dtype)
    loaded = LoadedModel(loaded.model, loaded.tokenizer, config, "memory")
    save_directory(loaded, tmp_path / "out")
    arrays = named_arrays(load_with_mlx_lm(tmp_path / "out")[0])
    assert all(mx.array_equal(array, arrays[name]) for name, array in named_arrays(loaded.model).items())
    assert {str(array.dtype) for array in arrays.values()} == {f"mlx.core.{dtype}"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == dtype


def test_quantised_for_mlx_lm(tmp_path: Path) -> None:
    loaded = quantized(llama())
    save_directory(loaded, tmp_path / "out")
    again, _ = load_with_mlx_lm(tmp_path / "out")
    assert np.array_equal(mlx_logits(again), mlx_logits(loaded.model))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization"] == config["quantization_config"]
    assert config["quantization"] == {"group_size": 64, "bits": 4, "mode": "affine"}


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "gemma3_text"])
def test_quantised_for_mlx_lm_where_names_differ(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from mlx_eval.models.torch import convert_torch

    loaded = quantized(convert_torch(source := tiny(name), source.config, dtype="float32"))
    save_directory(loaded, tmp_path / "out")
    again, _ = load_with_mlx_lm(tmp_path / "out")
    assert np.array_equal(mlx_logits(again), mlx_logits(loaded.model))


def test_tokenizer_template_and_special_ids(tmp_path: Path) -> None:
    loaded = llama()
    save_directory(loaded, tmp_path / "out")
    _, tokenizer = load_with_mlx_lm(tmp_path / "out")
    text = "Grüße,\n  wörld"
    assert tokenizer.encode(text) == loaded.tokenizer.encode(text) == list(text.encode())
    assert tokenizer.eos_token_ids == {257, 258}
    assert tokenizer.chat_template == TEMPLATE
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written == {"bos_token_id": 256, "eos_token_id": [257, 258]}


def test_given_generation_config(tmp_path: Path) -> None:
    given = {"eos_token_id": 258, "temperature": 0.6, "do_sample": True}
    save_directory(replace(llama(), generation_config=given), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == given


def test_configuration_file(tmp_path: Path) -> None:
    loaded = llama(auto_map={"AutoModel": "x.Y"}, rope_parameters={"rope_theta": 9.0, "rope_type": "default"})
    save_directory(loaded, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rope_theta"] == 9.0
    assert "auto_map" not in config
    assert "auto_map" in loaded.config  # the caller's own is not touched


# --- files -----------------------------------------------------------------------------------------


def test_shards_and_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = llama()
    limit = 60_000  # below the embedding's 76,800 bytes: that one is alone in its file
    monkeypatch.setattr(save, "SHARD_BYTES", limit)
    save_directory(loaded, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert {path.name for path in files} == set(index["weight_map"].values())
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    arrays = named_arrays(loaded.model)
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in arrays.values())
    assert index["weight_map"].keys() == arrays.keys()
    for path in files:
        held = mx.load(str(path))
        assert [index["weight_map"][name] for name in held] == [path.name] * len(held)
        assert len(held) == 1 or sum(array.nbytes for array in held.values()) <= limit
    again, _ = load_with_mlx_lm(tmp_path / "out")
    assert np.array_equal(mlx_logits(again), mlx_logits(loaded.model))


@pytest.mark.parametrize(("quantise", "expected"), [(False, "pt"), (True, "mlx")])
def test_format_in_the_metadata(quantise: bool, expected: str, tmp_path: Path) -> None:
    """transformers reads a file by this entry; `pt` is what its own files have."""
    loaded = quantized(llama()) if quantise else llama()
    save_directory(loaded, tmp_path / "out")
    _, metadata = mx.load(str(tmp_path / "out" / "model.safetensors"), return_metadata=True)
    assert metadata["format"] == expected


def test_files_have_usual_permissions(tmp_path: Path) -> None:
    reference = tmp_path / "reference"
    reference.mkdir()
    save_directory(llama(), tmp_path / "out")
    assert (tmp_path / "out").stat().st_mode == reference.stat().st_mode


def test_empty_directory_and_missing_parents(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "a" / "b" / "c"):
        save_directory(llama(), path)
        assert (path / "model.safetensors").is_file()
        assert sorted(item.name for item in path.parent.iterdir() if item.name.endswith(".partial")) == []


def test_relative_destination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_directory(llama(), Path("out"))
    assert (tmp_path / "out" / "config.json").is_file()


# --- what is refused, and what is left behind ------------------------------------------------------


def test_destination_that_holds_something(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path, message in ((tmp_path, "not empty"), (tmp_path / "file", "is no directory")):
        with pytest.raises(OutputError, match=message):
            save_directory(llama(), path)
    with pytest.raises(OutputError, match="cannot be written"):
        save_directory(llama(), tmp_path / "file" / "below")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


def test_destination_without_permission(tmp_path: Path) -> None:
    refusing = tmp_path
    if os.geteuid() == 0:  # permissions do not stop root; these places do
        refusing = Path("/proc" if sys.platform == "linux" else "/System")
    else:
        tmp_path.chmod(0o500)
        with pytest.raises(OutputError, match="no writable directory"):
            check_destination(tmp_path / "mlx_eval_out")
    with pytest.raises(OutputError, match="mlx_eval_out cannot be written"):
        save_directory(llama(), refusing / "mlx_eval_out")
    assert not (refusing / "mlx_eval_out").exists()


def fail_with(error: BaseException) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("where", "error", "expected"),
    [
        ("_write_config", NO_SPACE, OutputError("out cannot be written: No space left on device")),
        ("_write_config", KeyboardInterrupt("stopped"), KeyboardInterrupt("stopped")),
        ("_generation_config", ZeroDivisionError("a fault"), ZeroDivisionError("a fault")),
    ],
)
def test_nothing_is_left_behind(
    where: str, error: BaseException, expected: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, where, fail_with(error))
    with pytest.raises(type(expected), match=str(expected)):
        save_directory(llama(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_failing_tokenizer_leaves_nothing_behind(tmp_path: Path) -> None:
    loaded = llama()
    # tokenizers' Rust code raises a bare Exception when the disk is full
    loaded.tokenizer._tokenizer.save_pretrained = fail_with(
        Exception("No space left on device (os error 28)")
    )
    with pytest.raises(OutputError, match=r"tokenizer.* No space left on device"):
        save_directory(loaded, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_room_is_asked_for_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 10**6})
    monkeypatch.setattr(save.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OutputError, match=r"has 1 MB left and 67 MB are needed"):
        save_directory(llama(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_the_system_refuses(tmp_path: Path) -> None:
    """A limit on the size of a file fails in MLX as a full disk does."""
    import subprocess

    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r}); "
        "from tests.models.test_save import Path, llama, save_directory; loaded = llama(); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY)); "
        f"save_directory(loaded, Path({str(tmp_path / 'out')!r}))"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert "mlx_eval.errors.OutputError: model.safetensors cannot be written" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_weights_that_were_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save.mx, "save_safetensors", lambda path, *_, **__: Path(path).write_bytes(b"short"))
    with pytest.raises(OutputError, match=r"model\.safetensors was cut off at 5 bytes"):
        save_directory(llama(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_model_types_that_nobody_has_checked_are_written_for_mlx_lm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = llama()
    other = LoadedModel(loaded.model, loaded.tokenizer, {**LLAMA, "model_type": "exaone"}, "memory")
    save_directory(other, tmp_path / "out")
    assert "how transformers writes a exaone is not known" in caplog.text
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_for_mlx_lm_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded = llama(rope_traditional=True)
    save_directory(loaded, tmp_path / "out")
    assert "for mlx-lm, not for transformers" in caplog.text
    again, _ = load_with_mlx_lm(tmp_path / "out")
    assert np.array_equal(mlx_logits(again), mlx_logits(loaded.model))


def test_custom_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"its own Python module \(model\.py\)"):
        save_directory(llama(model_file="model.py"), tmp_path / "out")


def test_what_json_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be written as JSON"):
        save_directory(llama(odd=object()), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
