"""Every architecture of mlx-lm through the engine, against one sequence alone with a fresh cache."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from mlx_eval import config
from mlx_eval.engine import sharing as sharing_module
from mlx_eval.engine.batches import Batch, CacheSize, Level, ScoringPlan, Sharing
from mlx_eval.engine.plan import plan_scoring
from mlx_eval.engine.score import Scorer
from mlx_eval.engine.sharing import WAYS, ModelSharing, describe, probe_requests
from mlx_eval.records import Score, ScoringRequest
from tests.tiny import NEAR_TIE, TOLERANCE, oracle_logprobs
from tests.zoo.build import WINDOW, build, configurations, has_window, nudge, runnable
from tests.zoo.forests import forest, long_forest, long_plans, plans

REACH = 40
"""Tokens that windows see here: more than the self-test reads, as in real models, and fewer than the forest."""
SEED = 2
UNSTABLE_SHARE = 0.1
"""Requests whose own number is not defined to `TOLERANCE`: two experts or keys among which a model chooses
may score alike but for rounding. `Case` tells them by moving the weights by a unit in the last place."""
WAY_OF = {
    name: way
    for way, names in json.loads(Path(__file__).with_name("ways.json").read_text(encoding="utf-8")).items()
    for name in names
}
"""What the self-test finds on a CPU, by name of the architecture."""


class Expected(NamedTuple):
    """What one sequence alone gives."""

    logprob: float
    is_greedy: bool
    margin: float
    """The least distance of the two best tokens."""

    def agrees(self, answer: Score, count: int) -> bool:
        """Whether an answer over `count` tokens is this one."""
        if not abs(answer.logprob - self.logprob) < TOLERANCE * count:
            return False
        return answer.is_greedy == self.is_greedy or self.margin < NEAR_TIE


def oracle(model: nn.Module, requests: Sequence[ScoringRequest]) -> list[Expected]:
    """Each input in one forward pass of its own, float64 from the logits on."""
    known: dict[bytes, np.ndarray] = {}
    answers = []
    for request in requests:
        ids = np.concatenate([request.context_ids, request.continuation_ids])[:-1]
        key = ids.tobytes()
        if key not in known:
            known[key] = oracle_logprobs(model, ids.tolist())
        logprobs = known[key][request.context_ids.size - 1 :]  # [N, V]
        scores = logprobs[np.arange(len(logprobs)), request.continuation_ids]
        best = np.sort(logprobs, axis=-1)
        is_greedy = bool((logprobs.argmax(axis=-1) == request.continuation_ids).all())
        answers.append(Expected(scores.sum(), is_greedy, (best[:, -1] - best[:, -2]).min()))
    return answers


def run(scorer: Scorer, plan: ScoringPlan, requests: Sequence[ScoringRequest]) -> list[Score]:
    """Answers in the order of the requests."""
    found: dict[int, Score] = {}
    scorer.run(plan, requests, found.__setitem__)
    return [found[index] for index in range(len(requests))]


class Case:
    """Requests to an architecture, and what each gives alone."""

    def __init__(self, name: str, model: nn.Module, requests: list[ScoringRequest]) -> None:
        self.requests = requests
        self._name = name
        self._expected = oracle(model, requests)

    @functools.cached_property
    def _nudged(self) -> list[list[Expected]]:
        """The same with other models within rounding; asked for only where an answer differs."""
        answers = []
        for seed in range(2):
            model = build(self._name, REACH)
            nudge(model, seed)
            answers.append(oracle(model, self.requests))
        return answers

    def shuffle(self, seed: int) -> None:
        order = np.random.default_rng(seed).permutation(len(self.requests))
        self.requests = [self.requests[index] for index in order]
        self._expected = [self._expected[index] for index in order]
        self.__dict__.pop("_nudged", None)

    def wrong(self, answers: Sequence[Score]) -> list[int]:
        """Indices of requests whose answers are not those of a sequence alone."""
        sizes = [request.continuation_ids.size for request in self.requests]
        differing = [
            index
            for index, (answer, expected) in enumerate(zip(answers, self._expected, strict=True))
            if not expected.agrees(answer, sizes[index])
        ]
        if not 0 < len(differing) <= UNSTABLE_SHARE * len(answers):
            return differing
        return [
            index
            for index in differing
            if not any(nudged[index].agrees(answers[index], sizes[index]) for nudged in self._nudged)
        ]


@pytest.mark.slow
@pytest.mark.parametrize("name", runnable())
def test_any_batch_order_and_sharing_gives_the_numbers_of_one_sequence_alone(name: str) -> None:
    model = build(name, REACH)
    scorer = Scorer(model)
    found = scorer.sharing
    if mx.default_device() == mx.cpu:  # a GPU has kernels of its own, and may allow more
        assert describe(found.way) == WAY_OF[name], found.findings
    case = Case(name, model, forest(SEED))
    for size in (None, 1, 2, 3):
        case.shuffle(size or 0)
        plan = scorer.plan(case.requests, size)
        assert not case.wrong(run(scorer, plan, case.requests)), f"batches of {size}"
    for what, plan in plans(case.requests, found.sharing, found.cache):
        assert not case.wrong(run(scorer, plan, case.requests)), what
    if not found.keys_only:
        case = Case(name, model, long_forest(SEED))
        for what, plan in long_plans(case.requests, found.sharing, found.cache):
            assert not case.wrong(run(scorer, plan, case.requests)), what


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in runnable() if has_window(name)])
def test_the_self_test_finds_the_same_whether_it_reaches_a_window_or_not(name: str) -> None:
    """Else it would accept in a real model, whose windows are long, what is wrong in long texts."""
    assert Scorer(build(name, WINDOW)).sharing.way == Scorer(build(name, REACH)).sharing.way


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nemotron_h", "mamba", "recurrent_gemma", "gemma2", "afm7", "deepseek_v32"])
def test_a_way_that_the_self_test_refuses_is_wrong_here_too(name: str) -> None:
    """So what is compared above can fail."""
    model = build(name, REACH)
    found = Scorer(model).sharing
    forced = ModelSharing(WAYS[0], keys_only=found.keys_only, cache=found.cache)
    scorer = Scorer(model, sharing=forced)
    case = Case(name, model, forest(SEED))
    assert any(
        case.wrong(run(scorer, plan, case.requests))
        for _, plan in plans(case.requests, forced.sharing, forced.cache)
    )


HALF = [
    "afm7",
    "baichuan_m1",
    "gemma2",
    "gemma3n",
    "granite",
    "lfm2",
    "llama",
    "mamba",
    "nemotron_h",
    "rwkv7",
]
"""Without experts, whose products MLX computes in float32 only on a CPU."""


@pytest.mark.slow
@pytest.mark.parametrize("name", HALF)
def test_the_self_test_finds_the_same_in_half_precision(name: str) -> None:
    """Padding in the state of nemotron_h changes its scores less than bfloat16 rounds those of others."""
    model = build(name)
    expected = Scorer(model).sharing.way
    model.set_dtype(mx.bfloat16)
    assert Scorer(model).sharing.way == expected


def behind_prefixes(plan: ScoringPlan) -> list[Batch]:
    return [batch for batch in plan.batches if batch.prefix is not None]


def nested(plan: ScoringPlan) -> list[Batch]:
    return [batch for batch in behind_prefixes(plan) if batch.new_prefixes]


def copies(plan: ScoringPlan) -> list[Batch]:
    """Batches whose rows go on from rows of other batches, beside one another."""
    return [batch for batch in plan.batches if len(batch.rows) > 1 and batch.rows[-1].parent is not None]


def has_gaps(plan: ScoringPlan, batch: Batch) -> bool:
    """Whether its rows go on from rows of unequal length."""
    parents = [plan.batches[row.parent.batch].rows[row.parent.row] for row in batch.rows if row.parent]
    return len({parent.length for parent in parents}) > 1


@pytest.mark.parametrize("level", [Level.RAGGED, Level.EQUAL])
@pytest.mark.parametrize("keys_only", [True, False])
def test_the_self_test_has_batches_of_every_kind(level: Level, keys_only: bool) -> None:
    """Prefixes, prefixes behind prefixes, copied rows of unequal length, single tokens."""
    sharing = Sharing(level, keys_only=keys_only)
    one_stem, three_stems, single_tokens = (
        plan_scoring(requests, sharing_module.PROBE_LIMITS, sharing, split_tokens=1)
        for requests in probe_requests(1000)
    )
    assert nested(one_stem)
    assert any(batch.padding for batch in behind_prefixes(one_stem))
    assert any(batch in behind_prefixes(one_stem) for batch in copies(one_stem))
    assert not behind_prefixes(three_stems)
    assert any(batch.padding for batch in copies(three_stems))
    assert [batch.length for batch in behind_prefixes(single_tokens)] == [1]
    if level is Level.RAGGED:
        assert any(has_gaps(one_stem, batch) for batch in copies(one_stem))
        assert any(len({row.start for row in batch.rows}) > 1 for batch in copies(three_stems))


@pytest.mark.parametrize("level", [Level.RAGGED, Level.EQUAL])
def test_the_plans_for_the_architectures_have_batches_of_every_kind(level: Level) -> None:
    sharing = Sharing(level)
    requests = forest(SEED)
    made = dict(plans(requests, sharing, CacheSize()))
    assert nested(made["prefixes of more than 1 copied tokens"])
    assert copies(made["small batches"])
    assert len(made["memory for two rows"].batches) > len(
        plan_scoring(requests, made["nothing shared"].limits).batches
    )
    assert all(row.start == 0 for batch in made["nothing shared"].batches for row in batch.rows)
    assert made["short steps"].num_forwards > len(made["short steps"].batches)
    assert any(
        batch.length > config.SMALLEST_STEP
        for _, plan in long_plans(long_forest(SEED), sharing, CacheSize())
        for batch in plan.batches
    )


def test_the_self_test_is_no_longer_than_the_windows_here() -> None:
    longest = max(
        request.context_ids.size + request.continuation_ids.size
        for requests in probe_requests(1000)
        for request in requests
    )
    assert WINDOW < longest < REACH


def test_every_architecture_has_a_known_way_or_a_reason_why_it_cannot_run() -> None:
    assert len(runnable()) == 127
    assert sorted(WAY_OF) == sorted(runnable())
    assert set(WAY_OF.values()) <= {describe(way) for way in WAYS}
    assert all(config["cannot"] for name, config in configurations().items() if name not in runnable())


@pytest.mark.slow
def test_every_module_of_mlx_lm_with_a_model_has_a_configuration() -> None:
    import mlx_lm.models

    folder = Path(next(iter(mlx_lm.models.__path__)))
    modules = {
        path.stem for path in folder.glob("*.py") if "\nclass Model(" in path.read_text(encoding="utf-8")
    }
    assert not modules - {name.partition("@")[0] for name in configurations()}


def test_the_page_about_architectures_names_each_where_it_belongs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "architectures.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if re.search(r"\| \d+: ", line)]
    placed = {name.rstrip("†"): row[0] for row in rows for name in row[3].partition(": ")[2].split(", ")}
    lengths = {"any length": "prefixes of any length", "one length": "prefixes of equal length"}
    assert {name: lengths.get(length, "one row at a time") for name, length in placed.items()} == {
        name: way.partition(",")[0] for name, way in WAY_OF.items()
    }
    assert all(f"\n| {name} | " in page for name in configurations() if name not in runnable())
