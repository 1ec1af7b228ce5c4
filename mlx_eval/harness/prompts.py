"""From lm-eval's (prompt, generation arguments) to the engine's generation requests. Knows no model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_eval.engine.stops import Thinking
from mlx_eval.harness.encoding import Encoder, fit_prompt
from mlx_eval.harness.gen_kwargs import parse_gen_kwargs, request_seed
from mlx_eval.records import GenerationRequest, Sampling


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """What holds for every prompt of a backend."""

    max_length: int
    """Tokens of prompt and answer together."""
    max_gen_toks: int
    """Tokens of an answer where the task sets no limit."""
    seed: int
    eos_text: str
    """The text of the end-of-sequence token, which ends an answer also when ordinary tokens spell it."""
    thinking: Thinking | None


@dataclass(frozen=True, slots=True)
class FittedPrompts:
    """Requests in the order asked, and what had to be cut."""

    requests: list[GenerationRequest]
    num_truncated: int
    """Prompts that lost tokens on their left."""
    num_shortened: int
    """Answers whose limit was lowered."""


def generation_requests(
    arguments: Sequence[tuple[str, Mapping[str, Any]]], encoder: Encoder, limits: GenerationLimits
) -> FittedPrompts:
    """Encode prompts and fit them into the window together with their answers.

    Raises:
        InvalidOptionError, UnknownNameError: generation arguments that make no sense or are not supported.
    """
    options = [
        parse_gen_kwargs(gen_kwargs, default_max_tokens=limits.max_gen_toks, seed=limits.seed)
        for _, gen_kwargs in arguments
    ]
    ids = encoder.prompts([text for text, _ in arguments])
    prompts = [
        fit_prompt(own, wanted.max_tokens, limits.max_length)
        for own, wanted in zip(ids, options, strict=True)
    ]
    samplings = _with_own_seeds(arguments, [wanted.sampling for wanted in options])
    start = limits.thinking.start if limits.thinking else None
    requests = [
        GenerationRequest(
            prompt_ids=tuple(prompt.ids.tolist()),
            max_tokens=prompt.max_tokens,
            stop=tuple(text for text in dict.fromkeys((*wanted.stop, limits.eos_text)) if text),
            sampling=sampling,
            in_thinking=start is not None and text.rstrip().endswith(start),
        )
        for (text, _), prompt, wanted, sampling in zip(arguments, prompts, options, samplings, strict=True)
    ]
    return FittedPrompts(
        requests,
        num_truncated=sum(prompt.truncated_by > 0 for prompt in prompts),
        num_shortened=sum(
            prompt.max_tokens < wanted.max_tokens for prompt, wanted in zip(prompts, options, strict=True)
        ),
    )


def _with_own_seeds(
    arguments: Sequence[tuple[str, Mapping[str, Any]]], samplings: Sequence[Sampling]
) -> list[Sampling]:
    """Sampled requests with a seed each: neither the same request asked again nor another draws the same noise."""
    repeats: dict[tuple[str, str], int] = {}
    seeded = []
    for (text, gen_kwargs), sampling in zip(arguments, samplings, strict=True):
        if sampling.is_greedy:
            seeded.append(sampling)
            continue
        key = (text, json.dumps(dict(gen_kwargs), sort_keys=True, default=str))
        repeats[key] = repeats.get(key, -1) + 1
        seeded.append(sampling.with_seed(request_seed(sampling.seed, text, repeats[key])))
    return seeded
