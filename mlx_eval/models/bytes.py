"""A tokenizer for models trained on raw bytes: id b, 0 to 255, is byte b; special tokens come after.

It is an ordinary fast tokenizer of transformers (a BPE over the byte alphabet without merges), so it
saves, loads, batches and applies chat templates like any other. Knows no model and no chat format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mlx_eval.errors import InvalidOptionError, ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

NUM_BYTES = 256
ROLES = ("bos", "eos", "pad")


def byte_tokenizer(
    *,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
    special_tokens: Mapping[str, int] | None = None,
    vocab_size: int | None = None,
    chat_template: str | None = None,
    max_length: int | None = None,
) -> PreTrainedTokenizerFast:
    """Make a tokenizer whose ids are the bytes of the text in UTF-8.

    `encode` adds nothing of its own: no BOS, no leading space. Text that spells a special token, such as
    `<|eos|>`, becomes that token, as with every tokenizer of transformers. `decode` puts U+FFFD where
    the bytes are not valid UTF-8.

    Args:
        bos_token_id: the model's beginning-of-sequence id, at least 256; None when it has none.
        eos_token_id: likewise for the end of a sequence. Roles may share one id.
        pad_token_id: likewise for padding.
        special_tokens: names of further special tokens and their ids; one that names the id of a role
            replaces that role's own name (`<|bos|>`, `<|eos|>`, `<|pad|>`).
        vocab_size: rows in the model's embedding; default: just what the ids need. Ids without a name
            are called `<|reserved_ID|>` and count as special, so that they decode to nothing.
        chat_template: Jinja template in the format of transformers.
        max_length: the model's context window in tokens, when known.

    Raises:
        InvalidOptionError: an id below 256 or not below `vocab_size`, or a name that is used twice.
    """
    from transformers import PreTrainedTokenizerFast

    roles = dict(zip(ROLES, (bos_token_id, eos_token_id, pad_token_id), strict=True))
    names = _names_of_special_ids(roles, special_tokens or {}, vocab_size)
    role_names = {f"{role}_token": names[index] for role, index in roles.items() if index is not None}
    optional = {"model_max_length": max_length} if max_length is not None else {}
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # as transformers has it
        tokenizer_object=_byte_level_bpe(names),
        clean_up_tokenization_spaces=False,
        **role_names,
        **optional,
    )
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def byte_tokenizer_for(config: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """The byte tokenizer of a model by its Hugging Face configuration.

    Its special ids count where they lie above the bytes.

    Raises:
        ModelError: the vocabulary is too small for bytes.
    """
    vocab_size = config.get("vocab_size") or 0
    if vocab_size < NUM_BYTES:
        raise ModelError(
            f"vocab_size is {vocab_size}, too small for bytes: give a transformers tokenizer or a directory"
        )

    def special_id(key: str) -> int | None:
        value = config.get(key)
        value = value[0] if isinstance(value, list | tuple) and value else value
        return value if isinstance(value, int) and NUM_BYTES <= value < vocab_size else None

    return byte_tokenizer(
        vocab_size=vocab_size,
        bos_token_id=special_id("bos_token_id"),
        eos_token_id=special_id("eos_token_id"),
        pad_token_id=special_id("pad_token_id"),
    )


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte, in the order of bytes.

    The alphabet of every byte-level BPE: printable Latin-1 stands for itself, the other bytes for the
    characters from U+0100 on (Radford et al. 2019, the GPT-2 tokenizer).
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    return [
        chr(byte) if byte in printable else chr(NUM_BYTES + others.index(byte)) for byte in range(NUM_BYTES)
    ]


def _names_of_special_ids(
    roles: Mapping[str, int | None], special_tokens: Mapping[str, int], vocab_size: int | None
) -> dict[int, str]:
    """One name for each id from 256 up to the vocabulary's size, in the order of ids."""
    given = {f"{role}_token_id": index for role, index in roles.items() if index is not None}
    ids = [*given.values(), *special_tokens.values()]
    size = max([NUM_BYTES, *(index + 1 for index in ids)]) if vocab_size is None else vocab_size
    if size < NUM_BYTES:
        raise InvalidOptionError(f"vocab_size is {size}; a byte tokenizer needs at least {NUM_BYTES}")
    for name, index in {**given, **special_tokens}.items():
        if not NUM_BYTES <= index < size:
            raise InvalidOptionError(
                f"{name} is {index}; special tokens of a byte tokenizer have ids from {NUM_BYTES} "
                f"to {size - 1} (vocab_size - 1): give another id, or None for no such token"
            )
    names: dict[int, str] = {}
    for name, index in special_tokens.items():
        if index in names:
            raise InvalidOptionError(f"special tokens {names[index]!r} and {name!r} share the id {index}")
        if len(name) < 2:  # a single character could be a byte's own
            raise InvalidOptionError(f"special token {name!r} is too short: give it two characters or more")
        names[index] = name
    for role, role_id in roles.items():
        if role_id is not None:
            names.setdefault(role_id, f"<|{role}|>")
    for index in range(NUM_BYTES, size):
        names.setdefault(index, f"<|reserved_{index}|>")
    if len(set(names.values())) < len(names):
        twice = sorted(name for name in names.values() if list(names.values()).count(name) > 1)[0]
        raise InvalidOptionError(f"two ids would be called {twice!r}: name special tokens otherwise")
    return dict(sorted(names.items()))


def _byte_level_bpe(names: Mapping[int, str]) -> Tokenizer:
    """The tokenizers library's tokenizer: bytes, then the special tokens that `names` gives."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {character: byte for byte, character in enumerate(byte_alphabet())}
    vocab |= {name: index for index, name in names.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(name, special=True, normalized=False) for name in names.values()]
    tokenizer.add_special_tokens(added)
    return tokenizer
