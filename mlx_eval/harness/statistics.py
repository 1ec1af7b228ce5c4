"""Counts and times of a run, and what it had to warn about. Knows numbers only."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RunStatistics:
    """Grows while a backend works."""

    requests: Counter[str] = field(default_factory=Counter)
    """By lm-eval's request type."""
    tokens: Counter[str] = field(default_factory=Counter)
    """`naive`: a pass of its own for each request; `computed`, `padding`, `prompt`, `generated`."""
    forwards: int = 0
    """Scoring batches."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by stage."""
    notes: Counter[str] = field(default_factory=Counter)
    """Each thing worth a warning and how many requests it concerns."""

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time that the block takes to `stage`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start

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
            "seconds": {stage: round(value, 3) for stage, value in self.seconds.items()},
            "warnings": [{"text": text, "requests": count} for text, count in self.notes.items()],
        }
