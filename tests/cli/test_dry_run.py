"""`run --dry_run`: what is printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Command


@pytest.mark.usefixtures("own_tasks")
def test_figures_sharing_and_time_are_printed(command: Command) -> None:
    done = command("run", "--preset", "demo", "--limit", "4", "--dry_run")
    assert done.status == 0
    assert "| loglikelihood " in done.out
    assert "generate_until: " in done.out
    assert "sharing: prefixes of any length" in done.out
    assert "time: about " in done.out
    assert "the answers to be generated not counted" in done.out


@pytest.mark.usefixtures("own_tasks")
def test_without_weights_nothing_is_measured(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_EVAL_CACHE", str(tmp_path))
    done = command("run", "--preset", "demo", "--limit", "4", "--dry_run", "--no_weights")
    assert done.status == 0
    assert "sharing: not tested" in done.out
    assert "time: not measured" in done.out


def test_no_weights_alone_is_refused(command: Command) -> None:
    done = command("run", "--preset", "demo", "--no_weights")
    assert done.status != 0
    assert "--no_weights goes with --dry_run only" in done.err
