"""Measurements side by side: what a whole work costs, whether the answers agree, a table. Numbers only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tabulate import tabulate

from benchmarks.side_by_side.backends import Answer
from benchmarks.side_by_side.worker import Measurement, PlanFigures
from benchmarks.side_by_side.works import Work

FLOOR_NATS: Final = 1e-3
"""Rounding of two float32 models whose products add up in another order."""
NATS_A_TOKEN: Final[Mapping[str, float]] = {"hf": 2e-5, "mlx_lm": 3e-4, "oracle": 2e-6}
"""Error of a peer's own float32 normaliser, which has the same sign on every token: torch's was 1.7e-5
(page_precision.py), MLX's 5e-5 at a vocabulary of 49,152 and 2.7e-4 at 151,936 (logsumexp.py). The oracle's is none;
ours was 5e-7 off on a page of 5,349 tokens."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """A backend's answers beside ours."""

    num_compared: int
    worst_nats: float
    num_beyond: int
    """Answers that differ by more than the tolerance, or in whether they are greedy."""


@dataclass(frozen=True, slots=True)
class Line:
    """One backend on one work, scaled to all its questions."""

    work: str
    backend: str
    questions: int
    """That were answered."""
    of_questions: int
    stored: bool
    """Whether it was measured on another day."""
    wall: float
    cpu: float
    tokens: float
    padding: int | None
    forwards: float
    peak_mlx_bytes: int | None
    """As measured, not scaled."""
    peak_rss_bytes: int
    agreement: Agreement | None
    """None for ours, and where the answers mean something else."""
    cpu_ratio: float | None
    """CPU seconds of this backend over ours; None without ours."""
    tokens_ratio: float | None
    plan: PlanFigures | None = None
    """Of ours."""

    @property
    def is_scaled(self) -> bool:
        """Whether only a part of the questions was answered."""
        return self.questions < self.of_questions


def tolerance(backend: str, num_tokens: int) -> float:
    """Nats by which a peer may differ from ours on a continuation of that many tokens."""
    return FLOOR_NATS + NATS_A_TOKEN[backend] * num_tokens


def agree(
    backend: str, theirs: Sequence[Answer], ours: Sequence[Answer], lengths: Sequence[int]
) -> Agreement:
    """Compare answers to the same requests; `lengths` are the tokens of each continuation."""
    worst, beyond = 0.0, 0
    for (their_score, their_greedy), (score, greedy), length in zip(theirs, ours, lengths, strict=True):
        difference = abs(their_score - score)
        worst = max(worst, difference)
        beyond += not difference <= tolerance(backend, length) or their_greedy != greedy
    return Agreement(len(lengths), worst, beyond)


def is_comparable(backend: str, work: Work) -> bool:
    """Whether a backend's answers mean what ours do: mlx_lm's rolling scores leave out the first token."""
    return backend != "ours" and (backend, work.kind) != ("mlx_lm", "loglikelihood_rolling")


def make_line(
    work: Work,
    backend: str,
    found: Measurement,
    num_questions: int,
    ours: Measurement | None,
    *,
    stored: bool = False,
) -> Line:
    """One line of the table; a part of the questions is scaled by its share of the context tokens."""
    agreement = None
    if ours is not None and is_comparable(backend, work):
        places = [index for index, question in enumerate(work.questions) if question < num_questions]
        own = [ours.answers[index] for index in places]
        agreement = agree(backend, found.answers, own, found.scored_tokens)
    return Line(
        work=work.name,
        backend=backend,
        questions=num_questions,
        of_questions=work.num_questions,
        stored=stored,
        wall=found.wall / found.share,
        cpu=found.cpu / found.share,
        tokens=found.computed.tokens / found.share,
        padding=found.computed.padding,
        forwards=found.computed.forwards / found.share,
        peak_mlx_bytes=found.peak_mlx_bytes,
        peak_rss_bytes=found.peak_rss_bytes,
        agreement=agreement,
        cpu_ratio=found.cpu / found.share / ours.cpu if ours is not None else None,
        tokens_ratio=found.computed.tokens / found.share / ours.computed.tokens if ours is not None else None,
        plan=found.plan,
    )


def table(lines: Sequence[Line]) -> str:
    """For people; a `~` stands before what was scaled."""
    headers = ["work", "backend", "questions", "wall s", "CPU s", "CPU / ours", "tokens", "tokens / ours"]
    headers += ["padding", "forwards", "MLX peak", "process peak", "worst nats", "beyond"]
    return tabulate([_row(line) for line in lines], headers, disable_numparse=True, stralign="right")


def _row(line: Line) -> list[Any]:
    about = "~" if line.is_scaled else ""
    agreement = line.agreement
    return [
        line.work,
        line.backend + (" (stored)" if line.stored else ""),
        f"{line.questions} of {line.of_questions}" if line.is_scaled else f"{line.questions}",
        f"{about}{line.wall:.1f}",
        f"{about}{line.cpu:.1f}",
        "" if line.cpu_ratio is None else f"{about}{line.cpu_ratio:.2f}",
        f"{about}{line.tokens:,.0f}",
        "" if line.tokens_ratio is None else f"{about}{line.tokens_ratio:.2f}",
        "with the tokens" if line.padding is None else f"{line.padding:,}",
        f"{about}{line.forwards:,.0f}",
        "" if line.peak_mlx_bytes is None else f"{line.peak_mlx_bytes / 1e9:.2f} GB",
        f"{line.peak_rss_bytes / 1e9:.2f} GB",
        "" if agreement is None else f"{agreement.worst_nats:.1e}",
        "" if agreement is None else f"{agreement.num_beyond} of {agreement.num_compared}",
    ]


def plan_table(lines: Sequence[Line]) -> str:
    """How our plans compare with what cannot be done without: unique tokens, and forwards alone."""
    headers = ["work", "unique", "planned / unique", "padding", "forwards", "KV peak", "planning CPU s"]
    headers += ["scoring CPU s", "bare CPU s", "CPU / bare", "wall / bare"]
    rows = [_plan_row(line, line.plan) for line in lines if line.plan is not None]
    return tabulate(rows, headers, disable_numparse=True, stralign="right")


def _plan_row(line: Line, plan: PlanFigures) -> list[str]:
    bare = plan.seconds.get("bare")
    return [
        line.work,
        f"{plan.unique_tokens:,}",
        f"{plan.planned_tokens / plan.unique_tokens:.4f}",
        f"{plan.padding / plan.planned_tokens:.1%}",
        f"{plan.num_forwards}",
        f"{plan.peak_kv_bytes / 1e6:.0f} MB",
        f"{plan.seconds['plan'].cpu:.2f}",
        f"{line.cpu:.1f}",
        "" if bare is None else f"{bare.cpu:.1f}",
        "" if bare is None else f"{line.cpu / bare.cpu:.3f}",
        "" if bare is None else f"{line.wall / bare.wall:.3f}",
    ]
