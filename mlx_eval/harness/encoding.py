"""Text to token ids, by the rules of lm-eval's Hugging Face backend, so that the same tokens are scored.

Knows the tokenizer; knows neither the model nor lm-eval's request objects. Each distinct text is encoded
once, a chunk of them at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mlx_eval.errors import InvalidOptionError
from mlx_eval.harness.batch_encoding import chunks, encode_batch, id_array
from mlx_eval.records import IntArray, ScoringRequest

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """A context and the continuation scored after it. Pairs of one context share its array."""

    context_ids: IntArray
    """[C] Never empty."""
    continuation_ids: IntArray
    """[N] Empty when there is nothing to score."""
    joined: bool = False
    """Whether one token spans the join, so that the continuation had to be encoded alone."""


class Prompt(NamedTuple):
    """A prompt that fits in the window together with its answer."""

    ids: IntArray
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
        self._prefix_ids = id_array([prefix])
        self._beginnings = tuple(text for text in (tokenizer.decode([prefix]), tokenizer.bos_token) if text)

    def encode(self, text: str, add_special_tokens: bool | None = None) -> IntArray:
        """Encode one text; see `encode_all`."""
        return self.encode_all([text], add_special_tokens)[0]

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool | None = None) -> list[IntArray]:
        """Encode texts, each distinct one once; equal texts share an array.

        Args:
            texts: any number of them.
            add_special_tokens: None adds BOS as the tokenizer or `add_bos_token` says, but never a
                second one to a text that starts with it already, as chat templates write.
        """
        ids = self._ids_by_text(texts, add_special_tokens)
        return [ids[text] for text in texts]

    def pairs(self, requests: Sequence[tuple[str, str]]) -> list[Pair]:
        """Encode (context, continuation) texts; equal ones share a pair.

        Trailing white space of the context moves to the continuation, the whole is encoded together and
        split where the context alone ends.
        """
        stripped = {context: context.rstrip() for context, _ in requests}
        moved = [
            (stripped[context], context[len(stripped[context]) :] + continuation)
            for context, continuation in requests
        ]
        distinct = list(dict.fromkeys(moved))
        contexts = self._ids_by_text(context for context, _ in distinct)
        joint = [(context, continuation) for context, continuation in distinct if context and continuation]
        rests = dict(zip(joint, self._rests(joint, contexts), strict=True))
        needs_own = [both[1] for both in distinct if both not in rests or not rests[both].size]
        alone = self._ids_by_text(needs_own, add_special_tokens=False)
        pairs = {both: self._pair(both, contexts, rests, alone) for both in distinct}
        return [pairs[both] for both in moved]

    def rolling_windows(self, text: str, max_length: int) -> list[ScoringRequest]:
        """Windows of one text; see `rolling_windows_all`."""
        return self.rolling_windows_all([text], max_length)[0]

    def rolling_windows_all(self, texts: Sequence[str], max_length: int) -> list[list[ScoringRequest]]:
        """For each text, windows in which each of its tokens is predicted once, the first from the prefix token.

        lm-eval's own windows, but for this: a BOS that the tokenizer put first is the prefix token, not
        a second one to be predicted from it.
        """
        return [self._windows(ids, max_length) for ids in self.encode_all(texts)]

    def prompts(self, texts: Sequence[str]) -> list[IntArray]:
        """Encode prompts to generate from; an empty one becomes the prefix token."""
        return [ids if ids.size else self._prefix_ids for ids in self.encode_all(texts)]

    def decode(self, ids: Iterable[int]) -> str:
        """Ids to text, special tokens left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def _rests(
        self, joint: Sequence[tuple[str, str]], contexts: Mapping[str, IntArray]
    ) -> Iterator[IntArray]:
        """What each whole has after its context. Only these few ids are kept, and no whole text is."""
        wholes = self._encode_each(context + continuation for context, continuation in joint)
        for (context, _), whole in zip(joint, wholes, strict=True):
            yield whole[contexts[context].size :].copy()

    def _pair(
        self,
        both: tuple[str, str],
        contexts: Mapping[str, IntArray],
        rests: Mapping[tuple[str, str], IntArray],
        alone: Mapping[str, IntArray],
    ) -> Pair:
        context, continuation = both
        prefix, context_ids = self._prefix_ids, contexts[context]
        if not continuation:
            return Pair(context_ids if context_ids.size else prefix, id_array([]))
        if not context:
            own = alone[continuation]
            return Pair(prefix, own[1:] if own[:1].tolist() == [self.prefix_token_id] else own)
        if not context_ids.size:
            return Pair(prefix, rests[both])
        if not rests[both].size:
            return Pair(context_ids, alone[continuation], joined=True)
        return Pair(context_ids, rests[both])

    def _windows(self, ids: IntArray, max_length: int) -> list[ScoringRequest]:
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        if ids.size and ids[0] == self.prefix_token_id and ids[0] in self._tokenizer.all_special_ids:
            ids = ids[1:]
        windows = get_rolling_token_windows(
            token_list=ids.tolist(), prefix_token=self.prefix_token_id, max_seq_len=max_length, context_len=1
        )
        return [
            ScoringRequest(id_array(context), id_array(continuation))
            for context, continuation in map(make_disjoint_window, windows)
        ]

    def _ids_by_text(
        self, texts: Iterable[str], add_special_tokens: bool | None = None
    ) -> dict[str, IntArray]:
        distinct = list(dict.fromkeys(texts))
        return dict(zip(distinct, self._encode_each(distinct, add_special_tokens), strict=True))

    def _encode_each(
        self, texts: Iterable[str], add_special_tokens: bool | None = None
    ) -> Iterator[IntArray]:
        """Ids of each text in order, a chunk at a time."""
        for chunk in chunks(texts):
            flags = [self._adds_special_tokens(text, add_special_tokens) for text in chunk]
            encoded = {
                special: iter(
                    self._encode_batch(
                        [text for text, flag in zip(chunk, flags, strict=True) if flag is special], special
                    )
                )
                for special in set(flags)
            }
            yield from (next(encoded[special]) for special in flags)

    def _adds_special_tokens(self, text: str, asked: bool | None) -> bool:
        if asked is not None:
            return asked
        return self._add_bos_token is not False and not text.startswith(self._beginnings)

    def _encode_batch(self, texts: list[str], special: bool) -> list[IntArray]:
        encoded = encode_batch(self._tokenizer, texts, special)
        if special and self._add_bos_token:
            bos = id_array([self._tokenizer.bos_token_id])
            encoded = [ids if np.array_equal(ids[:1], bos) else np.concatenate([bos, ids]) for ids in encoded]
        return encoded


def hf_tokenizer(tokenizer: Any) -> Any:
    """The transformers tokenizer inside mlx-lm's wrapper; a transformers tokenizer as it is."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    # not by the attribute alone: transformers' own fast tokenizers have one of that name
    return tokenizer._tokenizer if isinstance(tokenizer, TokenizerWrapper) else tokenizer


class Fitted(NamedTuple):
    """A request that fits in the window."""

    request: ScoringRequest
    context_cut: bool
    """Whether the context lost tokens on its left."""
    continuation_cut: bool
    """Whether the continuation did, so that only its last tokens are scored."""


def fit_request(
    context_ids: IntArray | Sequence[int], continuation_ids: IntArray | Sequence[int], max_length: int
) -> Fitted:
    """Cut context and continuation on their left to what the window holds.

    The model sees at most `max_length` tokens, and the last continuation token is predicted, not seen:
    context `abc`, continuation `de`, 3 positions: `bcd` goes in, `de` is scored. A continuation that
    fills the window on its own is scored from its second token that fits.

    Args:
        context_ids: at least one id. An int32 array is not copied: what is kept of it is a view, or itself.
        continuation_ids: at least one id; likewise.
        max_length: the window in tokens.
    """
    context = np.asarray(context_ids, dtype=np.int32)
    continuation = np.asarray(continuation_ids, dtype=np.int32)
    room = max_length + 1 - continuation.size
    if room >= context.size:
        return Fitted(ScoringRequest(context, continuation), context_cut=False, continuation_cut=False)
    if room >= 1:
        return Fitted(ScoringRequest(context[-room:], continuation), context_cut=True, continuation_cut=False)
    kept = continuation[-(max_length + 1) :]
    return Fitted(ScoringRequest(kept[:1], kept[1:]), context_cut=True, continuation_cut=True)


def fit_prompt(ids: IntArray, max_tokens: int, max_length: int) -> Prompt:
    """Prompt and answer length that fit in the window together.

    The prompt loses tokens on its left, as with lm-eval's `hf` backend. Only an answer as long as the
    window is shortened instead: to what the prompt leaves, but to no less than half of the window.
    """
    if max_tokens >= max_length:
        max_tokens = max(max_length - len(ids), max_length // 2)
    room = max_length - max_tokens
    return Prompt(ids[-room:], max_tokens, max(0, len(ids) - room))
