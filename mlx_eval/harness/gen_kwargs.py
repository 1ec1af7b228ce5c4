"""What a task asks of generation: lm-eval's `gen_kwargs`, checked and made plain. Knows no model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from mlx_eval.errors import InvalidOptionError, unknown_name
from mlx_eval.records import Sampling

LIMIT_NAMES: Final = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the token limit; the first that is given counts, as in lm-eval."""
KNOWN: Final = (
    *LIMIT_NAMES,
    "until",
    "do_sample",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "num_beams",
)


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """One request's generation arguments."""

    max_tokens: int
    stop: tuple[str, ...]
    sampling: Sampling


def parse_gen_kwargs(
    gen_kwargs: Mapping[str, Any], *, default_max_tokens: int, seed: int
) -> GenerationOptions:
    """Read lm-eval's generation arguments.

    Args:
        gen_kwargs: as a task gives them. `until` may be a text, a list, empty, None or absent.
        default_max_tokens: the limit when there is none.
        seed: of the run, used where the arguments name none.

    Raises:
        UnknownNameError: an argument that is not supported, such as a repetition penalty.
        InvalidOptionError: a value that makes no sense.
    """
    for name in gen_kwargs:
        if name not in KNOWN:
            raise unknown_name("generation argument", name, KNOWN)
    if gen_kwargs.get("num_beams") not in (None, 1):
        raise InvalidOptionError(
            f"num_beams={gen_kwargs['num_beams']}: beam search is not supported, use num_beams=1"
        )
    limits = [gen_kwargs[name] for name in LIMIT_NAMES if gen_kwargs.get(name) is not None]
    max_tokens = _number("max_gen_toks", limits[0] if limits else default_max_tokens, int, 1)
    return GenerationOptions(max_tokens, _stop_texts(gen_kwargs.get("until")), _sampling(gen_kwargs, seed))


def _stop_texts(until: Any) -> tuple[str, ...]:
    texts = list(until or []) if isinstance(until, list | tuple | None) else [until]
    if any(not isinstance(text, str) for text in texts):
        raise InvalidOptionError(f"until={until!r}: stop sequences are texts")
    return tuple(dict.fromkeys(text for text in texts if text))


def _sampling(gen_kwargs: Mapping[str, Any], seed: int) -> Sampling:
    do_sample = gen_kwargs.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise InvalidOptionError(f"do_sample={do_sample!r}: give true or false")
    given = gen_kwargs.get("temperature")
    temperature = 0.0 if given is None else _number("temperature", given, float, 0.0)
    if do_sample is None:
        do_sample = temperature > 0
    if not do_sample:
        return Sampling()
    if given is None:
        temperature = 1.0  # what transformers samples with
    if temperature == 0.0:
        return Sampling()
    top_p = gen_kwargs.get("top_p")
    top_k = gen_kwargs.get("top_k")
    min_p = gen_kwargs.get("min_p")
    own_seed = gen_kwargs.get("seed")
    return Sampling(
        temperature=temperature,
        top_p=1.0 if top_p is None else _number("top_p", top_p, float, 0.0, 1.0),
        top_k=0 if top_k is None else max(0, _number("top_k", top_k, int, -1)),
        min_p=0.0 if min_p is None else _number("min_p", min_p, float, 0.0, 1.0),
        seed=seed if own_seed is None else _number("seed", own_seed, int, 0),
    )


def repeat_seed(seed: int, repeat: int) -> int:
    """The seed of the n-th time that the same sampled request is asked for."""
    digest = hashlib.blake2b(f"{seed}:{repeat}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _number(name: str, value: Any, kind: type, least: float, most: float = float("inf")) -> Any:
    try:
        if isinstance(value, bool):
            raise ValueError
        number = kind(value)
        if kind is int and isinstance(value, float) and number != value:
            raise ValueError
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidOptionError(f"{name}={value!r} is no {'whole ' if kind is int else ''}number") from error
    if not least <= number <= most:
        bound = f"at least {least:g}" if most == float("inf") else f"between {least:g} and {most:g}"
        raise InvalidOptionError(f"{name}={value!r}: {name} must be {bound}")
    return number
