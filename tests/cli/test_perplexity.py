"""The sub-command `perplexity`, against one forward pass in float64."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_eval.models.load
from mlx_eval import load_model

pytest.importorskip("lm_eval")

TEXT = "Ben hid the key in the attic.\nCafé 世界 🙂\n"


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def expected_nats() -> float:
    """Each byte predicted from all before it and the BOS: one forward, log-softmax in float64."""
    loaded = load_model("demo", dtype="float32")
    ids = [loaded.tokenizer.bos_token_id, *TEXT.encode()]
    logits = np.array(loaded.model(mx.array([ids[:-1]]))[0].astype(mx.float32)).astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return -float(logprobs[np.arange(len(ids) - 1), ids[1:]].sum())


def test_figures(command: Any, text_file: Path) -> None:
    status, out, err = command("perplexity", "demo", "--text", text_file, "--dtype", "float32", "--json")
    assert status == 0, err
    figures = json.loads(out)
    size = len(TEXT.encode())
    nats = expected_nats()
    assert (figures["num_tokens"], figures["num_bytes"]) == (size, size)  # a byte-level model
    # float32 rounding of some 50 additions; the numbers are about 200
    assert figures["nats"] == pytest.approx(nats, abs=1e-2)
    assert figures["perplexity"] == pytest.approx(math.exp(figures["nats"] / size))
    assert figures["bits_per_byte"] == pytest.approx(figures["nats"] / size / math.log(2))
    assert figures["bits_per_token"] == figures["bits_per_byte"]


def test_the_printed_form_has_the_same_figures(command: Any, text_file: Path) -> None:
    words = ["perplexity", "--model", "demo", "--text", text_file]
    figures = json.loads(command(*words, "--json").out)
    status, out, _ = command(*words)
    printed = dict(line.rsplit("  ", 1) for line in out.splitlines())
    printed = {name.strip(): value.strip() for name, value in printed.items()}
    assert status == 0
    assert printed == {
        "tokens": f"{figures['num_tokens']:,}",
        "bytes": f"{figures['num_bytes']:,}",
        "nats": f"{figures['nats']:,.3f}",
        "perplexity": f"{figures['perplexity']:,.4f}",
        "bits per byte": f"{figures['bits_per_byte']:.4f}",
        "bits per token": f"{figures['bits_per_token']:.4f}",
    }


def test_a_smaller_window_sees_less(command: Any, text_file: Path) -> None:
    words = ["perplexity", "demo", "--text", text_file, "--json"]
    whole = json.loads(command(*words).out)
    short = json.loads(command(*words, "--max-length", "4").out)
    assert short["num_tokens"] == whole["num_tokens"]
    assert short["nats"] > whole["nats"]


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "is empty"),
        (b"\xff\xfe\x00", "is not text in UTF-8: byte 0 is 0xff"),
        (b"a\0b", "NUL characters"),
    ],
)
def test_what_is_no_text_is_found_before_the_model_is_loaded(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, part: str
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(mlx_eval.models.load, "load_model", load)
    path = tmp_path / "text"
    path.write_bytes(content)
    status, out, err = command("perplexity", "demo", "--text", path)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert part in err


def test_wrong_usage(command: Any, tmp_path: Path) -> None:
    for words, status, part in [
        (["demo"], 2, "required: --text"),
        (["--text", "x"], 1, "no model is given"),
        (["demo", "--text", str(tmp_path)], 1, "cannot read"),
        (["demo", "--text", str(tmp_path / "none")], 1, "No such file"),
        (["demo", "--text", "x", "--max_length", "one"], 2, "--max_length: one is not"),
    ]:
        finished = command("perplexity", *words)
        assert (finished.status, finished.out, finished.err.count("\n")) == (status, "", 1)
        assert part in finished.err
