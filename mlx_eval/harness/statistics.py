"""Counts and times of a run, and what it had to warn about. Knows numbers and names of stages only."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from mlx_eval.engine.counts import DecodeCounts

if TYPE_CHECKING:
    from mlx_eval.engine.batches import ScoringPlan

logger = logging.getLogger(__name__)

FINGERPRINT: Final = "fingerprint"
"""The one stage of a backend that answers no request: what lm-eval is told of the weights in the end."""
ASKED: Final = "asked"
"""The moment at which lm-eval's first requests came."""
ANSWERED: Final = "answered"
"""The moment at which its last ones were answered."""
FIRST_BATCH: Final = "first_batch"
"""The moment at which the first batch was computed."""


@dataclass(slots=True)
class Stopwatch:
    """Where the time of a run went."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by stage."""
    moments: dict[str, float] = field(default_factory=dict)
    """When something happened, as `time.perf_counter` counts."""

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time that the block takes to `stage`; the first one to begin and the last to end are marked."""
        start = time.perf_counter()
        if stage != FINGERPRINT:
            self.moments.setdefault(ASKED, start)
        try:
            yield
        finally:
            end = time.perf_counter()
            self.seconds[stage] = self.seconds.get(stage, 0.0) + end - start
            if stage != FINGERPRINT:
                self.moments[ANSWERED] = end

    def mark(self, moment: str) -> None:
        """Remember that `moment` is now, unless it has been before."""
        self.moments.setdefault(moment, time.perf_counter())


@dataclass(slots=True)
class RunStatistics(Stopwatch):
    """Grows while a backend works."""

    requests: Counter[str] = field(default_factory=Counter)
    """By lm-eval's request type."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Of scoring. `naive`: a pass of its own for each request; `unique`, `computed`, `padding`."""
    forwards: int = 0
    """Forward passes of scoring."""
    peak_kv_bytes: int = 0
    """The most KV that scoring was planned to hold at once."""
    decoding: DecodeCounts = field(default_factory=DecodeCounts)
    notes: Counter[str] = field(default_factory=Counter)
    """Each thing worth a warning and how many requests it concerns."""

    def count_plan(self, plan: ScoringPlan) -> None:
        """Add what a plan computes."""
        self.tokens.update(
            naive=plan.naive_tokens,
            unique=plan.unique_tokens,
            computed=plan.planned_tokens,
            padding=plan.padding,
        )
        self.forwards += plan.num_forwards
        self.peak_kv_bytes = max(self.peak_kv_bytes, plan.peak_kv_bytes)

    def note(self, text: str, count: int = 1) -> None:
        """Remember that `count` requests are concerned by what `text` says; log it once a call."""
        if count:
            self.notes[text] += count
            logger.warning("%d %s: %s", count, "request" if count == 1 else "requests", text)

    def as_dict(self) -> dict[str, Any]:
        """For run.json."""
        return {
            "requests": dict(self.requests),
            "tokens": dict(self.tokens),
            "forwards": self.forwards,
            "peak_kv_bytes": self.peak_kv_bytes,
            "decoding": self.decoding.as_dict(),
            "seconds": {stage: round(value, 3) for stage, value in self.seconds.items()},
            "warnings": [{"text": text, "requests": count} for text, count in self.notes.items()],
        }
