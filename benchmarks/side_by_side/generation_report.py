"""Generations side by side: cost, whether the texts are equal and where they part, tables. Numbers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from benchmarks.side_by_side.generation_backends import GenerationCounts
from benchmarks.side_by_side.generation_worker import GenerationMeasurement
from benchmarks.side_by_side.near_ties import Gap, Parting


@dataclass(frozen=True, slots=True)
class Difference:
    """One text beside ours."""

    parting: Parting
    gap: Gap | None
    """None where the tokens are the same."""

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.gap is not None and self.gap.is_near_tie

    def __str__(self) -> str:
        where = f"question {self.parting.question}, token {self.parting.place}"
        if self.gap is None:
            return f"{where}: the same tokens, cut elsewhere"
        kind = "near-tie" if self.is_near_tie else "NO near-tie"
        return f"{where}: gap {self.gap.gap:.1e}, its token has rank {self.gap.rank} ({kind})"


@dataclass(frozen=True, slots=True)
class Line:
    """One backend on one work."""

    work: str
    backend: str
    speculate: str | None
    """Of ours."""
    questions: int
    batch_size: str
    stored: bool
    """Whether it was measured on another day."""
    wall: float
    cpu: float
    counts: GenerationCounts
    peak_mlx_bytes: int | None
    peak_rss_bytes: int
    self_test_wall: float | None
    cpu_ratio: float | None
    """CPU seconds of this backend over those of our first line; None without one. As for `wall_ratio`."""
    wall_ratio: float | None
    same_prompts: bool | None
    """Whether the prompts have as many tokens as ours."""
    differences: tuple[Difference, ...] | None
    """From the texts of our first line; None for that one."""

    @property
    def name(self) -> str:
        """For the table."""
        name = (
            self.backend if self.speculate in {None, "off"} else f"{self.backend}, speculate {self.speculate}"
        )
        return f"{name} (stored)" if self.stored else name

    @property
    def num_unexplained(self) -> int:
        """Differences that rounding does not explain."""
        return sum(not one.is_near_tie for one in self.differences or ())


def make_line(
    work: str,
    found: GenerationMeasurement,
    ours: GenerationMeasurement | None,
    differences: Sequence[Difference],
    *,
    backend: str,
    speculate: str | None,
    batch_size: str,
    stored: bool = False,
) -> Line:
    """One line of the table.

    Args:
        work: its name.
        found: what was measured.
        ours: the same of our first line; None: it was not asked for.
        differences: of the texts from ours.
        backend: its name.
        speculate: of ours, whether it drafted tokens.
        batch_size: rows that it was asked to compute together.
        stored: whether it was measured on another day.
    """
    return Line(
        work=work,
        backend=backend,
        speculate=speculate,
        questions=len(found.answers),
        batch_size=batch_size,
        stored=stored,
        wall=found.wall,
        cpu=found.cpu,
        counts=found.counts,
        peak_mlx_bytes=found.peak_mlx_bytes,
        peak_rss_bytes=found.peak_rss_bytes,
        self_test_wall=found.self_test_wall,
        cpu_ratio=None if ours is None else found.cpu / ours.cpu,
        wall_ratio=None if ours is None else found.wall / ours.wall,
        same_prompts=None if ours is None else found.counts.prompt_tokens == ours.counts.prompt_tokens,
        differences=None if ours is None or ours is found else tuple(differences),
    )


def table(lines: Sequence[Line]) -> str:
    """What each backend computed for the same prompts, in what time, and whether the texts are equal."""
    headers = ["work", "backend", "questions", "rows", "prompt tokens", "unique", "computed", "padding"]
    headers += ["generated", "discarded", "forwards", "CPU s", "CPU / ours", "wall s", "wall / ours"]
    headers += ["MLX peak", "process peak", "texts equal", "near-ties", "others"]
    return tabulate([_row(line) for line in lines], headers, disable_numparse=True, stralign="right")


def _row(line: Line) -> list[Any]:
    counts, differences = line.counts, line.differences
    equal = "" if differences is None else f"{line.questions - len(differences)} of {line.questions}"
    near = sum(one.is_near_tie for one in differences or ())
    return [
        line.work,
        line.name,
        line.questions,
        line.batch_size if counts.peak_rows is None else counts.peak_rows,
        f"{counts.prompt_tokens:,}" + ("" if line.same_prompts in {None, True} else " (others!)"),
        "" if counts.unique_tokens is None else f"{counts.unique_tokens:,}",
        f"{counts.prefill_tokens:,}",
        "with them" if counts.prefill_padding is None else f"{counts.prefill_padding:,}",
        f"{counts.generated_tokens:,}",
        f"{counts.discarded_tokens:,}",
        f"{counts.prefill_forwards:,} + {counts.steps:,}",
        f"{line.cpu:.1f}",
        "" if line.cpu_ratio is None else f"{line.cpu_ratio:.2f}",
        f"{line.wall:.1f}",
        "" if line.wall_ratio is None else f"{line.wall_ratio:.2f}",
        "" if line.peak_mlx_bytes is None else f"{line.peak_mlx_bytes / 1e9:.2f} GB",
        f"{line.peak_rss_bytes / 1e9:.2f} GB",
        equal,
        "" if differences is None else near,
        "" if differences is None else line.num_unexplained,
    ]


def speculation_table(lines: Sequence[Line]) -> str:
    """What drafting has saved; ratios below one are savings."""
    headers = ["work", "speculate", "drafted", "accepted", "steps", "tokens a step", "steps / first"]
    headers += ["CPU / first", "wall / first", "texts equal"]
    ours = [line for line in lines if line.backend == "ours"]
    first: dict[str, Line] = {}
    for line in ours:
        first.setdefault(line.work, line)
    rows = [_speculation_row(line, first[line.work]) for line in ours]
    return tabulate(rows, headers, disable_numparse=True, stralign="right")


def _speculation_row(line: Line, first: Line) -> list[Any]:
    counts = line.counts
    return [
        line.work,
        line.speculate,
        f"{counts.drafted_tokens:,}",
        f"{counts.accepted_tokens:,}",
        f"{counts.steps:,}",
        f"{(counts.generated_tokens + counts.discarded_tokens) / max(counts.steps, 1):.2f}",
        f"{counts.steps / max(first.counts.steps, 1):.3f}",
        f"{line.cpu / first.cpu:.3f}",
        f"{line.wall / first.wall:.3f}",
        "" if line.differences is None else f"{line.questions - len(line.differences)} of {line.questions}",
    ]


def differences_text(lines: Sequence[Line]) -> str:
    """A line for each text that is not ours."""
    return "\n".join(
        f"{line.work}, {line.name}, {difference}" for line in lines for difference in line.differences or ()
    )
