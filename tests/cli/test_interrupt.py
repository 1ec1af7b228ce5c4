"""Ctrl-C while the program is in a C call, where Python itself cannot be interrupted.

The call is a second lock of a mutex: it never ends, costs nothing, and unlike `sleep` no signal cuts it short.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mlx_eval.cli.interrupt import GRACE_SECONDS, INTERRUPTED, prompt_interrupt

PROMPT_SECONDS = 10.0
"""What `within seconds` means on a busy machine."""
SHORT_GRACE = 0.3
PRELUDE = """
import ctypes, signal, sys, time
from mlx_eval.cli import interrupt
from mlx_eval.cli.interrupt import prompt_interrupt

def block():
    lib = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(256)
    lib.pthread_mutex_init(mutex, None)
    lib.pthread_mutex_lock(mutex)
    print("ready", flush=True)
    lib.pthread_mutex_lock(mutex)

def no_exception():
    # Ctrl-C just before the second lock would end the program as usual; this way it is always in the call
    signal.signal(signal.SIGINT, lambda *_: None)
"""


def heed_interrupts() -> None:
    """A shell that runs the tests in the background has its children ignore Ctrl-C: not this one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def program(code: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program that has printed `ready`; it is killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,  # noqa: PLW1509  (one call, before anything else runs)
    )
    with process:
        assert process.stdout is not None
        try:
            first = process.stdout.readline()
            assert first == "ready\n", process.communicate()[1]
            yield process
        finally:
            process.kill()


def test_a_blocked_program_ends_soon_with_one_line() -> None:
    code = "no_exception()\nwith prompt_interrupt(lambda: 'stopped; nothing was saved'): block()"
    with program(code) as process:
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PROMPT_SECONDS)
        assert time.monotonic() - sent > 0.9 * GRACE_SECONDS, "it has its moment to end by itself"
    assert (process.returncode, out, err) == (INTERRUPTED, "", "mlx_eval: stopped; nothing was saved\n")


def test_a_blocked_command_says_that_nothing_was_written() -> None:
    code = (
        "from mlx_eval.cli import doctor, main\n"
        f"interrupt.GRACE_SECONDS = {SHORT_GRACE}\n"
        "doctor.run = lambda arguments: block()\n"
        "no_exception()\n"
        "sys.exit(main.main(['doctor']))"
    )
    with program(code) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PROMPT_SECONDS)
    expected = "mlx_eval: interrupted; no results were written\n"
    assert (process.returncode, out, err) == (INTERRUPTED, "", expected)


def test_a_program_that_ends_by_itself_is_left_alone() -> None:
    code = (
        f"interrupt.GRACE_SECONDS = {SHORT_GRACE}\n"
        "try:\n"
        "    with prompt_interrupt(lambda: 'by force'):\n"
        "        print('ready', flush=True)\n"
        "        time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        f"    time.sleep({3 * SHORT_GRACE})\n"
        "    print('closed everything')\n"
    )
    with program(code) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PROMPT_SECONDS)
    assert (process.returncode, out, err) == (0, "closed everything\n", "")


def test_other_signals_do_not_end_it_and_ctrl_c_still_does() -> None:
    code = (
        f"interrupt.GRACE_SECONDS = {SHORT_GRACE}\n"
        "no_exception()\n"
        "for number in (signal.SIGUSR1, signal.SIGWINCH): signal.signal(number, lambda *_: None)\n"
        "with prompt_interrupt(lambda: 'stopped'): block()"
    )
    with program(code) as process:
        for number in (signal.SIGUSR1, signal.SIGWINCH):
            process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=5 * SHORT_GRACE)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PROMPT_SECONDS)
    assert (process.returncode, err) == (INTERRUPTED, "mlx_eval: stopped\n")


def test_without_it_the_call_would_go_on() -> None:
    """What the other tests rest on: Python alone does not get out of this call."""
    with program("block()") as process:
        time.sleep(0.5)  # it has said that it is about to begin
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1)


def _open_files() -> list[str]:
    return os.listdir("/dev/fd")


def _watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "interrupt"]


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals are the main thread's"
)
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(fails: bool) -> None:
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        files = _open_files()
        try:
            with prompt_interrupt(lambda: "unused"):
                assert len(_watchers()) == 1
                if fails:
                    raise ValueError("as an evaluation may")
        except ValueError:
            assert fails
        assert _watchers() == []
        assert len(_open_files()) == len(files)
        assert signal.set_wakeup_fd(before) == writer.fileno(), "the one before is put back"
    finally:
        signal.set_wakeup_fd(before)
        reader.close()
        writer.close()


def test_in_another_thread_it_does_nothing() -> None:
    """Python takes signals in its main thread only, and refuses set_wakeup_fd elsewhere."""
    seen: list[int] = []

    def work() -> None:
        with prompt_interrupt(lambda: "unused"):
            seen.append(len(_watchers()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [0]
