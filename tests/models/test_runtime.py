"""Which BLAS MLX computes with, and what is said of the device.

The BLAS is chosen once in a process, so those tests run one each and ask the dynamic linker what it bound.
"""

from __future__ import annotations

import builtins
import ctypes
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_eval.models import runtime
from mlx_eval.models.runtime import BUILT_IN_BLAS, OPENBLAS

PRODUCT = """
import mlx.core as mx
mx.set_default_device(mx.Device(mx.cpu))
ones = mx.ones((8, 8))
mx.eval(ones @ ones)
"""


def has_openblas() -> bool:
    try:
        ctypes.CDLL(OPENBLAS)  # without global symbols: changes nothing for this process
    except OSError:
        return False
    return True


needs_openblas = pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc" or not has_openblas(),
    reason=f"needs Linux with glibc, whose linker reports what it binds, and {OPENBLAS}",
)


def bound(code: str, tmp_path: Path) -> tuple[str, set[str]]:
    """What `code` prints, and the libraries in which MLX found its matrix product."""
    report = tmp_path / "bindings"
    finished = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LD_DEBUG": "bindings", "LD_DEBUG_OUTPUT": str(report)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = "\n".join(path.read_text(errors="replace") for path in tmp_path.glob("bindings.*"))
    pattern = r"binding file \S*libmlx\S* \[0\] to (\S+) \[0\]: normal symbol `cblas_sgemm'"
    return finished.stdout.strip(), set(re.findall(pattern, lines))


@needs_openblas
@pytest.mark.parametrize(
    "first",
    [
        "from mlx_eval.models.runtime import preload_blas; print(preload_blas())",
        "import mlx_eval.models.precision; print(mlx_eval.models.runtime.preload_blas())",
    ],
)
def test_before_mlx_its_products_are_openblas_ones(first: str, tmp_path: Path) -> None:
    printed, libraries = bound(f"{first}\n{PRODUCT}", tmp_path)
    assert printed == OPENBLAS
    assert {Path(library).name for library in libraries} == {OPENBLAS}


@needs_openblas
def test_after_mlx_it_is_too_late_and_said_so(tmp_path: Path) -> None:
    last = "from mlx_eval.models import runtime as r; print(r.preload_blas(), r.device().blas)"
    printed, libraries = bound(f"{PRODUCT}\n{last}", tmp_path)
    assert printed == f"None {BUILT_IN_BLAS}"
    assert libraries
    assert OPENBLAS not in {Path(library).name for library in libraries}


def uncached_preload() -> str | None:
    """`preload_blas` as in a new process."""
    found: str | None = runtime.preload_blas.__wrapped__()
    return found


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A Linux where mlx is not imported yet and loading a library is only noted."""
    noted: list[tuple[Any, ...]] = []
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode=0: noted.append((name, mode)))
    return noted


def test_openblas_is_loaded_with_global_symbols(loads: list[tuple[Any, ...]]) -> None:
    assert uncached_preload() == OPENBLAS
    assert loads == [(OPENBLAS, ctypes.RTLD_GLOBAL)]


def test_nothing_is_loaded_when_mlx_is_there(
    loads: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", object())
    assert uncached_preload() is None
    assert loads == []


@pytest.mark.parametrize(("system", "blas"), [("darwin", "Accelerate"), ("win32", None)])
def test_nothing_is_loaded_elsewhere(
    loads: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, system: str, blas: str | None
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    assert uncached_preload() == blas
    assert loads == []


def test_without_the_library_mlx_keeps_its_own(
    loads: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str, mode: int = 0) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert uncached_preload() is None


def test_the_device_is_the_one_that_mlx_uses() -> None:
    import mlx.core as mx

    found = runtime.device()
    assert found.is_metal == (found.kind == "metal") == (mx.default_device() == mx.Device(mx.gpu))
    assert found.name
    assert found.blas in ("Accelerate", OPENBLAS, BUILT_IN_BLAS)
    assert found.memory_bytes > 2**28, "a machine that imports MLX has more than 256 MiB"
    assert found.os.startswith("macOS " if sys.platform == "darwin" else platform.system())


def test_no_blas_is_named_as_the_built_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "preload_blas", lambda: None)
    assert runtime.device.__wrapped__().blas == BUILT_IN_BLAS


def test_a_processor_that_the_system_does_not_describe(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: Any, **__: Any) -> None:
        raise PermissionError("/proc/cpuinfo")

    monkeypatch.setattr(builtins, "open", closed)
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert runtime._processor_name() == "riscv64"


@pytest.mark.parametrize(
    ("kind", "blas", "installed", "problem"),
    [
        ("metal", BUILT_IN_BLAS, False, None),
        ("cpu", "Accelerate", False, None),
        ("cpu", OPENBLAS, True, None),
        ("cpu", BUILT_IN_BLAS, False, runtime.BLAS_HINT),
        ("cpu", BUILT_IN_BLAS, True, runtime.MLX_WAS_FIRST),
    ],
)
def test_what_is_said_of_a_slow_blas(
    monkeypatch: pytest.MonkeyPatch, kind: str, blas: str, installed: bool, problem: str | None
) -> None:
    def load(name: str, mode: int = 0) -> None:
        if not installed:
            raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(runtime, "device", lambda: runtime.Device("Chip", kind, 2**33, "Linux 6", blas))
    assert runtime.blas_problem() == problem
