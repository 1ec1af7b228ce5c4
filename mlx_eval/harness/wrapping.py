"""What a backend is made of, from what a user gives: model, tokenizer, batch size, thinking markers."""

from __future__ import annotations

import logging
import types
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from mlx import nn

from mlx_eval import config
from mlx_eval.engine.stops import Thinking
from mlx_eval.errors import InvalidOptionError, ModelError
from mlx_eval.harness.encoding import hf_tokenizer
from mlx_eval.models.load import wrap_tokenizer
from mlx_eval.models.loaded import LoadedModel

logger = logging.getLogger(__name__)


def as_loaded(model: LoadedModel | nn.Module, tokenizer: Any) -> LoadedModel:
    """A model with its tokenizer, from `load_model`'s record or from mlx-lm's pair.

    Raises:
        InvalidOptionError: it is neither, or the tokenizer is missing.
    """
    if isinstance(model, LoadedModel):
        if tokenizer is None:
            return model
        wrapped = wrap_tokenizer(tokenizer, model.config.get("eos_token_id"))
        return LoadedModel(model.model, wrapped, model.config, model.source, model.generation_config)
    if not isinstance(model, nn.Module):
        raise InvalidOptionError(
            f"model is a {type(model).__name__}: give a LoadedModel from load_model(...) or an mlx-lm model"
        )
    if tokenizer is None:
        raise InvalidOptionError("an mlx-lm model needs its tokenizer: MLXEvalLM(model, tokenizer)")
    settings = vars(getattr(model, "args", types.SimpleNamespace()))
    return LoadedModel(model, wrap_tokenizer(tokenizer, settings.get("eos_token_id")), settings, "in memory")


def row_ceiling(batch_size: int | str) -> int | None:
    """The most rows computed together, from `8`, `"8"`, `"auto"` or `"auto:4"`; None: as many as memory allows.

    Raises:
        InvalidOptionError: it is none of these, or less than 1.
    """
    if isinstance(batch_size, str) and batch_size.split(":")[0] == "auto":
        return None
    return whole_number("batch_size", batch_size, 1)


def switch(name: str, value: Any) -> bool:
    """`value`, if it is true or false; texts that spell one are taken too.

    Raises:
        InvalidOptionError: it is neither.
    """
    known = {"true": True, "1": True, "false": False, "0": False}
    try:
        return known[str(value).lower()]
    except KeyError:
        raise InvalidOptionError(f"{name}={value!r}: give true or false") from None


def draft_length(value: Any) -> int | None:
    """The most tokens that are drafted: 0 for `off`, None for `auto`, else the number.

    Raises:
        InvalidOptionError: it is none of these.
    """
    if value is None or str(value).lower() in {"off", "false"}:
        return 0
    if str(value).lower() == "auto":
        return None
    advice = f"speculate={value!r}: give off, auto or the most tokens to draft, 1 to {config.LONGEST_DRAFT}"
    try:
        most = whole_number("speculate", value, 1)
    except InvalidOptionError:
        raise InvalidOptionError(advice) from None
    if most > config.LONGEST_DRAFT:
        raise InvalidOptionError(advice)
    return most


def whole_number(name: str, value: Any, least: int) -> int:
    """`value`, if it is a whole number of `least` or more; texts that spell one are taken too.

    Raises:
        InvalidOptionError: it is none.
    """
    try:
        number = int(value)
        if isinstance(value, bool) or number != float(value):
            raise ValueError
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidOptionError(f"{name}={value!r}: give a whole number of {least} or more") from error
    if number < least:
        raise InvalidOptionError(f"{name}={value!r}: give a whole number of {least} or more")
    return number


def window_length(max_length: Any, loaded: LoadedModel) -> int:
    """The context window in tokens: what the user asks for, else the model's own.

    Raises:
        InvalidOptionError: it is no whole number of 2 or more, or longer than the model's table of positions,
            beyond which MLX would read foreign memory.
    """
    length = whole_number("max_length", loaded.max_length if max_length is None else max_length, 2)
    positions = loaded.num_positions
    if positions is not None and length > positions:
        raise InvalidOptionError(f"max_length={length}: this model has {positions} positions")
    if length > loaded.max_length:
        logger.warning(
            "max_length=%d is more than the %d tokens that the model was made for", length, loaded.max_length
        )
    return length


def check_ids(ids: Iterable[npt.ArrayLike], loaded: LoadedModel) -> None:
    """Refuse token ids that the model has no embedding for: MLX would read foreign memory.

    Args:
        ids: arrays or sequences of ids, or single ids.
        loaded: the model that will be given them.

    Raises:
        ModelError: the tokenizer has made one.
    """
    size = loaded.vocab_size
    if size is None:
        return
    highest = max((int(np.max(some, initial=0)) for some in ids), default=0)
    if highest >= size:
        token = hf_tokenizer(loaded.tokenizer).convert_ids_to_tokens(highest)
        raise ModelError(
            f"the tokenizer gives id {highest} ({token!r}), and the model has {size} rows in its embedding: "
            "use the tokenizer that the model was trained with"
        )


def thinking_of(tokenizer: Any, end: str | int | None) -> Thinking | None:
    """The markers of the model's thinking section, or those that the user names.

    Args:
        tokenizer: mlx-lm's wrapper, which knows the usual markers.
        end: text or id that closes the section; None: the model's own, if it has one.

    Raises:
        InvalidOptionError: `end` is empty or no id of the tokenizer.
    """
    own = None
    if getattr(tokenizer, "has_thinking", False):
        own = Thinking(
            tokenizer.think_start,
            tokenizer.think_end,
            tuple(tokenizer.think_end_tokens),
            tuple(tokenizer.think_start_tokens),
        )
    if end is None:
        return own
    hf = hf_tokenizer(tokenizer)
    if not isinstance(end, str) or end.isdecimal():
        ids = (whole_number("think_end_token", end, 0),)
        if ids[0] >= len(hf):
            raise InvalidOptionError(f"think_end_token={end}: the tokenizer has {len(hf)} ids")
        text = hf.decode(list(ids))
    else:
        text = end
        ids = tuple(hf.encode(end, add_special_tokens=False))
    if not text:
        raise InvalidOptionError(
            f"think_end_token={end!r}: the text that ends a thinking section is not empty"
        )
    if own is not None and own.end == text:
        return own
    return Thinking(None, text, ids)
