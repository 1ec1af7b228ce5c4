"""A progress bar that counts tokens and shows the time left, on stderr, only on a terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from tqdm import tqdm


class TokenProgress:
    """A context manager around one bar."""

    def __init__(self, name: str, total: int, disable: bool = False) -> None:
        """Prepare a bar.

        Args:
            name: shown in front.
            total: tokens of the whole work, or the most that it can be.
            disable: show nothing.
        """
        self._bar: Any = tqdm(
            total=total,
            desc=name,
            unit="tok",
            unit_scale=True,
            dynamic_ncols=True,
            disable=True if disable else None,  # None: off unless stderr is a terminal
        )

    def add(self, count: int) -> None:
        """Count tokens as done."""
        self._bar.update(count)

    def drop(self, count: int) -> None:
        """Take off the total what turns out not to be needed."""
        if self._bar.total is not None:
            self._bar.total -= count

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
