"""Write the Metal source of every kernel as MLX makes it: `python scripts/export_kernels.py FOLDER [--compile]`.

Of each kernel, type and shape that `tests/kernels/examples.py` calls, one `.metal` file that stands for itself, with
the header that MLX puts before it. Works without Metal. `--compile` runs Apple's compiler on each, for which Xcode's
Metal toolchain is needed; every file that it refuses is named, and the status is 1.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import mlx

from tests.kernels.examples import examples
from tests.msl.build import PRELUDE
from tests.msl.exported import exported

STANDARD: Final = "metal3.1"
"""The oldest that MLX compiles kernels with: that of macOS 14."""
FLAGS: Final = ("-fno-fast-math", "-Wall", "-Wno-c++17-extensions", "-Wno-c++20-extensions")
"""Exact arithmetic, as MLX asks for; and the warnings that MLX's own headers do without."""
LONGEST_NAME: Final = 100
"""Of a file, in letters: names of kernels hold all their types and may be longer than a file system allows."""


class Kernel(NamedTuple):
    """One text of one kernel."""

    file_name: str
    text: str


def kernels() -> Iterator[Kernel]:
    """Every different text, once."""
    seen = set()
    for example in examples():
        for dispatch in example.dispatches():
            generated = exported(dispatch)
            if generated.text in seen:
                continue
            seen.add(generated.text)
            digest = hashlib.sha256(generated.text.encode()).hexdigest()[:8]
            yield Kernel(f"{generated.function[:LONGEST_NAME]}-{digest}.metal", PRELUDE + generated.text)


def include_folder() -> Path:
    """Where MLX's wheel has its Metal headers.

    Raises:
        FileNotFoundError: there are none.
    """
    name = PRELUDE.split('"')[1]
    for folder in mlx.__path__:
        if (Path(folder) / "include" / name).is_file():
            return Path(folder) / "include"
    raise FileNotFoundError(f"MLX is installed without {name}")


def write(folder: Path) -> list[Path]:
    """The files, made in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for kernel in kernels():
        paths.append(folder / kernel.file_name)
        paths[-1].write_text(kernel.text, encoding="utf-8")
    return paths


def refused(
    paths: Sequence[Path], compiler: Sequence[str] = ("xcrun", "-sdk", "macosx", "metal")
) -> list[Path]:
    """Those that the compiler does not take; what it says goes to stderr."""
    options = [f"-std={STANDARD}", *FLAGS, "-c", f"-I{include_folder()}"]
    faulty = []
    for path in paths:
        command = [*compiler, *options, str(path), "-o", str(path.with_suffix(".air"))]
        if subprocess.run(command, check=False).returncode:
            faulty.append(path)
    return faulty


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the Metal source of every kernel as MLX makes it.")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--compile", action="store_true", help="run Apple's compiler on each file")
    options = parser.parse_args(arguments)
    paths = write(options.folder)
    print(f"{len(paths)} kernels in {options.folder}")
    if not options.compile:
        return 0
    faulty = refused(paths)
    for path in faulty:
        print(f"refused: {path}", file=sys.stderr)
    print(f"{len(paths) - len(faulty)} of {len(paths)} compiled as {STANDARD}")
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
