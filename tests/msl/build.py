"""Compiles translated kernels into libraries, and keeps them in a folder that processes may share.

Knows compilers and files; nothing of buffers or launches.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from tests.msl.translate import Translated

CACHE_VARIABLE: Final = "MLX_EVAL_MSL_CACHE"
"""Environment variable: the folder of compiled kernels."""
CPP: Final = Path(__file__).parent / "cpp"
KEPT_DAYS: Final = 3
"""A library that nobody used for so long is deleted."""
PRELUDE: Final = '#include "mlx/backend/metal/kernels/utils.h"\n'
"""MLX puts this header before every kernel that `mx.fast.metal_kernel` makes."""

Fill = Literal["pattern", "zero"]
"""What a thread's own variables hold before the kernel sets them: bytes 0xFE, or zeros."""

_COMPILERS: Final = ("g++", "clang++")
"""Looked for in this order, where the usual variable CXX names none."""
_CHECKS: Final = (
    "shift",
    "signed-integer-overflow",
    "integer-divide-by-zero",
    "bounds",
    "alignment",
    "float-cast-overflow",
    "return",
    "unreachable",
)
_KERNEL_FLAGS: Final = (
    "-std=c++17",
    "-O1",
    "-g1",
    "-gdwarf-4",
    "-fPIC",
    "-w",
    "-nostdinc++",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-strict-aliasing",
    "-fno-finite-loops",  # an endless loop must end as a finding, not as undefined behaviour
    "-fno-math-errno",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-fstack-clash-protection",  # a frame of any size meets the guard below the stack
    "-fsanitize=thread",
    "-fsanitize=" + ",".join(_CHECKS),
)
_BY_COMPILER: Final = {
    "g++": ("-fexcess-precision=16", "--param=tsan-instrument-func-entry-exit=0"),
    "clang++": (
        "-Wno-c++11-narrowing",  # -w does not silence it; the clang pass reports it, with every compiler
        *("-Xclang", "-ffloat16-excess-precision=none"),
        *("-mllvm", "-tsan-instrument-func-entry-exit=0"),
        *("-mllvm", "-tsan-instrument-read-before-write=1"),
    ),
}
_RUNTIME_FLAGS: Final = (
    "-std=c++17",
    "-O2",
    "-g1",
    "-fPIC",
    "-fno-exceptions",
    "-fvisibility=default",
    "-shared",
)


class CompileError(Exception):
    """The compiler refused a kernel; the message is its own."""


def why_not() -> str | None:
    """Why Metal source cannot be executed here; None: it can. A missing compiler is no reason, but an error."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"the emulation is written for x86-64 Linux, not {platform.machine()} {sys.platform}"
    return None


def kernel_library(kernel: Translated, *, prelude: str = PRELUDE, fill: Fill = "pattern") -> Path:
    """The library of a kernel, compiled unless it is there already.

    Raises:
        CompileError: the source is not accepted.
        RuntimeError: there is no compiler.
    """
    flags = _kernel_flags(fill)
    library = cache_folder() / (_digest(kernel.source, kernel.entry, prelude, *flags) + ".so")
    if library.exists():
        library.touch()  # it is in use
        return library
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as name:
        folder = Path(name)
        (folder / "kernel.metal").write_text(kernel.source, encoding="utf-8")
        unit = folder / "unit.cpp"
        unit.write_text(f'{prelude}#include "kernel.metal"\n{kernel.entry}', encoding="utf-8")
        compiled = folder / "kernel.o"
        _compile([*flags, "-c", str(unit)], compiled)
        # without -fsanitize: the sanitizers' own runtimes must stay out
        link = ["-shared", str(compiled), str(_runtime()), "-Wl,-rpath,$ORIGIN", "-Wl,-Bsymbolic", "-lm"]
        _compile(link, folder / "kernel.so")
        (folder / "kernel.so").replace(library)
    return library


@functools.cache
def cache_folder() -> Path:
    """The folder of compiled kernels: the variable's, else one of this user's own among the temporary files.

    Raises:
        RuntimeError: the folder belongs to somebody else.
    """
    named = os.environ.get(CACHE_VARIABLE)
    folder = Path(named) if named else Path(tempfile.gettempdir()) / f"mlx_eval_msl_{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} is not yours: set {CACHE_VARIABLE} to a folder that is")
    oldest = time.time() - KEPT_DAYS * 86_400
    for library in folder.glob("*.so"):
        try:
            if library.stat().st_mtime < oldest:
                library.unlink()
        except FileNotFoundError:  # another process was first
            continue
    return folder


@functools.cache
def _compiler() -> tuple[str, str, str]:
    """The compiler's path, its family and what it says about itself."""
    for name in filter(None, (os.environ.get("CXX"), *_COMPILERS)):
        path = shutil.which(name)
        if path is not None:
            version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
            return path, "clang++" if "clang" in version else "g++", version
    raise RuntimeError("no C++ compiler: the emulation needs g++ 12 or newer (Debian: apt-get install g++)")


def _kernel_flags(fill: Fill) -> Sequence[str]:
    folders = (CPP / "overlay", CPP / "include", _mlx_headers())
    return (
        *_KERNEL_FLAGS,
        *_BY_COMPILER[_compiler()[1]],
        f"-ftrivial-auto-var-init={fill}",
        *(f"-I{folder}" for folder in folders),
    )


@functools.cache
def _runtime() -> Path:
    """The library with the scheduler and the checks, which every kernel's library needs."""
    library = cache_folder() / f"libmsl-{_digest('runtime', *_RUNTIME_FLAGS)}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as name:
            built = Path(name) / library.name
            sources = sorted(str(path) for path in (CPP / "runtime").glob("*.cpp"))
            _compile([*_RUNTIME_FLAGS, f"-Wl,-soname,{library.name}", *sources, "-lrt"], built)
            built.replace(library)
    library.touch()
    return library


def _mlx_headers() -> Path:
    """Where the wheel of MLX keeps the headers of its Metal kernels."""
    found = importlib.util.find_spec("mlx.core")
    if found is None or found.origin is None:
        raise RuntimeError("mlx is not installed")
    return Path(found.origin).parent / "include"


def mlx_kernel(name: str) -> str:
    """The text of one of the headers in which MLX ships its own kernels."""
    return (_mlx_headers() / "mlx/backend/metal/kernels" / name).read_text(encoding="utf-8")


def _compile(arguments: Sequence[str], output: Path) -> None:
    command = [_compiler()[0], *arguments, "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(done.stderr.replace(f"{output.parent}/", ""))


def _digest(*parts: str) -> str:
    everything = hashlib.sha256(_own_digest())
    for part in (*_compiler(), *parts):
        everything.update(part.encode() + b"\0")
    return everything.hexdigest()[:24]


@functools.cache
def _own_digest() -> bytes:
    """Of all that shapes every library: this file, our headers, and MLX's by its version."""
    everything = hashlib.sha256(importlib.metadata.version("mlx").encode())
    for path in (Path(__file__), *sorted(CPP.rglob("*"))):
        if path.is_file():
            everything.update(path.name.encode() + b"\0" + path.read_bytes())
    return everything.digest()
