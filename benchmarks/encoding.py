"""How fast do the requests of a big work become token ids? In batches, beside one call a string.

    python -m mlx_eval convert model.gguf ./model
    python benchmarks/encoding.py ./model
    python benchmarks/encoding.py ./model --questions 500 --sample 500

Encodes made-up questions in the shape of MMLU: few-shot headers, questions after each, four choices after every
question. One way is `Encoder.pairs` and `fit_request` for all of them; the other is what lm-eval's `hf` backend
does for each request: a call for context and continuation and a call for the context. That takes long, so it is
given the first `--sample` questions and its seconds are scaled. Each way has a process of its own, and the ids
of the sample must be the same. Tokens are those of the requests, each context counted for every choice.
Needs a tokenizer that transformers reads, and no weights.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import resource
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from tabulate import tabulate

from mlx_eval.harness.encoding import Encoder, fit_request

CHOICES = (" A", " B", " C", " D")
NUM_WORDS = 30_000
WORDS_OF_A_QUESTION = 40
CONSONANTS, VOWELS = "bcdfghklmnprstvw", ("a", "e", "i", "o", "u", "an", "er", "in", "ous")

Ids = list[tuple[Sequence[int], Sequence[int]]]
Way = Callable[[Any, list[tuple[str, str]]], Ids]


@dataclass(frozen=True, slots=True)
class Size:
    """How much there is to encode."""

    headers: int
    questions: int
    words_of_a_header: int
    seed: int


@dataclass(frozen=True, slots=True)
class Cost:
    """What a way took for the questions it was given."""

    tokens: int
    wall_seconds: float
    cpu_seconds: float
    megabytes: float
    """By which the peak of the process grew from where the texts were made."""
    checksum: int
    """Of the sample's ids."""


def requests_of(size: Size) -> list[tuple[str, str]]:
    """(context, continuation) of made-up questions: a few short words are frequent, most are long and rare."""
    chance = random.Random(size.seed)
    syllables = [consonant + vowel for consonant in CONSONANTS for vowel in VOWELS]
    words = ["".join(chance.choices(syllables, k=1 + 3 * rank // NUM_WORDS)) for rank in range(NUM_WORDS)]
    weights = list(accumulate(1 / (rank + 10) for rank in range(NUM_WORDS)))

    def text(count: int) -> str:
        return " ".join(chance.choices(words, cum_weights=weights, k=count))

    headers = [text(size.words_of_a_header) for _ in range(size.headers)]
    requests = []
    for number in range(size.questions):
        options = "".join(f"\n{letter}. {text(5)}" for letter in "ABCD")
        question = f"{text(WORDS_OF_A_QUESTION)}?{options}\nAnswer:"
        context = f"{headers[number * size.headers // size.questions]}\n\n{question}"
        requests += [(context, choice) for choice in CHOICES]
    return requests


def in_batches(tokenizer: Any, requests: list[tuple[str, str]]) -> Ids:
    """As this package encodes."""
    fitted = [
        fit_request(pair.context_ids, pair.continuation_ids, max_length=2**31).request
        for pair in Encoder(tokenizer, prefix_token_id=0).pairs(requests)
    ]
    return [(request.context_ids, request.continuation_ids) for request in fitted]


def one_call_a_string(tokenizer: Any, requests: list[tuple[str, str]]) -> Ids:
    """As lm-eval's `hf` backend encodes."""
    found: Ids = []
    for context, continuation in requests:
        whole = tokenizer.encode(context + continuation, verbose=False)
        context_ids = tokenizer.encode(context, verbose=False)
        found.append((context_ids, whole[len(context_ids) :]))
    return found


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def measure(way: Way, model: str, size: Size, num_questions: int, num_compared: int) -> Cost:
    """Run one way; in a process of its own, so that the peak is its own."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    requests = requests_of(size)[: num_questions * len(CHOICES)]
    way(tokenizer, requests[:1])  # imports
    before = peak_megabytes()
    wall, cpu = time.perf_counter(), time.process_time()
    found = way(tokenizer, requests)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    megabytes = peak_megabytes() - before
    checksum = 0
    for ids in (ids for both in found[: num_compared * len(CHOICES)] for ids in both):
        checksum = zlib.crc32(np.asarray([len(ids), *ids], dtype=np.int64).tobytes(), checksum)
    tokens = sum(len(ids) for both in found for ids in both)
    return Cost(tokens, wall, cpu, megabytes, checksum)


def alone(way: Way, *arguments: Any) -> Cost:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, way, *arguments).result()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a directory with a tokenizer that transformers reads")
    parser.add_argument("--headers", type=int, default=57)
    parser.add_argument("--questions", type=int, default=14_000)
    parser.add_argument("--words_of_a_header", type=int, default=440)
    parser.add_argument(
        "--sample", type=int, default=500, help="questions that are encoded one call a string"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    size = Size(arguments.headers, arguments.questions, arguments.words_of_a_header, arguments.seed)
    sample = min(arguments.sample, size.questions)
    ours = alone(in_batches, arguments.model, size, size.questions, sample)
    theirs = alone(one_call_a_string, arguments.model, size, sample, sample)
    assert ours.checksum == theirs.checksum, "the two ways give different ids"
    num_requests = size.questions * len(CHOICES)
    print(
        f"{num_requests:,} requests of {ours.tokens / num_requests:.0f} tokens, {size.headers} headers, "
        f"{os.cpu_count()} cores; the ids of the first {sample * len(CHOICES):,} are the same"
    )
    rows = []
    for name, cost in (("in batches", ours), ("one call a string", theirs)):
        scale = ours.tokens / cost.tokens
        rows.append(
            [
                name if scale == 1 else f"{name} (scaled from {cost.tokens / 1e6:.1f} M tokens)",
                f"{cost.wall_seconds * scale:.1f}",
                f"{cost.cpu_seconds * scale:.1f}",
                f"{cost.tokens / cost.wall_seconds / 1e6:.2f}",
                f"{cost.megabytes:.0f}" + ("" if scale == 1 else " (sample)"),
            ]
        )
    columns = ["", "wall seconds", "CPU seconds", "M tokens a second", "peak grew by MB"]
    print(tabulate(rows, columns, disable_numparse=True))
    speed = (ours.tokens / ours.wall_seconds) / (theirs.tokens / theirs.wall_seconds)
    work = (ours.tokens / ours.cpu_seconds) / (theirs.tokens / theirs.cpu_seconds)
    print(f"in batches: {speed:.1f} times as fast by the clock, {work:.1f} times by CPU seconds")


if __name__ == "__main__":
    main()
