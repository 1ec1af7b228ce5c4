from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.msl import build
from tests.msl.build import CompileError, kernel_library, why_not
from tests.msl.translate import Translated, translated

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

SOURCE = "[[kernel]] void f(device float* out [[buffer(0)]]) { out[0] = 1.0; }\n"
BUILD = """
import sys
from tests.msl.build import kernel_library
from tests.msl.translate import translated
print(kernel_library(translated(sys.argv[1], "f", "f")))
"""


def built_elsewhere(cache: Path, source: str = SOURCE, **variables: str) -> subprocess.Popen[str]:
    """Another process that compiles a kernel into a cache of its own."""
    environment = {**os.environ, build.CACHE_VARIABLE: str(cache), **variables}
    command = [sys.executable, "-c", BUILD, source]
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out.strip(), err


def test_processes_that_compile_the_same_kernel_at_once_share_one_library(tmp_path: Path) -> None:
    results = [finished(process) for process in [built_elsewhere(tmp_path) for _ in range(3)]]
    assert [code for code, _, _ in results] == [0, 0, 0], results
    assert len({library for _, library, _ in results}) == 1
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert [name for name in kept if not name.endswith(".so")] == []
    assert len(kept) == 2  # the kernel's and the runtime's


def test_what_does_not_compile_leaves_nothing_behind(tmp_path: Path) -> None:
    code, _, errors = finished(built_elsewhere(tmp_path, SOURCE.replace("1.0", "nonsense")))
    assert code != 0
    assert "CompileError" in errors
    assert not list(tmp_path.glob("build-*"))


def test_libraries_that_nobody_used_for_days_are_deleted(tmp_path: Path) -> None:
    old, new = tmp_path / "old.so", tmp_path / "new.so"
    for path, days in ((old, build.KEPT_DAYS + 1), (new, 1)):
        path.touch()
        os.utime(path, (time.time() - days * 86_400,) * 2)
    assert finished(built_elsewhere(tmp_path))[0] == 0
    assert not old.exists()
    assert new.exists()


def test_a_missing_compiler_is_an_error_not_a_skip(tmp_path: Path) -> None:
    code, _, errors = finished(built_elsewhere(tmp_path, PATH=str(tmp_path), CXX=""))
    assert code != 0
    assert "no C++ compiler: the emulation needs g++ 12 or newer" in errors


def test_other_machines_say_why_they_cannot_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert why_not() == "the emulation is written for x86-64 Linux, not arm64 darwin"


def test_the_real_prelude_of_mlx_is_compiled_and_its_functions_are_there() -> None:
    source = """
      [[kernel]] void f(device float* out [[buffer(0)]], const constant int* shape [[buffer(1)]],
                        const constant int64_t* strides [[buffer(2)]]) {
        out[0] = Limits<float>::finite_min + float(Limits<half>::max) + float(Limits<bfloat16_t>::min);
        out[1] = float(ceildiv(7, 2)) + float(elem_to_loc(3u, shape, strides, 2)) + log1p(0.5f);
        MLX_MTL_PRAGMA_UNROLL
        for (int k = 2; k < 4; k++) out[k] = float(WorkPerThread<float>::n);
      }
    """
    assert kernel_library(translated(source, "f", "f")).exists()


def test_a_kernel_that_uses_std_does_not_compile() -> None:
    with pytest.raises(CompileError, match="std"):
        kernel_library(translated(SOURCE.replace("1.0", "std::exp(1.0)"), "f", "f"))


def test_another_fill_is_another_library() -> None:
    kernel: Translated = translated(SOURCE, "f", "f")
    assert kernel_library(kernel, fill="pattern") != kernel_library(kernel, fill="zero")
