from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from mlx_eval.app.perplexity import Perplexity, read_text, text_perplexity
from mlx_eval.errors import InputError
from mlx_eval.harness.lm import MLXEvalLM
from tests.tiny import TOLERANCE, bpe_tokenizer, loaded, oracle_score, tiny_model


def test_the_units() -> None:
    found = Perplexity(num_tokens=4, num_bytes=10, nats=8.0)
    assert found.perplexity == pytest.approx(math.exp(2))
    assert found.bits_per_token == pytest.approx(2 / math.log(2))
    assert found.bits_per_byte == pytest.approx(0.8 / math.log(2))
    assert set(found.as_dict()) == {
        "num_tokens",
        "num_bytes",
        "nats",
        "perplexity",
        "bits_per_token",
        "bits_per_byte",
    }


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_text_is_scored_as_the_oracle_scores_it(adds_bos: bool) -> None:
    model = tiny_model()
    lm: Any = MLXEvalLM(loaded(model, bpe_tokenizer(adds_bos=adds_bos)))
    text = "Question: what is the answer? é😀"
    found = text_perplexity(lm, text)
    ids = bpe_tokenizer().encode(text)
    expected, _, _ = oracle_score(model, [bpe_tokenizer().bos_token_id], ids)
    assert found.nats == pytest.approx(-expected, abs=TOLERANCE)
    assert (found.num_tokens, found.num_bytes) == (len(ids), len(text.encode()))


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(" é😀\n", encoding="utf-8")
    assert read_text(tmp_path / "text") == " é😀\n"


def test_line_ends_of_windows_are_kept(tmp_path: Path) -> None:
    """bits per byte counts the file's bytes."""
    (tmp_path / "text").write_bytes(b"a\r\nb\rc")
    assert read_text(tmp_path / "text").encode() == b"a\r\nb\rc"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"a\xffb", "not text in UTF-8: byte 1 is 0xff"),
        (b"a\0b", "NUL"),
        (None, "cannot read"),
    ],
)
def test_what_is_no_text_is_named(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message) as error:
        read_text(path)
    assert "\n" not in str(error.value)


def test_a_folder_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        read_text(tmp_path)


def test_a_text_without_tokens() -> None:
    lm: Any = MLXEvalLM(loaded(tiny_model(), bpe_tokenizer()))
    with pytest.raises(InputError, match="no tokens"):
        text_perplexity(lm, "")
