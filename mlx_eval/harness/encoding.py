"""Text to token ids, by the rules of lm-eval's Hugging Face backend, so that the same tokens are scored.

Knows the tokenizer; knows neither the model nor lm-eval's request objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mlx_eval.errors import InvalidOptionError
from mlx_eval.records import ScoringRequest

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper


class Pair(NamedTuple):
    """A context and the continuation scored after it."""

    context_ids: list[int]
    """Never empty."""
    continuation_ids: list[int]
    """Empty when there is nothing to score."""
    joined: bool = False
    """Whether one token spans the join, so that the continuation had to be encoded alone."""


class Prompt(NamedTuple):
    """A prompt that fits in the window together with its answer."""

    ids: list[int]
    max_tokens: int
    truncated_by: int
    """Tokens dropped on the left."""


class Encoder:
    """Encodes what the harness asks for."""

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        *,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
    ) -> None:
        """Wrap a tokenizer.

        Args:
            tokenizer: a transformers tokenizer or mlx-lm's wrapper of one.
            add_bos_token: whether texts get a beginning-of-sequence token. None: as the tokenizer does.
            prefix_token_id: what an empty context is replaced by. None: BOS, else EOS.

        Raises:
            InvalidOptionError: there is neither BOS nor EOS nor a given prefix, or no BOS to add.
        """
        self._tokenizer = hf_tokenizer(tokenizer)
        self._add_bos_token = add_bos_token
        if add_bos_token and tokenizer.bos_token_id is None:
            raise InvalidOptionError(
                "add_bos_token=True, but the tokenizer has no beginning-of-sequence token"
            )
        prefix = next(
            (i for i in (prefix_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None),
            None,
        )
        if prefix is None:
            raise InvalidOptionError(
                "the tokenizer has neither a beginning- nor an end-of-sequence token: give prefix_token_id"
            )
        self.prefix_token_id: int = prefix
        """What an empty context is replaced by."""
        self._beginnings = tuple(text for text in (tokenizer.decode([prefix]), tokenizer.bos_token) if text)

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Encode one text; see `encode_all`."""
        return self.encode_all([text], add_special_tokens)[0]

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool | None = None) -> list[list[int]]:
        """Encode texts, each distinct one once.

        Args:
            texts: any number of them.
            add_special_tokens: None adds BOS as the tokenizer or `add_bos_token` says, but never a
                second one to a text that starts with it already, as chat templates write.
        """
        distinct = list(dict.fromkeys(texts))
        ids: dict[str, list[int]] = {}
        for special in (False, True):
            group = [
                text for text in distinct if self._adds_special_tokens(text, add_special_tokens) is special
            ]
            if group:
                ids.update(zip(group, self._encode_batch(group, special), strict=True))
        return [ids[text] for text in texts]

    def pairs(self, requests: Sequence[tuple[str, str]]) -> list[Pair]:
        """Encode (context, continuation) texts.

        Trailing white space of the context moves to the continuation, the whole is encoded together and
        split where the context alone ends.
        """
        moved = [_move_spaces(context, continuation) for context, continuation in requests]
        wholes = self.encode_all([context + continuation for context, continuation in moved])
        contexts = self.encode_all([context for context, _ in moved])
        split = list(zip(moved, wholes, contexts, strict=True))
        needs_own = [
            continuation
            for (context, continuation), whole, context_ids in split
            if not context or len(whole) <= len(context_ids)
        ]
        alone = dict(zip(needs_own, self.encode_all(needs_own, add_special_tokens=False), strict=True))
        return [
            self._split(context, continuation, whole, context_ids, alone.get(continuation, []))
            for (context, continuation), whole, context_ids in split
        ]

    def rolling_windows(self, text: str, max_length: int) -> list[ScoringRequest]:
        """Windows in which each token of `text` is predicted once, the first from the prefix token.

        lm-eval's own windows, but for this: a BOS that the tokenizer put first is the prefix token, not
        a second one to be predicted from it.
        """
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        ids = self.encode(text)
        if ids and ids[0] == self.prefix_token_id and ids[0] in self._tokenizer.all_special_ids:
            ids = ids[1:]
        windows = get_rolling_token_windows(
            token_list=ids, prefix_token=self.prefix_token_id, max_seq_len=max_length, context_len=1
        )
        return [
            ScoringRequest(tuple(context), tuple(continuation))
            for context, continuation in map(make_disjoint_window, windows)
        ]

    def prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode prompts to generate from; an empty one becomes the prefix token."""
        return [ids or [self.prefix_token_id] for ids in self.encode_all(texts)]

    def decode(self, ids: Iterable[int]) -> str:
        """Ids to text, special tokens left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def _split(
        self, context: str, continuation: str, whole: list[int], context_ids: list[int], alone: list[int]
    ) -> Pair:
        prefix = self.prefix_token_id
        if not continuation:
            return Pair(context_ids or [prefix], [])
        if not context:
            return Pair([prefix], alone[1:] if alone[:1] == [prefix] else alone)
        if not context_ids:
            return Pair([prefix], whole)
        rest = whole[len(context_ids) :]
        return Pair(context_ids, rest or alone, joined=not rest)

    def _adds_special_tokens(self, text: str, asked: bool | None) -> bool:
        if asked is not None:
            return asked
        return self._add_bos_token is not False and not text.startswith(self._beginnings)

    def _encode_batch(self, texts: list[str], special: bool) -> list[list[int]]:
        if _encodes_plainly(self._tokenizer):
            batch = self._tokenizer(texts, add_special_tokens=special, verbose=False)
            encoded: list[list[int]] = batch["input_ids"]
        else:
            encoded = [self._tokenizer.encode(text, add_special_tokens=special) for text in texts]
        if special and self._add_bos_token:
            bos = self._tokenizer.bos_token_id
            encoded = [ids if ids[:1] == [bos] else [bos, *ids] for ids in encoded]
        return encoded


def hf_tokenizer(tokenizer: Any) -> Any:
    """The transformers tokenizer inside mlx-lm's wrapper; a transformers tokenizer as it is."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    # not by the attribute alone: transformers' own fast tokenizers have one of that name
    return tokenizer._tokenizer if isinstance(tokenizer, TokenizerWrapper) else tokenizer


def _encodes_plainly(tokenizer: Any) -> bool:
    """Whether calling the tokenizer on a list is the same as `encode` on each: a subclass may change the latter."""
    from transformers import PreTrainedTokenizerBase

    return type(tokenizer).encode is PreTrainedTokenizerBase.encode


def _move_spaces(context: str, continuation: str) -> tuple[str, str]:
    stripped = context.rstrip()
    return stripped, context[len(stripped) :] + continuation


class Fitted(NamedTuple):
    """A request that fits in the window."""

    request: ScoringRequest
    context_cut: bool
    """Whether the context lost tokens on its left."""
    continuation_cut: bool
    """Whether the continuation did, so that only its last tokens are scored."""


def fit_request(pair: Pair, max_length: int) -> Fitted:
    """Cut context and continuation on their left to what the window holds.

    The model sees at most `max_length` tokens, and the last continuation token is predicted, not seen:
    context `abc`, continuation `de`, 3 positions: `bcd` goes in, `de` is scored. A continuation that
    fills the window on its own is scored from its second token that fits.
    """
    whole = pair.context_ids + pair.continuation_ids
    kept = whole[-(max_length + 1) :]
    scored = min(len(pair.continuation_ids), len(kept) - 1)
    request = ScoringRequest(tuple(kept[: len(kept) - scored]), tuple(kept[len(kept) - scored :]))
    return Fitted(request, len(kept) < len(whole), scored < len(pair.continuation_ids))


def fit_prompt(ids: list[int], max_tokens: int, max_length: int) -> Prompt:
    """Prompt and answer length that fit in the window together.

    The prompt loses tokens on its left, as with lm-eval's `hf` backend. Only an answer as long as the
    window is shortened instead: to what the prompt leaves, but to no less than half of the window.
    """
    if max_tokens >= max_length:
        max_tokens = max(max_length - len(ids), max_length // 2)
    room = max_length - max_tokens
    return Prompt(ids[-room:], max_tokens, max(0, len(ids) - room))
