"""Runs the command line inside the test process, with the package's own tasks only."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from mlx_eval.cli.main import main


class Finished(NamedTuple):
    """A command line that has run."""

    status: int
    out: str
    err: str


Command = Callable[..., Finished]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Run the command line on the words given; environment and logging are put back afterwards."""
    environment = dict(os.environ)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def run(*words: str) -> Finished:
        capsys.readouterr()
        try:
            status = main([str(word) for word in words])
        except SystemExit as error:  # argparse ends the program by itself
            status = int(error.code or 0)
        out, err = capsys.readouterr()
        return Finished(status, out, err)

    yield run
    os.environ.clear()
    os.environ.update(environment)
    root.handlers[:], root.level = handlers, level


@pytest.fixture
def own_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave lm-eval's 14,000 task files unread: the demo's and those of --include_path are enough."""
    from mlx_eval.harness import prepare

    manager = prepare.task_manager
    monkeypatch.setattr(
        prepare, "task_manager", lambda path, **rest: manager(path, include_defaults=False, **rest)
    )
