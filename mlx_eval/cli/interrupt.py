"""Makes Ctrl-C end the program within seconds, also while MLX computes a long batch.

Python raises KeyboardInterrupt only between two of its own steps, and one evaluation by MLX can take
minutes on a CPU. A thread is woken by the signal itself, gives the program a moment to end on its own
and ends it otherwise.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

GRACE_SECONDS: Final = 2.0
"""Time to end on its own: enough to close files and databases."""

INTERRUPTED: Final = 130
"""Exit status of a program ended by Ctrl-C: 128 and the signal's number."""


@contextmanager
def prompt_interrupt(message: Callable[[], str]) -> Iterator[None]:
    """While the block runs, Ctrl-C ends the program soon.

    Args:
        message: gives what is printed on stderr when the program has to be ended by force.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    finished = threading.Event()

    def watch() -> None:
        while signals := ours.recv(1):
            if signals[0] == signal.SIGINT and not finished.wait(GRACE_SECONDS):
                try:
                    print(f"mlx_eval: {message()}", file=sys.stderr, flush=True)
                finally:  # it ends, whatever the message ran into
                    os._exit(INTERRUPTED)

    thread = threading.Thread(target=watch, name="interrupt", daemon=True)
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        signal.set_wakeup_fd(before)
        theirs.close()
        thread.join()
        ours.close()
