"""Keeps lm-eval from saying what is no news to anyone. Changes nothing that it does."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SAID_OF_EVERY_LOADER = "Custom kwargs"
"""How lm-eval's remark on tasks with a loader of their own begins, which it makes whatever is right or wrong."""


@contextmanager
def quiet_harness() -> Iterator[None]:
    """While the block runs, lm-eval's idle remarks and git's complaint do not reach the terminal."""
    task_logger = logging.getLogger("lm_eval.api.task")

    def is_news(record: logging.LogRecord) -> bool:
        return SAID_OF_EVERY_LOADER not in record.getMessage()

    task_logger.addFilter(is_news)
    try:
        with _silent_git():
            yield
    finally:
        task_logger.removeFilter(is_news)


@contextmanager
def _silent_git() -> Iterator[None]:
    """Outside a git repository, let `git` fail without a word.

    lm-eval asks git for a revision at the end of each run, and outside a repository git writes "fatal" on
    the terminal, which reads as a failed run.
    """
    folder = Path.cwd()
    if any((parent / ".git").exists() for parent in (folder, *folder.parents)):
        yield
        return
    before = os.environ.get("PATH", "")
    with tempfile.TemporaryDirectory(prefix="mlx_eval_") as shadow:
        git = Path(shadow) / "git"
        git.write_text("#!/bin/sh\nexit 128\n", encoding="utf-8")
        git.chmod(0o755)
        os.environ["PATH"] = f"{shadow}{os.pathsep}{before}"
        try:
            yield
        finally:
            os.environ["PATH"] = before
