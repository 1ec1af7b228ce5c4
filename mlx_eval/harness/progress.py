"""A progress bar that counts tokens and shows the time left, on stderr, only on a terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from tqdm import tqdm


class TokenProgress:
    """A context manager around one bar."""

    def __init__(self, name: str, total: int, disable: bool = False, is_limit: bool = False) -> None:
        """Prepare a bar.

        Args:
            name: shown in front.
            total: tokens of the whole work.
            disable: show nothing.
            is_limit: whether `total` is only an upper bound, as in generation; the bar then shows no share.
        """
        self._bar: tqdm[None] = tqdm(
            total=None if is_limit else total,
            desc=name,
            unit="tok",
            unit_scale=True,
            dynamic_ncols=True,
            disable=True if disable else None,  # None: off unless stderr is a terminal
        )

    def add(self, count: int) -> None:
        """Count tokens as done."""
        self._bar.update(count)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
