"""The program around the sub-commands: what is imported, what is printed where, exit statuses, signals."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from mlx_eval.cli import doctor
from mlx_eval.cli.main import COLLECTOR_THRESHOLD, COMMANDS, build_parser, main
from mlx_eval.errors import InvalidOptionError, MissingDependencyError, ModelError

HEAVY = ("mlx", "mlx_lm", "transformers", "lm_eval", "datasets", "torch", "numpy", "huggingface_hub", "gguf")
PROMPT_SECONDS = 10.0
"""What `within seconds` means for Ctrl-C on a busy machine; two seconds of it are the program's own grace."""


def program(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "mlx_eval", *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, check=False, cwd=cwd)


def test_without_arguments_three_commands_are_shown(command: Any) -> None:
    finished = command()
    assert finished.status == 0
    shown = re.findall(r"^  python -m mlx_eval (\w+)", finished.out, re.MULTILINE)
    assert shown == ["run", "run", "doctor"]
    assert finished.err == ""


def test_help_lists_every_command(command: Any) -> None:
    finished = command("--help")
    assert finished.status == 0
    for name in COMMANDS:
        assert re.search(rf"^    {name.replace('_', '-')}\b", finished.out, re.MULTILINE), name


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "lm_eval"])
def test_help_of_a_command_has_examples(command: Any, name: str) -> None:
    finished = command(name, "--help")
    assert finished.status == 0
    examples = finished.out.partition("examples:\n")[2]
    assert f"  python -m mlx_eval {name}" in examples


def test_examples_in_help_can_be_parsed() -> None:
    import shlex

    from mlx_eval.cli.parser import parse

    parser, commands = build_parser()
    lines = [
        line.strip().removeprefix("python -m mlx_eval ")
        for text in (c.epilog or "" for c in commands.values())
        for line in text.splitlines()
        if line.startswith("  python -m mlx_eval")
    ]
    assert len(lines) > 10
    for line in lines:
        words = shlex.split(re.split(r" {3,}|>", line)[0])  # a remark follows spaces, a file >
        assert parse(parser, commands, words).command == words[0]


def test_commands_are_told_when_the_program_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words given from Python begin now; a program began as long ago as it has computed."""
    began: list[float] = []
    thresholds: list[int] = []

    def summarize(arguments: Any) -> int:
        began.append(arguments.began)
        return 0

    monkeypatch.setattr("mlx_eval.cli.summarize.run", summarize)
    monkeypatch.setattr(sys, "argv", ["mlx_eval", "summarize", "folder"])
    monkeypatch.setattr("mlx_eval.cli.main.time.process_time", lambda: 5.0)
    monkeypatch.setattr("mlx_eval.cli.main.time.perf_counter", lambda: 100.0)
    monkeypatch.setattr("mlx_eval.cli.main.gc.set_threshold", thresholds.append)
    assert main(["summarize", "folder"]) == 0
    assert thresholds == []  # the collector of a program that calls us is its own affair
    assert main() == 0
    assert began == [100.0, 95.0]
    assert thresholds == [COLLECTOR_THRESHOLD]


def test_help_imports_nothing_heavy() -> None:
    """What makes --help answer in under half a second: counted, since a busy machine tells no time."""
    code = (
        "import sys, mlx_eval, mlx_eval.cli.main as m\n"
        "parser, commands = m.build_parser()\n"
        "for one in (parser, *commands.values()): one.format_help()\n"
        f"print([name for name in {HEAVY} if name in sys.modules], len(sys.modules))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    found, _, count = output.rpartition(" ")
    assert found == "[]"
    assert int(count) < 400  # 150 or so with Python's own; transformers alone brings thousands


def test_version(command: Any) -> None:
    from mlx_eval import __version__

    assert command("--version").out == f"mlx_eval {__version__}\n"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["rnu"], "invalid choice: 'rnu'"),
        (["--nothing"], "required: COMMAND"),
        (["doctor", "--modle", "x"], "did you mean --model?"),
        (["doctor", "a", "b"], "unknown argument 'b'"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(command: Any, words: list[str], part: str) -> None:
    status, out, err = command(*words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert part in err


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ModelError("no model"), 1, "no model"),
        (InvalidOptionError("no sense"), 1, "no sense"),
        (MissingDependencyError("thing", "This", "extra"), 1, "pip install 'mlx-eval[extra]'"),
        (MemoryError(), 1, "out of memory"),
        (KeyboardInterrupt(), 130, "interrupted; no results were written"),
    ],
)
def test_errors_are_one_line(
    command: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, message: str
) -> None:
    def fail(arguments: object) -> int:
        raise error

    monkeypatch.setattr(doctor, "run", fail)
    finished = command("doctor")
    assert (finished.status, finished.out, finished.err.count("\n")) == (status, "", 1)
    assert finished.err.startswith("mlx_eval: ")
    assert message in finished.err


def test_an_interrupted_run_says_what_a_cache_holds(
    command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from mlx_eval.cli import run

    def fail(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run", fail)
    words = ("run", "demo", "--tasks", "demo", "--use_cache", str(tmp_path / "a"))
    finished = command(*words)
    assert finished.status == 130
    assert "answers so far" not in finished.err, "there are none yet"
    (tmp_path / "a_rank0.db").touch()
    assert f"the answers so far are in {tmp_path}/a_rank0.db" in command(*words).err


def test_an_error_that_nobody_foresaw_is_one_line_too(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: object) -> int:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(doctor, "run", fail)
    finished = command("doctor")
    assert finished.status == 1
    assert finished.err == (
        "mlx_eval: unexpected ZeroDivisionError: division by zero; MLX_EVAL_DEBUG=1 shows where it comes from\n"
    )
    monkeypatch.setenv("MLX_EVAL_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        command("doctor")


def test_a_terminal_that_lacks_the_arrows() -> None:
    line = [sys.executable, "-m", "mlx_eval", "tasks", "--help"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    assert subprocess.run(line, capture_output=True, timeout=60, check=False, env=environment).returncode == 0
    code = "from mlx_eval.cli import main, doctor; doctor.run = lambda _: print('\u2191') or 0; main.main(['doctor'])"
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, check=False, env=environment
    )
    assert (finished.stdout, finished.stderr) == (b"?\n", b"")


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("words", [(), ("presets",), ("--help",), ("run", "--help")])
def test_a_reader_that_has_gone_is_no_error_to_show(words: tuple[str, ...], buffered: bool) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        finished = subprocess.run(
            [sys.executable, "-m", "mlx_eval", *words],
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"},
        )
    finally:
        os.close(write)
    assert finished.stderr == ""
    # argparse passes over it when it writes its help at once
    assert finished.returncode == (1 if buffered or "--help" not in words else 0)


def test_ctrl_c_ends_a_computation_within_seconds(tmp_path: Path) -> None:
    text = tmp_path / "long.txt"
    # half a minute of work at least; equal windows would be computed once only
    text.write_text(" ".join(map(str, range(60_000))))
    terminal, stderr = pty.openpty()  # on a terminal the progress bar says that the computation has begun
    termios.tcsetwinsize(stderr, (24, 80))
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_eval", "perplexity", "demo", "--text", str(text)],
        stdout=subprocess.PIPE,
        stderr=stderr,
        # a shell that runs the tests in the background has its children ignore Ctrl-C
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    os.close(stderr)
    try:
        seen = _read_until(terminal, "loglikelihood_rolling", seconds=120)
        process.send_signal(signal.SIGINT)
        sent = time.monotonic()
        process.wait(timeout=PROMPT_SECONDS)
        assert time.monotonic() - sent < PROMPT_SECONDS
        seen += _read_until(terminal, "interrupted; no results were written", seconds=1)
        assert process.returncode == 130
        assert "Traceback" not in seen
        assert process.stdout is not None
        assert process.stdout.read() == b""
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        os.close(terminal)


def _read_until(terminal: int, wanted: str, seconds: float) -> str:
    """What the terminal shows up to `wanted`, which must come in time."""
    import select

    seen = ""
    end = time.monotonic() + seconds
    while wanted not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0.0, end - time.monotonic()))
        assert ready, f"{wanted!r} did not come; seen: {seen[-500:]!r}"
        try:
            seen += os.read(terminal, 65536).decode(errors="replace")
        except OSError:  # Linux says so when the other end is closed
            break
    assert wanted in seen
    return seen


def test_the_whole_program_on_the_demo(tmp_path: Path) -> None:
    """stdout has the table and nothing else; progress is not shown where there is no terminal."""
    pytest.importorskip("lm_eval")
    finished = program("run", "--preset", "demo", "--limit", "2", "--output_path", "runs/a", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert all(line.startswith("|") for line in lines)
    assert [name for name in ("demo_choice", "demo_perplexity", "demo_sums") if name in finished.stdout]
    assert "tok/s" not in finished.stderr
    assert "WARNING" not in finished.stderr
    assert (tmp_path / "runs" / "a" / "run.json").is_file()
