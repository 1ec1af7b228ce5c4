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
SUPPORTED: Final = (
    *LIMIT_NAMES,
    "until",
    "do_sample",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
)
WITHOUT_EFFECT: Final[Mapping[str, float]] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "min_tokens": 0,
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "ignore_eos": False,
    "skip_special_tokens": True,
}
"""Arguments of other backends with the value at which they do nothing; any other would change the answers."""
IRRELEVANT: Final = ("use_cache", "cache_implementation", "pad_token_id", "early_stopping", "length_penalty")
"""Arguments of other backends that change no answer here: how they compute, and what only beam search reads."""
INSTEAD: Final = {
    "max_length": "it counts the prompt too; give max_gen_toks, and the window as the model's max_length",
    "stop": "stop texts are called until",
    "stop_strings": "stop texts are called until",
    "stop_sequences": "stop texts are called until",
    "enable_thinking": "it is an argument of the chat template: give it to the model and not to the generation",
}


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
        UnknownNameError: an argument that nobody knows.
        InvalidOptionError: a value that makes no sense, or an argument that would change the answer and is not
            supported, such as beam search.
    """
    for name, value in gen_kwargs.items():
        _check_supported(name, value)
    limits = [gen_kwargs[name] for name in LIMIT_NAMES if gen_kwargs.get(name) is not None]
    max_tokens = _number("max_gen_toks", limits[0] if limits else default_max_tokens, int, 1)
    return GenerationOptions(max_tokens, _stop_texts(gen_kwargs.get("until")), _sampling(gen_kwargs, seed))


def _check_supported(name: str, value: Any) -> None:
    if name in SUPPORTED or name in IRRELEVANT:
        return
    if name in INSTEAD:
        raise InvalidOptionError(f"{name}={value!r} is not supported: {INSTEAD[name]}")
    if name not in WITHOUT_EFFECT:
        raise unknown_name("generation argument", name, SUPPORTED)
    neutral = WITHOUT_EFFECT[name]
    if value is not None and value != neutral:
        raise InvalidOptionError(
            f"{name}={value!r} would change the answers and is not supported: leave it out or give {neutral}"
        )


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
    if do_sample and given is None:
        temperature = 1.0  # what transformers samples with
    penalty = _penalty(gen_kwargs.get("repetition_penalty"))
    if not do_sample or temperature == 0.0:
        return Sampling(repetition_penalty=penalty)
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
        repetition_penalty=penalty,
    )


def _penalty(given: Any) -> float:
    penalty: float = 1.0 if given is None else _number("repetition_penalty", given, float, 0.0)
    if not 0.0 < penalty < float("inf"):
        raise InvalidOptionError(
            f"repetition_penalty={given!r}: give a number above 0; 1 does nothing, more repeats less"
        )
    return penalty


def request_seed(seed: int, prompt: str, repeat: int) -> int:
    """The seed of the n-th time that a prompt is sampled with the same options: other prompts have other noise."""
    digest = hashlib.blake2b(
        f"{seed}:{repeat}:{prompt}".encode(errors="surrogatepass"), digest_size=8
    ).digest()
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
