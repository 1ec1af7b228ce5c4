"""Tokenizers from GGUF metadata against the libraries that the models' own tokenizers are made with."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_eval.errors import ModelError
from mlx_eval.models.gguf_file import read_file
from mlx_eval.models.gguf_pieces import merges_of_pieces
from mlx_eval.models.gguf_tokenizer import SPLITTINGS, end_ids, read_tokenizer, read_vocabulary

from .gguf_files import write_file

CORPUS = [
    "The quick brown fox jumps over the lazy dog; it's the dog's 1st jump of 2024, isn't it?",
    "Ein Mädchen läuft über die Straße. Il pleut à Besançon. Привет, мир! 你好世界。",
    "def add(a, b):\n    return a + b  # sums 100 + 2000 + 30000\n\n\nprint(add(1, 22))\n",
    "HelloWorld camelCase SHOUTING path/to/file http://example.org/?q=1&r=22 a...b --- !!!\t\tend  \n",
    "we'll they've I'M You'Re he'd let's  spaces   and    more     \r\n windows",
] * 3
TRICKY = [
    "",
    " ",
    "   ",
    "\n\n \n",
    "a  b",
    "12345 1 22 333",
    "I'M we'LL",
    "e\u0301 \u00e9 \u212b",  # decomposed, composed, and a letter that composing changes
    "x²³½",
    "<eos>text<eos>",
    "a<sep>b <sep>",
    "🏳️\u200d🌈 ok",
]
SPECIAL = ["<unk>", "<bos>", "<eos>"]
Backend = Any


def train(pre_tokenizer: Any, *, ignore_merges: bool = False) -> Backend:
    """A byte-level BPE tokenizer as the tokenizers library makes it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<sep>", special=False, normalized=False)])
    return tokenizer


def keys_of(backend: Backend, pre: str) -> dict[str, Any]:
    """The tokenizer as GGUF keys."""
    import json

    model = json.loads(backend.to_str())["model"]
    vocab = backend.get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    types = {"<unk>": 2, "<bos>": 3, "<eos>": 3, "<sep>": 4}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [types.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


def load(tmp_path: Path, keys: dict[str, Any]) -> Any:
    """The tokenizer that these keys give."""
    path = write_file(tmp_path / "tokenizer.gguf", "llama", keys, {"t": np.ones(1, np.float32)})
    return read_tokenizer(read_file(path), 128)


def gpt2() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def single_digits() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2()])


def llama3() -> Any:
    import inspect

    from tokenizers import Regex, pre_tokenizers
    from transformers.convert_slow_tokenizer import TikTokenConverter

    pattern = inspect.signature(TikTokenConverter).parameters["pattern"].default  # Llama 3's
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])


def qwen2() -> Any:
    from tokenizers import Regex, pre_tokenizers
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])


OWN: dict[str, Callable[[], Any]] = {
    "gpt-2": gpt2,
    "smollm": single_digits,
    "starcoder": single_digits,
    "refact": single_digits,
    "llama-bpe": llama3,
    "llama3": llama3,
    "llama-v3": llama3,
    "qwen2": qwen2,
}
"""How the models' own tokenizers split, in the tokenizers library's and in transformers' words."""


@pytest.mark.parametrize("pre", OWN)
def test_byte_level_ids_are_those_of_the_original(pre: str, tmp_path: Path) -> None:
    from tokenizers import normalizers

    original = train(OWN[pre](), ignore_merges=pre.startswith("llama"))
    if pre == "qwen2":
        original.normalizer = normalizers.NFC()
    tokenizer = load(tmp_path, keys_of(original, pre))

    @settings(max_examples=150, deadline=None, database=None)
    @given(
        st.text(
            alphabet=st.sampled_from("aAbÄé\u0301中Д 0123456789²\n\r\t'.,!s/ tT<eos>_\u00a0"), max_size=30
        )
    )
    def check(text: str) -> None:
        assert tokenizer(text)["input_ids"] == original.encode(text).ids

    check()
    for text in [*TRICKY, *CORPUS[:5]]:
        ids = tokenizer(text)["input_ids"]
        assert ids == original.encode(text).ids, text
        if pre != "qwen2":  # composing is not undone
            assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("pre", "is_one"),
    [("llama-bpe", True), ("llama3", True), ("llama-v3", True), ("tekken", True), ("qwen2", False)],
)
def test_a_word_without_merges_is_one_token_where_the_original_says_so(
    pre: str, is_one: bool, tmp_path: Path
) -> None:
    keys = keys_of(train(gpt2()), pre)
    word = len(keys["tokenizer.ggml.tokens"])
    keys["tokenizer.ggml.tokens"].append("Ġzebra")
    keys["tokenizer.ggml.token_type"].append(1)
    ids = load(tmp_path, keys)("a zebra", add_special_tokens=False)["input_ids"]
    assert (word in ids) is is_one


WORDS = {
    # llama.cpp's four steps: punctuation, GPT-2's words, runs of digits, three digits at a time
    "default": ("It's $5, 12345 x", ["It", "'", "s", " ", "$", "5", ",", " ", "123", "45", " x"]),
    # capitals begin a word, digits stand alone, a slash after a line's end still belongs to the punctuation
    "tekken": (
        "camelCase HTTPServer 42 a/b !\n/x\n y",
        ["camel", "Case", " HTTPServer", " ", "4", "2", " a", "/b", " !\n/", "x", "\n", " y"],
    ),
}


@pytest.mark.parametrize("pre", WORDS)
def test_text_is_cut_into_these_words(pre: str, tmp_path: Path) -> None:
    tokenizer = load(tmp_path, keys_of(train(gpt2()), pre))
    text, words = WORDS[pre]
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in pieces] == words


def test_every_splitting_is_tested() -> None:
    assert {*OWN, *WORDS} == set(SPLITTINGS)


def test_an_unknown_splitting_is_refused_with_those_known(tmp_path: Path) -> None:
    keys = keys_of(train(gpt2()), "bloom")
    with pytest.raises(
        ModelError, match=r"'bloom' \(tokenizer\.ggml\.pre\).*known: default, gpt-2, llama-bpe"
    ):
        load(tmp_path, keys)


def test_an_unknown_kind_is_refused_with_those_known(tmp_path: Path) -> None:
    keys = keys_of(train(gpt2()), "gpt-2") | {"tokenizer.ggml.model": "rwkv"}
    with pytest.raises(ModelError, match=r"kind 'rwkv'.*known: gpt2, llama"):
        load(tmp_path, keys)


@pytest.mark.parametrize(
    ("pre", "said", "first"),
    [("gpt-2", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", True, True)],
)
def test_bos_is_added_once_where_the_model_wants_it(
    pre: str, said: bool | None, first: bool, tmp_path: Path
) -> None:
    keys = keys_of(train(gpt2()), pre)
    del keys["tokenizer.ggml.add_bos_token"]
    if said is not None:
        keys["tokenizer.ggml.add_bos_token"] = said
    tokenizer = load(tmp_path, keys)
    ids = tokenizer("the dog")["input_ids"]
    assert (ids[0] == 1) is first
    assert ids.count(1) == first
    assert 1 not in tokenizer("the dog", add_special_tokens=False)["input_ids"]
    assert tokenizer("")["input_ids"] == [1] * first
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the dog"


def test_eos_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    keys = keys_of(train(gpt2()), "gpt-2") | {
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }
    tokenizer = load(tmp_path, keys)
    ids = tokenizer("the dog")["input_ids"]
    assert (ids[0], ids[-1], ids.count(1), ids.count(2)) == (1, 2, 1, 1)


def test_a_bos_that_is_wanted_and_not_there_is_named(tmp_path: Path) -> None:
    keys = keys_of(train(gpt2()), "gpt-2") | {"tokenizer.ggml.add_bos_token": True}
    del keys["tokenizer.ggml.bos_token_id"]
    with pytest.raises(ModelError, match=r"no key tokenizer\.ggml\.bos_token_id"):
        load(tmp_path, keys)


def test_a_space_goes_first_where_the_file_says_so(tmp_path: Path) -> None:
    from tokenizers import pre_tokenizers

    original = train(gpt2())
    tokenizer = load(tmp_path, keys_of(original, "gpt-2") | {"tokenizer.ggml.add_space_prefix": True})
    original.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    for text in ("the dog", " the dog", "\nthe dog", "", "x", "  x"):
        assert tokenizer(text)["input_ids"] == original.encode(text).ids, repr(text)
    with pytest.raises(ModelError, match="add_space_prefix holds True, expected false"):
        load(tmp_path, keys_of(original, "llama-bpe") | {"tokenizer.ggml.add_space_prefix": True})


def test_special_tokens_have_their_roles(tmp_path: Path) -> None:
    keys = keys_of(train(gpt2()), "gpt-2") | {
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}<eos>",
    }
    tokenizer = load(tmp_path, keys)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token, tokenizer.pad_token) == (
        "<bos>", "<eos>", "<unk>", "<eos>",
    )  # fmt: skip
    assert tokenizer.model_max_length == 128
    ids = tokenizer("a<eos><sep>b")["input_ids"]
    assert 2 in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<sep>b"  # user-defined is no special token
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "hi<eos>"


def test_a_saved_tokenizer_is_the_same(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    keys = keys_of(train(gpt2()), "smollm") | {"tokenizer.ggml.add_bos_token": True}
    tokenizer = load(tmp_path, keys)
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in [*TRICKY, *CORPUS[:5]]:
        assert again(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_damaged_vocabularies_are_refused(tmp_path: Path) -> None:
    keys = keys_of(train(gpt2()), "gpt-2")
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    with pytest.raises(ModelError, match=r"tokens, but \d+ token types"):
        load(tmp_path, keys | {"tokenizer.ggml.token_type": types[:-1]})
    with pytest.raises(ModelError, match="'<unk>' stands in its vocabulary twice"):
        load(tmp_path, keys | {"tokenizer.ggml.tokens": [*tokens[:-1], "<unk>"]})
    with pytest.raises(ModelError, match="merge of 'Ġzz' and 'zz' is not in its vocabulary"):
        load(tmp_path, keys | {"tokenizer.ggml.merges": ["Ġzz zz"]})
    with pytest.raises(ModelError, match=r"eos_token_id holds 9999, expected a token id below \d+"):
        load(tmp_path, keys | {"tokenizer.ggml.eos_token_id": 9999})


def test_turn_ends_that_the_template_writes_end_a_text(tmp_path: Path) -> None:
    keys = keys_of(train(gpt2()), "gpt-2")
    tokens = [*keys["tokenizer.ggml.tokens"], "<end_of_turn>", "<|im_end|>"]
    types = [*keys["tokenizer.ggml.token_type"], 3, 3]
    keys |= {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}<end_of_turn>",
    }
    path = write_file(tmp_path / "t.gguf", "llama", keys, {"t": np.ones(1, np.float32)})
    file = read_file(path)
    assert end_ids(file, read_vocabulary(file)) == [2, len(tokens) - 2]


# SentencePiece


def sentencepiece_model(**options: Any) -> Any:
    """A SentencePiece BPE model trained on the corpus."""
    spm = pytest.importorskip("sentencepiece")
    written = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in CORPUS for line in text.splitlines() if line]),
        model_writer=written,
        model_type="bpe",
        vocab_size=520,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
        **{"byte_fallback": True, "add_dummy_prefix": True, **options},
    )
    return spm.SentencePieceProcessor(model_proto=written.getvalue())


def keys_of_pieces(model: Any, user_defined: tuple[str, ...], prefix: bool) -> dict[str, Any]:
    """The model as the converter writes it: user-defined pieces with plain spaces."""
    size = model.get_piece_size()
    types = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1
        for i in range(size)
    ]
    tokens = [model.id_to_piece(i) for i in range(size)]
    for piece in user_defined:
        index = model.piece_to_id(piece.replace(" ", "\u2581"))
        types[index], tokens[index] = 4, piece
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [float(model.get_score(i)) for i in range(size)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def random_texts() -> list[str]:
    rng = random.Random(1)
    letters = "  aeiotnrsdhl\n\tTHäéД中🙂0123.,'<h1>_"
    words = sorted({word for text in CORPUS for word in text.split()})
    texts = ["".join(rng.choice(letters) for _ in range(rng.randint(1, 40))) for _ in range(500)]
    texts += [rng.choice([" ", "  ", "\n"]).join(rng.choices(words, k=8)) for _ in range(300)]
    texts += ["a" * n for n in range(1, 12)] + [" " * n + "x" for n in range(1, 12)]
    return texts + [text for text in TRICKY if "<eos>" not in text] + CORPUS[:5]


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("fallback", [True, False])
def test_sentencepiece_ids_are_its_own(prefix: bool, fallback: bool, tmp_path: Path) -> None:
    model = sentencepiece_model(add_dummy_prefix=prefix, byte_fallback=fallback)
    tokenizer = load(tmp_path, keys_of_pieces(model, (), prefix))
    for text in random_texts():
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == model.encode(text), repr(text)
        if fallback:
            assert tokenizer.decode(ids) == text


def test_user_defined_pieces_are_cut_out_first(tmp_path: Path) -> None:
    """As in Gemma: runs of newlines and spaces, and tags, which no merge makes."""
    user_defined = ("\n", "\n\n", "  ", "   ", "    ", "<h1>", "\t")
    symbols = [piece.replace(" ", "\u2581") for piece in user_defined]
    model = sentencepiece_model(add_dummy_prefix=False, user_defined_symbols=symbols)
    tokenizer = load(tmp_path, keys_of_pieces(model, user_defined, prefix=False))
    for text in [*random_texts(), "a\u2581 b", "\u2581\u2581 ", "x   <h1>\n\n\n     y"]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == model.encode(text), repr(text)


def test_sentencepiece_models_add_bos_where_the_file_does_not_say(tmp_path: Path) -> None:
    model = sentencepiece_model()
    tokenizer = load(tmp_path, keys_of_pieces(model, (), prefix=True))
    ids = tokenizer("the dog")["input_ids"]
    assert ids == [model.bos_id(), *model.encode("the dog")]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the dog"


def test_text_that_looks_like_a_byte_is_no_byte(tmp_path: Path) -> None:
    model = sentencepiece_model()
    tokenizer = load(tmp_path, keys_of_pieces(model, (), prefix=True))
    assert tokenizer("<0x41>", add_special_tokens=False)["input_ids"] == model.encode("<0x41>")


def test_collapsing_spaces_is_refused(tmp_path: Path) -> None:
    keys = keys_of_pieces(sentencepiece_model(), (), prefix=True)
    with pytest.raises(ModelError, match="remove_extra_whitespaces holds True"):
        load(tmp_path, keys | {"tokenizer.ggml.remove_extra_whitespaces": True})


def test_merges_follow_the_scores() -> None:
    pieces = ["a", "b", "c", "ab", "bc", "abc", "<s>"]
    scores = [0.0, 0.0, 0.0, -2.0, -1.0, -3.0, 0.0]
    merges = merges_of_pieces(pieces, scores, [True] * 6 + [False])
    assert merges == [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")]
    assert merges_of_pieces(pieces, scores, [True, True, False, True, True, True, False]) == [
        ("a", "b"),
        ("a", "bc"),
    ]
