"""Keeps a Mac from going to sleep while something long is computed. Knows `caffeinate`, nothing of the work.

The display may go dark, and closing the lid of a notebook on battery still sends it to sleep.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

logger = logging.getLogger(__name__)

PROGRAM: Final = "caffeinate"
END_SECONDS: Final = 2.0
"""Time that the program has to end when asked."""
SAID: Final = "keeping this Mac awake until it is done"


@contextmanager
def kept_awake(on_stage: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """While the block runs, macOS does not go to sleep for want of a user; elsewhere nothing is done.

    The program that holds it awake ends with the block, and by itself should this process be killed.

    Args:
        on_stage: told once, in one line, when there is something to tell.
    """
    program = shutil.which(PROGRAM) if sys.platform == "darwin" else None
    process = None if program is None else _start(program)
    if process is None:
        yield
        return
    try:
        on_stage(SAID)
        yield
    finally:
        _end(process)


def _start(program: str) -> subprocess.Popen[bytes] | None:
    """Start it; None: the system refuses, which is no reason not to compute."""
    try:
        return subprocess.Popen(
            [
                program,
                "-i",
                "-w",
                str(os.getpid()),
            ],  # -i: no idle sleep, -w: for as long as that process lives
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        logger.info("%s does not start: %s", program, error)
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
