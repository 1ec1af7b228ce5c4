#!/usr/bin/env python3
"""Measure how far each architecture of mlx-lm shares prefixes, and write docs/guides/architectures.md.

    python -m scripts.architecture_table              # all of them, some minutes
    python -m scripts.architecture_table llama phi    # print what some would say, write nothing

Every number on the page comes from a run of this script over the tiny random models of tests/zoo.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final
from unittest import mock

import mlx_eval.models  # noqa: F401  (first: it brings the BLAS in before mlx)

# isort: split
import mlx.core as mx
import numpy as np
from mlx import nn

from mlx_eval.engine import attention
from mlx_eval.engine.batches import Level
from mlx_eval.engine.branch import EMPTY_LAYOUT, BranchCache
from mlx_eval.engine.score import Scorer
from mlx_eval.engine.sharing import ModelSharing, probe_requests
from tests.zoo.build import VOCAB, build, configurations, runnable

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "guides" / "architectures.md"
RIGHT: Final = 1e-3
"""Nats below which two ways of computing agree; what is wrong differs by a hundred times as much."""
FAILURES: Final = (ValueError, TypeError, AttributeError, IndexError, RuntimeError, NotImplementedError)
COMMAND: Final = "python -m scripts.architecture_table"
NONE: Final = "-"


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found of one architecture."""

    name: str
    sharing: ModelSharing
    has_keys: bool
    """Whether some layers keep keys and values that the engine stores itself."""
    has_state: bool
    """Whether some layers keep anything else."""
    reads_in_place: bool
    """Whether attention read a prefix that is stored once."""
    faults: dict[str, str]
    """What mlx-lm itself computes wrongly: name of the way -> evidence."""


def main() -> None:
    names = sys.argv[1:] or runnable()
    measured = []
    for name in names:
        measured.append(measure(name))
        print(name, measured[-1].sharing.way, measured[-1].faults, flush=True)
    if len(sys.argv) == 1:
        PAGE.write_text(page(measured), encoding="utf-8")
    else:
        print(page(measured))


def measure(name: str) -> Measured:
    """Run the self-test, and mlx-lm alone in the ways that an evaluator may use."""
    model = build(name)
    scorer = Scorer(model)
    sharing = scorer.sharing
    kinds = {type(cache) for cache in leaves(sharing.caches(model).start(EMPTY_LAYOUT, None, []))}
    reads: list[None] = []
    counted = mock.patch.object(
        attention,
        "prefix_attention",
        lambda *args, original=attention.prefix_attention, **kwargs: (
            reads.append(None),
            original(*args, **kwargs),
        )[1],
    )
    requests = probe_requests(VOCAB)[0]
    with counted:
        scorer.run(scorer.plan(requests, 6), requests, lambda index, score: None)
    return Measured(
        name=name,
        sharing=sharing,
        has_keys=BranchCache in kinds,
        has_state=bool(kinds - {BranchCache}),
        reads_in_place=bool(reads),
        faults=dict(found_faults(model)),
    )


def leaves(caches: Sequence[Any]) -> Iterator[Any]:
    """Cache objects, those in lists too."""
    for cache in caches:
        inner = getattr(cache, "caches", None)
        yield from leaves(inner) if isinstance(inner, tuple | list) else [cache]


# ---------------------------------------------------------------- mlx-lm by itself

Rows = list[list[int]]


def fresh(model: nn.Module) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache

    return make_prompt_cache(model)


def logprobs(logits: mx.array) -> mx.array:
    return nn.log_softmax(logits.astype(mx.float32), axis=-1)


def alone(model: nn.Module, row: Sequence[int]) -> mx.array:
    """[T, V] of a row in one call with a fresh cache."""
    return logprobs(model(mx.array([row]), cache=fresh(model))[0])


def padded(rows: Rows) -> tuple[mx.array, list[int], list[int]]:
    """[B, T] ids, lengths, paddings."""
    longest = max(map(len, rows))
    ids = mx.array([row + [0] * (longest - len(row)) for row in rows])
    return ids, [len(row) for row in rows], [longest - len(row) for row in rows]


def random_rows(*lengths: int) -> Rows:
    rng = np.random.default_rng(1)
    return [rng.integers(1, VOCAB, length).tolist() for length in lengths]


def largest(pairs: Sequence[tuple[mx.array, mx.array]]) -> float:
    """The largest difference; where both are minus infinity there is none."""
    return max(float(mx.max(mx.where(one == two, 0, mx.abs(one - two)))) for one, two in pairs)


def without_cache(model: nn.Module) -> float:
    (row,) = random_rows(17)
    return largest([(logprobs(model(mx.array([row]))[0]), alone(model, row))])


def padded_rows(model: nn.Module) -> float:
    rows = random_rows(5, 11, 17, 23)
    ids, lengths, _ = padded(rows)
    logits = logprobs(model(ids, cache=fresh(model)))
    return largest([(logits[i, :n], alone(model, rows[i])) for i, n in enumerate(lengths)])


def two_calls(model: nn.Module) -> float:
    pairs = []
    for row in random_rows(17, 23):
        cache, half = fresh(model), len(row) // 2
        parts = [model(mx.array([part]), cache=cache)[0] for part in (row[:half], row[half:])]
        pairs.append((logprobs(mx.concatenate(parts)), alone(model, row)))
    return largest(pairs)


def in_batch_caches(model: nn.Module, caches: list[Any], heads: Rows, tails: Rows) -> float:
    """Padded tails behind heads that the caches have read."""
    ids, lengths, padding = padded(tails)
    for cache in caches:
        cache.prepare(lengths=lengths, right_padding=padding)
    logits = logprobs(model(ids, cache=caches))
    return largest(
        [(logits[i, :n], alone(model, heads[i] + tails[i])[len(heads[i]) :]) for i, n in enumerate(lengths)]
    )


def merged_prefixes(model: nn.Module) -> float:
    from mlx_lm.generate import _merge_caches

    heads, tails = random_rows(13, 6), random_rows(4, 7)
    each = [fresh(model) for _ in heads]
    for head, cache in zip(heads, each, strict=True):
        mx.eval(model(mx.array([head]), cache=cache))
    return in_batch_caches(model, _merge_caches(each), heads, tails)


def padded_prefixes(model: nn.Module) -> float:
    from mlx_lm.generate import _merge_caches

    heads, tails = random_rows(5, 11, 17), random_rows(4, 1, 6)
    caches = _merge_caches([fresh(model) for _ in heads])
    ids, lengths, padding = padded(heads)
    for cache in caches:
        cache.prepare(lengths=lengths, right_padding=padding)
    mx.eval(model(ids, cache=caches))
    for cache in caches:
        cache.finalize()
    return in_batch_caches(model, caches, heads, tails)


CHECKS: Final[dict[str, tuple[str, Callable[[nn.Module], float]]]] = {
    "no cache": ("`model(ids)` against the same call with a fresh cache", without_cache),
    "padded rows": ("right-padded rows in one call with a fresh cache", padded_rows),
    "two calls": ("one row, its second half in a second call", two_calls),
    "merged prefixes": ("prefixes of 13 and 6 tokens, `merge`, padded rows behind them", merged_prefixes),
    "padded prefixes": (
        "padded prefixes in batch caches, `finalize`, padded rows behind them",
        padded_prefixes,
    ),
}
"""Ways of computing with mlx-lm alone, each compared with one row in one call."""


def found_faults(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, (_, check) in CHECKS.items():
        try:
            difference = check(model)
        except FAILURES as failure:
            yield name, f"`{type(failure).__name__}: {without_shapes(str(failure))}`"
            continue
        if not difference < RIGHT:
            yield name, f"{difference:.1g}"


def without_shapes(message: str) -> str:
    """An error's first sentence, which many architectures have in common."""
    line = message.strip().splitlines()[0]
    line = re.split(r" The following| However|, and the concatenation", line, maxsplit=1)[0]
    return re.sub(r"\(\d+(, ?\d+)+\)", "(...)", line).rstrip(".")


# ---------------------------------------------------------------- the page


def page(measured: Sequence[Measured]) -> str:
    return "\n".join(
        [
            INTRODUCTION.format(
                count=len(measured), command=COMMAND, mlx=version("mlx"), mlx_lm=version("mlx-lm")
            ),
            *sharing_table(measured),
            *refused_table(measured),
            *fault_tables(measured),
            *cannot_table(),
            "",
        ]
    )


INTRODUCTION: Final = """\
# Architectures

<!-- written by `{command}` -->

How far the rows of a model may share prefixes and batches cannot be told from its name: mlx-lm computes some models
wrongly in some ways, loudly or silently. So a model is asked when it is first scored. It scores a small forest in
each way that the engine has, the fastest first, and the first one that gives the numbers of one row alone is taken;
the last is one row at a time. What was found is kept by the fingerprint of the weights.

This page says what mlx-lm's architectures answer: {count} configurations, tiny and random, in float32 on a CPU,
with mlx {mlx} and mlx-lm {mlx_lm}. In the way that is taken, each gives the numbers of one sequence alone with a
fresh cache within 1e-4 nats a token, in any batch size, order and sharing (`tests/zoo`, in `make test-all`). The
names are those of mlx-lm's modules, which are a configuration's `model_type`; behind an `@` stands what a
configuration has that others of its module have not.
"""


def sharing_table(measured: Sequence[Measured]) -> Iterator[str]:
    yield "## How far each shares\n"
    yield "A † marks recurrent state, or another memory of the model's own: it is copied to each row, while keys and"
    yield "values are stored as the table says. Where a sliding window hides a part of a prefix, the layer reads a"
    yield "copy.\n"
    yield "| rows go on from prefixes of | a prefix is stored | its keys are read | architectures |"
    yield "|---|---|---|---|"
    groups: dict[tuple[str, str, str], list[str]] = {}
    for one in measured:
        mark = "†" if one.has_state and one.has_keys else ""
        groups.setdefault(group(one), []).append(f"{one.name}{mark}")
    for key in sorted(groups, key=lambda key: -len(groups[key])):
        names = groups[key]
        yield f"| {' | '.join(key)} | {len(names)}: {', '.join(names)} |"
    yield ""


def group(one: Measured) -> tuple[str, str, str]:
    way = one.sharing.way
    if way.level is Level.ALONE:
        return "none: one row at a time", NONE, NONE
    if way.level is Level.ROWS:
        return "none: whole rows side by side", NONE, NONE
    length = "any length" if way.level is Level.RAGGED else "one length"
    if not way.branches:
        return length, "in each row", "in each row"
    if not one.has_keys:
        return length, "as state, in each row", NONE
    return length, "once", "where they are" if one.reads_in_place else "from copies, one layer at a time"


def refused_table(measured: Sequence[Measured]) -> Iterator[str]:
    yield "## What was refused\n"
    yield "What stops an architecture from going all the way: the ways that the self-test refused. A number is what"
    yield "one score in four or more differs by, in standard deviations of a token's score.\n"
    yield "| way | found | architectures |"
    yield "|---|---|---|"
    found: dict[str, list[tuple[str, str]]] = {}
    for one in measured:
        for finding in one.sharing.findings:
            way, _, what = finding.partition(": ")
            found.setdefault(way, []).append((one.name, shortened(what)))
    for way, pairs in found.items():
        for evidence, names in by_evidence(pairs):
            yield f"| {way} | {evidence} | {names} |"
    yield ""


def shortened(finding: str) -> str:
    """What a difference is, without the words around it; an error in code marks."""
    number = re.search(r"differs from a row alone by (\S+)", finding)
    return f"{float(number[1]):.1g}" if number else f"`{without_shapes(finding)}`"


def fault_tables(measured: Sequence[Measured]) -> Iterator[str]:
    yield "## What mlx-lm itself computes differently\n"
    yield "mlx-lm alone, without this engine, against the same row in one call with a fresh cache: the largest"
    yield "difference of a log-probability in nats, or what was raised. What is not named agrees within 1e-3.\n"
    yield "| computed | agree | evidence | the others |"
    yield "|---|---|---|---|"
    for name, (what, _) in CHECKS.items():
        wrong = [(one.name, one.faults[name]) for one in measured if name in one.faults]
        rows = by_evidence(wrong) or [(NONE, NONE)]
        for evidence, names in rows:
            yield f"| {what} | {len(measured) - len(wrong)} | {evidence} | {names} |"
    yield ""


def by_evidence(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Rows of (evidence, names): all numbers in one row, each behind its name, and a row for each error."""
    rows: dict[str, list[str]] = {}
    for name, evidence in pairs:
        is_error = evidence.startswith("`")
        key, entry = (evidence, name) if is_error else ("differs", f"{name} ({evidence})")
        rows.setdefault(key, []).append(entry)
    return [(key.replace("|", "\\|"), ", ".join(names)) for key, names in rows.items()]


def cannot_table() -> Iterator[str]:
    yield "## What was not measured\n"
    yield "| architecture | why |"
    yield "|---|---|"
    for name, config in configurations().items():
        if "cannot" in config:
            yield f"| {name} | {config['cannot']} |"


if __name__ == "__main__":
    main()
