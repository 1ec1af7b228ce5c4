"""The sub-command `bench`: its table, its files, and what is left when it is interrupted."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mlx_eval.app.bench
from mlx_eval.app.bench import Bench, Measurement
from mlx_eval.cli import bench as module
from mlx_eval.cli.interrupt import INTERRUPTED
from mlx_eval.cli.main import interrupt_message
from mlx_eval.cli.parser import positives
from mlx_eval.errors import ModelError

WORDS = (
    "bench",
    "demo",
    "--batch_sizes",
    "1,2",
    "--prompt-lengths",
    "6",
    "--gen_tokens",
    "3",
    "--repeat",
    "1",
)


def rows(out: str) -> list[list[str]]:
    """The cells of the table, the header first."""
    lines = [line for line in out.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])]


def test_the_table_and_the_file_have_the_same_figures(command: Any, tmp_path: Path) -> None:
    target = tmp_path / "speed.json"
    status, out, err = command(*WORDS, "--json", target)
    assert (status, err) == (0, f"wrote {target}\n")
    report = json.loads(target.read_text(encoding="utf-8"))
    header, *found = rows(out)
    assert header == list(module.HEADERS)
    assert [row[:4] for row in found] == [
        ["prefill", "6", "1", "6"],
        ["", "6", "2", "12"],
        ["decode", "6", "1", "2"],
        ["", "6", "2", "4"],
        ["scoring", "6", "1", "6"],
        ["", "6", "2", "12"],
    ]
    speeds = {(one["stage"], one["batch_size"]): one["tokens_per_second"] for one in report["measurements"]}
    stages = [stage for stage in ("prefill", "decode", "scoring") for _ in range(2)]
    assert [row[4] for row in found] == [
        f"{speeds[stage, int(row[2])]:,.1f}" for stage, row in zip(stages, found, strict=True)
    ]
    assert report["command"][:5] == ["python", "-m", "mlx_eval", "bench", "demo"]


def test_the_facts_above_the_table(command: Any) -> None:
    out = command(*WORDS, "--quantize", "4", "--seed", "7").out
    facts = dict(line.split("  ", 1) for line in out.partition("\n\n")[0].splitlines())
    facts = {name: value.strip() for name, value in facts.items()}
    assert facts["model"].startswith("demo (llama, ")
    assert "4-bit" in facts["weights"]
    assert facts["runs"] == "median of 1, random prompts of seed 7, answers of 3 tokens"
    assert len(facts["fingerprint"]) == 16


def of_demo(*found: Measurement, then: BaseException | None = None) -> Any:
    """A `Bench.measurements` that gives these."""

    def measurements(self: Bench) -> Iterator[Measurement]:
        yield from found
        if then is not None:
            raise then

    return measurements


@pytest.fixture
def interrupted(command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run the command until an error comes behind the first measurement; what it gave, and its file."""

    def run(error: BaseException) -> tuple[Any, Path]:
        monkeypatch.setattr(Bench, "measurements", of_demo(PREFILL, then=error))
        target = tmp_path / "speed.json"
        return command(*WORDS, "--json", target), target

    return run


PREFILL = Measurement("prefill", 1, 6, 6, (0.5,), (0.4,), 2**23, rows_together=1)
DECODE = Measurement("decode", 8, 6, 40, (0.5,), (0.4,), 2**23, rows_together=5)
NO_MEMORY = Measurement("decode", 2, 6, problem="out of memory")


def test_cells_say_what_was_short_of_memory(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "measurements", of_demo(PREFILL, NO_MEMORY, DECODE))
    found = rows(command(*WORDS).out)[1:]
    assert found[0][4:6] == ["12.0", "0.500"]
    assert found[1] == ["decode", "6", "2", "", "out of memory", "", "", "", ""]
    assert found[2][2] == "8 (5 together)"


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (KeyboardInterrupt(), INTERRUPTED, "mlx_eval: interrupted; 1 of 6 measurements were made\n"),
        (ModelError("the model computes NaN"), 1, "mlx_eval: the model computes NaN\n"),
    ],
)
def test_what_was_measured_before_the_end_is_given(
    interrupted: Any, error: BaseException, status: int, line: str
) -> None:
    finished, target = interrupted(error)
    assert finished.status == status
    assert finished.err == f"wrote {target}\n{line}"
    assert len(rows(finished.out)) == 2
    report = json.loads(target.read_text(encoding="utf-8"))
    assert not report["complete"]
    assert [one["stage"] for one in report["measurements"]] == ["prefill"]


def test_an_interruption_before_the_first_figure_prints_no_table(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "measurements", of_demo(then=KeyboardInterrupt()))
    status, out, err = command(*WORDS)
    assert (status, out) == (INTERRUPTED, "")
    assert err == "mlx_eval: interrupted; 0 of 6 measurements were made\n"


def test_a_program_that_is_ended_by_force_gives_it_from_the_watching_thread(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C during a long batch: another thread prints, while this one is in a C call."""
    said: list[str] = []
    taken: list[argparse.Namespace] = []
    start = module.run

    def run(arguments: argparse.Namespace) -> int:
        taken.append(arguments)
        return start(arguments)

    def measurements(self: Bench) -> Iterator[Measurement]:
        yield PREFILL
        watcher = threading.Thread(target=lambda: said.append(interrupt_message(taken[0])))
        watcher.start()
        watcher.join()

    monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(Bench, "measurements", measurements)
    out = command(*WORDS).out
    assert said == ["interrupted; 1 of 6 measurements were made"]
    assert out.count("prefill") == 1, "the table is printed once"


def test_files_that_cannot_be_written_are_found_before_the_model_is_loaded(
    command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(mlx_eval.app.bench, "load_model", load)
    (tmp_path / "file").write_text("")
    for words, part in [
        (["--json", tmp_path], "it is a folder"),
        (["--json", tmp_path / "file" / "speed.json"], "give another --json"),
        (["--plot", tmp_path], "it is a folder"),
    ]:
        status, out, err = command(*WORDS, *words)
        assert (status, out, err.count("\n")) == (1, "", 1)
        assert part in err
    for name in ("matplotlib", "matplotlib.backend_bases"):
        monkeypatch.setitem(sys.modules, name, None)
    status, out, err = command(*WORDS, "--plot", tmp_path / "speed.png")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "pip install 'mlx-eval[report]'" in err


def test_a_plot_is_drawn(command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(Bench, "measurements", of_demo(PREFILL, DECODE))
    target = tmp_path / "speed.png"
    status, _, err = command(*WORDS, "--plot", target)
    assert (status, err) == (0, f"wrote {target}\n")
    assert target.read_bytes().startswith(b"\x89PNG")


def test_wrong_usage(command: Any) -> None:
    for words, status, part in [
        ([], 1, "no model is given"),
        (["demo", "--batch_sizes", "1,0"], 2, "--batch_sizes: 0 is not a whole number of 1 or more"),
        (["demo", "--batch_sizes", "1,,2"], 2, "--batch_sizes:  is not"),
        (["demo", "--prompt_lengths", "many"], 2, "--prompt_lengths: many is not"),
        (["demo", "--gen_tokens", "1"], 2, "--gen_tokens: 1 is not a whole number of 2 or more"),
        (["demo", "--repeat", "0"], 2, "--repeat: 0 is not"),
        (["demo", "--prompt_lengths", "600"], 1, "do not fit the model's window of 512"),
        (["demo", "--batch-size", "1"], 2, "did you mean --batch_sizes?"),
    ]:
        finished = command("bench", *words)
        assert (finished.status, finished.out, finished.err.count("\n")) == (status, "", 1), words
        assert part in finished.err


def test_a_number_that_is_given_twice_is_measured_once() -> None:
    assert positives("8, 1,8") == (8, 1)
