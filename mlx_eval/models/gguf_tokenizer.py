"""The tokenizer, made from a GGUF file's metadata alone. Knows no weight and no architecture.

Two kinds: `gpt2` is byte-level BPE with its merges in the file, `llama` is SentencePiece's BPE, whose
merges follow from the pieces and their scores. The ids are those of the tokenizer that the model was
trained with, so the text has to be split the way that one did before merging. GGUF only names the way, in
`tokenizer.ggml.pre`: a name that is not known is refused, since a near miss gives wrong scores silently.

Token types (gguf.TokenType): 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mlx_eval.errors import ModelError
from mlx_eval.models.gguf_file import GGUFFile
from mlx_eval.models.gguf_pieces import merges_of_pieces

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE: Final = "\u2581"
"""What SentencePiece writes for a space."""

# The patterns below stand in the tokenizer.json of the models they are named for.
ENGLISH_ENDINGS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3_SPLIT: Final = (
    ENGLISH_ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT: Final = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN_SPLIT: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2_SPLIT: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGIT_SPLITS: Final = (r"\p{N}", GPT2_SPLIT)
DEFAULT_SPLITS: Final = (r"[\p{P}$+<=>^~|]+", GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]")
"""What llama.cpp does under the name `default` (its llama-vocab.cpp)."""


@dataclass(frozen=True, slots=True)
class Splitting:
    """How a byte-level tokenizer cuts a text into words before it merges."""

    patterns: tuple[str, ...]
    """Applied one after the other: each cuts what the one before left into matches and the rest."""
    adds_bos: bool = False
    """Whether a beginning-of-sequence token is added where the file does not say."""
    ignores_merges: bool = False
    """Whether a word that is in the vocabulary is one token even if no merges lead to it."""
    composes: bool = False
    """Whether the text is brought to Unicode's composed form (NFC) first."""


SPLITTINGS: Final[Mapping[str, Splitting]] = {
    "default": Splitting(DEFAULT_SPLITS),
    "gpt-2": Splitting((GPT2_SPLIT,)),
    "llama-bpe": Splitting((LLAMA3_SPLIT,), adds_bos=True, ignores_merges=True),
    "llama-v3": Splitting((LLAMA3_SPLIT,), adds_bos=True, ignores_merges=True),
    "llama3": Splitting((LLAMA3_SPLIT,), adds_bos=True, ignores_merges=True),
    "qwen2": Splitting((QWEN2_SPLIT,), composes=True),
    "refact": Splitting(DIGIT_SPLITS),
    "smollm": Splitting(DIGIT_SPLITS),
    "starcoder": Splitting(DIGIT_SPLITS),
    "tekken": Splitting((TEKKEN_SPLIT,), adds_bos=True, ignores_merges=True),
}

TURN_ENDS: Final = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|eom_id|>")
"""Tokens that end a turn; files from older converters do not name them under a key."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens in the order of their ids, with their types."""

    tokens: Sequence[str]
    types: Sequence[int]

    def id_under(self, file: GGUFFile, key: str) -> int | None:
        """The token id under `tokenizer.ggml.{key}`, None where there is no such key."""
        name = f"tokenizer.ggml.{key}"
        if name not in file.metadata:
            return None
        token_id = file.integer(name)
        if not 0 <= token_id < len(self.tokens):
            raise file.wrong_value(name, f"a token id below {len(self.tokens)}")
        return token_id

    def token_under(self, file: GGUFFile, key: str) -> str | None:
        """The token whose id is under `tokenizer.ggml.{key}`."""
        token_id = self.id_under(file, key)
        return None if token_id is None else self.tokens[token_id]


def read_tokenizer(file: GGUFFile, context_length: int) -> PreTrainedTokenizerBase:
    """The tokenizer as transformers has it, with its chat template.

    Raises:
        ModelError: the kind of tokenizer or its way of splitting is not known, or a key is missing.
    """
    from transformers import PreTrainedTokenizerFast

    vocabulary = read_vocabulary(file)
    kinds: Mapping[str, Callable[[GGUFFile, Vocabulary], tuple[Tokenizer, bool]]] = {
        "gpt2": _byte_level,
        "llama": _sentencepiece,
    }
    kind = file.text("tokenizer.ggml.model")
    if kind not in kinds:
        raise ModelError(
            f"{file.path} has a tokenizer of kind {kind!r} (tokenizer.ggml.model), which is not supported; "
            f"known: {', '.join(kinds)}"
        )
    backend, adds_bos = kinds[kind](file, vocabulary)
    adds_bos = file.flag("tokenizer.ggml.add_bos_token", adds_bos)
    adds_eos = file.flag("tokenizer.ggml.add_eos_token", False)
    _add_special_tokens(backend, vocabulary)
    _add_template(backend, file, vocabulary, adds_bos, adds_eos)
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {name: vocabulary.token_under(file, f"{key}_token_id") for name, key in names.items()}
    make: Callable[..., Any] = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerBase = make(
        tokenizer_object=backend,
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
        add_bos_token=adds_bos,
        add_eos_token=adds_eos,
        **{name: token for name, token in special.items() if token is not None},
    )
    template = file.text("tokenizer.chat_template", "")
    if template:
        tokenizer.chat_template = template
    return tokenizer


def read_vocabulary(file: GGUFFile) -> Vocabulary:
    """Tokens and their types.

    Raises:
        ModelError: they do not fit each other, or a token stands there twice.
    """
    tokens = file.array("tokenizer.ggml.tokens")
    types = [int(each) for each in file.array("tokenizer.ggml.token_type")]
    if not isinstance(tokens, list) or not tokens:
        raise file.wrong_value("tokenizer.ggml.tokens", "a list of strings")
    if len(types) != len(tokens):
        raise ModelError(f"{file.path} is damaged: {len(tokens)} tokens, but {len(types)} token types")
    if len(set(tokens)) != len(tokens):
        twice = Counter(tokens).most_common(1)[0][0]
        raise ModelError(f"{file.path}: the token {twice!r} stands in its vocabulary twice")
    return Vocabulary(tokens, types)


def end_ids(file: GGUFFile, vocabulary: Vocabulary) -> list[int]:
    """Every token that ends a generated text, the end-of-sequence token first.

    Beside those under a key, the control tokens of `TURN_ENDS` that the chat template writes.
    """
    eos = vocabulary.id_under(file, "eos_token_id")
    if eos is None:
        file.integer("tokenizer.ggml.eos_token_id")  # raises: every model needs one
    keyed = [vocabulary.id_under(file, f"{key}_token_id") for key in ("eos", "eot", "eom")]
    template = file.text("tokenizer.chat_template", "")
    wanted = {token for token in TURN_ENDS if token in template}
    written = [
        i for i, token in enumerate(vocabulary.tokens) if token in wanted and vocabulary.types[i] == CONTROL
    ]
    return list(dict.fromkeys(each for each in (*keyed, *written) if each is not None))


def _byte_level(file: GGUFFile, vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = file.text("tokenizer.ggml.pre")
    if name not in SPLITTINGS:
        raise ModelError(
            f"{file.path} splits text in the way called {name!r} (tokenizer.ggml.pre), which is not known "
            f"here; another way would give wrong token ids; known: {', '.join(SPLITTINGS)}"
        )
    splitting = SPLITTINGS[name]
    merges = file.array("tokenizer.ggml.merges")
    pairs = [(left, right) for left, _, right in (str(merge).partition(" ") for merge in merges)]
    model = _bpe(file, models.BPE, vocabulary, pairs, ignore_merges=splitting.ignores_merges)
    tokenizer = Tokenizer(model)
    if splitting.composes:
        tokenizer.normalizer = normalizers.NFC()
    # ByteLevel has GPT-2's pattern built in, and puts a first space where that pattern cuts
    *patterns, last = splitting.patterns
    is_gpt2 = last == GPT2_SPLIT
    space = file.flag("tokenizer.ggml.add_space_prefix", False)
    if space and not is_gpt2:
        raise file.wrong_value("tokenizer.ggml.add_space_prefix", f"false for a splitting like {name!r}")
    patterns = patterns if is_gpt2 else [*patterns, last]
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=is_gpt2)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splitting.adds_bos


def _sentencepiece(file: GGUFFile, vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    from tokenizers import Tokenizer, decoders, models, normalizers

    if file.flag("tokenizer.ggml.remove_extra_whitespaces", False):
        raise file.wrong_value("tokenizer.ggml.remove_extra_whitespaces", "false: nothing else is supported")
    scores = [float(each) for each in file.array("tokenizer.ggml.scores")]
    if len(scores) != len(vocabulary.tokens):
        raise ModelError(f"{file.path} is damaged: {len(vocabulary.tokens)} tokens, but {len(scores)} scores")
    mergeable = [kind == NORMAL for kind in vocabulary.types]
    model = _bpe(
        file,
        models.BPE,
        vocabulary,
        merges_of_pieces(vocabulary.tokens, scores, mergeable),
        unk_token=vocabulary.token_under(file, "unknown_token_id"),
        fuse_unk=True,
        byte_fallback=BYTE in vocabulary.types,
    )
    tokenizer = Tokenizer(model)
    prefix = file.flag("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefix else replace
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer, True


def _bpe(
    file: GGUFFile,
    make: Callable[..., Any],
    vocabulary: Vocabulary,
    merges: list[tuple[str, str]],
    **options: Any,
) -> Any:
    vocab = {token: i for i, token in enumerate(vocabulary.tokens)}
    for left, right in merges:
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelError(
                f"{file.path} is damaged: the merge of {left!r} and {right!r} is not in its vocabulary"
            )
    return make(vocab=vocab, merges=merges, **options)


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Tokens that a text is searched for before it is split: those of a type other than normal."""
    from tokenizers import AddedToken, normalizers

    # SentencePiece matches runs of spaces where spaces are already "\u2581"; the normalizer must not add one.
    after = isinstance(tokenizer.normalizer, normalizers.Replace)
    of_type: dict[int, list[AddedToken]] = {UNKNOWN: [], CONTROL: [], USER_DEFINED: []}
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in of_type and token:
            normalized = after and kind == USER_DEFINED and " " in token
            of_type[kind].append(AddedToken(token, special=kind != USER_DEFINED, normalized=normalized))
    tokenizer.add_special_tokens([*of_type[UNKNOWN], *of_type[CONTROL]])
    tokenizer.add_tokens(of_type[USER_DEFINED])


def _add_template(
    tokenizer: Tokenizer, file: GGUFFile, vocabulary: Vocabulary, adds_bos: bool, adds_eos: bool
) -> None:
    """Have the beginning and end of a sequence added, each once."""
    from tokenizers import processors

    used: dict[str, tuple[str, int]] = {}
    for key, wanted in (("bos_token_id", adds_bos), ("eos_token_id", adds_eos)):
        if wanted:
            token_id = vocabulary.id_under(file, key)
            if token_id is None:
                token_id = file.integer(f"tokenizer.ggml.{key}")  # raises
            used[key] = (vocabulary.tokens[token_id], token_id)
    if not used:
        return
    bos, eos = used.get("bos_token_id"), used.get("eos_token_id")
    single = [*([f"{bos[0]}:0"] if bos else []), "$A:0", *([f"{eos[0]}:0"] if eos else [])]
    pair = [*single, *([f"{bos[0]}:1"] if bos else []), "$B:1", *([f"{eos[0]}:1"] if eos else [])]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=sorted(set(used.values()))
    )
