"""The byte tokenizer against Python's own UTF-8 codec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_eval.errors import InvalidOptionError
from mlx_eval.models.bytes import byte_alphabet, byte_tokenizer

TEXT = "  two spaces, caf\u00e9\r\n\t\u4e16\u754c \U0001f642\x00 end "
PLAIN_TEXT = st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: "<|" not in text)
# no deadline: the first call imports transformers, and the machine may be busy
relaxed = settings(deadline=None)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer(
        bos_token_id=256, eos_token_id=257, special_tokens={"<|turn|>": 259}, vocab_size=264
    )


@relaxed
@given(text=PLAIN_TEXT)
def test_ids_are_the_bytes(tokenizer: Any, text: str) -> None:
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


@relaxed
@given(data=st.binary())
def test_broken_sequences_are_replaced(tokenizer: Any, data: bytes) -> None:
    assert tokenizer.decode(list(data)) == data.decode("utf-8", errors="replace")


@relaxed
@given(before=PLAIN_TEXT, after=PLAIN_TEXT)
def test_special_tokens_stand_for_themselves(tokenizer: Any, before: str, after: str) -> None:
    ids = tokenizer.encode(f"{before}<|turn|>{after}")
    assert ids == [*before.encode(), 259, *after.encode()]
    assert tokenizer.decode(ids) == f"{before}<|turn|>{after}"
    assert tokenizer.decode(ids, skip_special_tokens=True) == before + after


def test_every_id_has_a_name(tokenizer: Any) -> None:
    assert len(tokenizer) == 264
    assert tokenizer.convert_ids_to_tokens(list(range(256))) == byte_alphabet()
    assert tokenizer.convert_ids_to_tokens([256, 257, 258, 259]) == [
        "<|bos|>",
        "<|eos|>",
        "<|reserved_258|>",
        "<|turn|>",
    ]
    assert tokenizer.decode([104, 258, 263, 105], skip_special_tokens=True) == "hi"


def test_the_alphabet_is_that_of_byte_level_tokenizers() -> None:
    from tokenizers import pre_tokenizers

    assert sorted(byte_alphabet()) == sorted(pre_tokenizers.ByteLevel.alphabet())


def test_without_special_tokens() -> None:
    tokenizer = byte_tokenizer()
    assert len(tokenizer) == 256
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (None, None, None)
    assert tokenizer.encode("<|bos|>") == list(b"<|bos|>")


def test_roles_may_share_an_id_and_take_a_given_name() -> None:
    tokenizer = byte_tokenizer(
        bos_token_id=256, eos_token_id=256, pad_token_id=257, special_tokens={"<end>": 256}
    )
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<end>", "<end>", "<|pad|>")
    assert len(tokenizer) == 258


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    from mlx_lm.tokenizer_utils import load
    from transformers import AutoTokenizer

    template = "{% for message in messages %}{{ message['content'] }}<|eos|>{% endfor %}"
    made = byte_tokenizer(
        bos_token_id=256, eos_token_id=257, pad_token_id=258, chat_template=template, max_length=99
    )
    made.save_pretrained(tmp_path)
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), load(tmp_path)):
        assert loaded.encode(TEXT) == list(TEXT.encode())
        assert loaded.decode(list(TEXT.encode())) == TEXT
        assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (256, 257, 258)
        assert loaded.model_max_length == 99
        chat = [{"role": "user", "content": "a b"}]
        assert loaded.apply_chat_template(chat, tokenize=False) == "a b<|eos|>"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eos_token_id": 0}, "eos_token_id is 0.*from 256 to 255"),
        ({"bos_token_id": 300, "vocab_size": 300}, "bos_token_id is 300.*256 to 299"),
        ({"vocab_size": 100}, "vocab_size is 100.*at least 256"),
        ({"special_tokens": {"<a>": 256, "<b>": 256}}, "'<a>' and '<b>' share the id 256"),
        ({"special_tokens": {"x": 256}}, "'x' is too short"),
        ({"bos_token_id": 256, "special_tokens": {"<|bos|>": 257}}, "two ids would be called '<|bos|>'"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message.replace("|", r"\|")):
        byte_tokenizer(**options)
