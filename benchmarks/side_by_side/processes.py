"""Runs a module of this folder in a process of its own, with so many threads. Knows nothing of what it does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.side_by_side.works import QUIET


def in_own_process(module: str, asked: Any, threads: int) -> Any:
    """Call `python -m module ASKED.json FOUND.json`; what it prints goes to the standard error.

    Args:
        module: reads the first file and writes the second.
        asked: what the first file holds, as far as JSON can.
        threads: of every library that takes them from the environment.

    Returns:
        What the second file holds.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    number = str(threads)
    environment = {**os.environ, **QUIET, "OPENBLAS_NUM_THREADS": number, "OMP_NUM_THREADS": number}
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder, "asked.json"), Path(folder, "found.json")
        question.write_text(json.dumps(asked), encoding="utf-8")
        command = [sys.executable, "-m", module, str(question), str(answer)]
        subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
        return json.loads(answer.read_text(encoding="utf-8"))
