from __future__ import annotations

from pathlib import Path

import pytest

from mlx_eval.app.doctor import examine
from mlx_eval.errors import ModelError
from mlx_eval.models import runtime
from tests.tiny import write_directory


def test_the_machine() -> None:
    facts = dict(examine().facts)
    assert facts["device"] in ("Metal", "CPU")
    assert {"chip", "memory", "system", "BLAS", "kernels", "python", "mlx", "mlx-lm", "lm-eval"} <= set(facts)
    assert all(facts.values())


def test_a_model(tmp_path: Path) -> None:
    write_directory(tmp_path)
    found = examine(str(tmp_path))
    facts = dict(found.facts)
    assert facts["architecture"] == "llama"
    assert facts["window"] == "64 tokens"
    assert facts["chat template"] == "no"
    assert facts["end of sequence"] == "1"
    assert "scored positions only" in facts["head"]
    with pytest.raises(ModelError):
        examine(str(tmp_path / "nowhere"))


def test_kernels_that_cannot_be_had_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_EVAL_KERNELS", "cuda")
    assert any("not 'cuda' (argument or MLX_EVAL_KERNELS)" in problem for problem in examine().problems)


def test_a_missing_blas_is_a_problem_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = runtime.Device("cpu", "cpu", 2**33, "Linux 6", runtime.BUILT_IN_BLAS)
    monkeypatch.setattr(runtime, "device", lambda: slow)
    # the library may be here or not: what to do depends on it (tests/models/test_runtime.py)
    assert set(examine().problems) & {runtime.BLAS_HINT, runtime.MLX_WAS_FIRST}
    fast = runtime.Device("cpu", "cpu", 2**33, "Linux 6", runtime.OPENBLAS)
    monkeypatch.setattr(runtime, "device", lambda: fast)
    assert examine().problems == ()


def test_an_intel_python_on_a_mac_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    rosetta = runtime.Device("Apple M3", "cpu", 2**33, "macOS 15", "Accelerate")
    monkeypatch.setattr(runtime, "device", lambda: rosetta)
    assert any("arm64" in problem for problem in examine().problems)


def test_lm_eval_missing_is_a_problem_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_eval.app.doctor.OPTIONAL", {"a-package-that-nobody-has": "harness"})
    assert any("pip install 'mlx-eval[harness]'" in problem for problem in examine().problems)


def test_a_model_too_large_for_the_memory_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_directory(tmp_path)
    small = runtime.Device("cpu", "cpu", 1000, "Linux 6", runtime.OPENBLAS)
    monkeypatch.setattr(runtime, "device", lambda: small)
    assert any("--quantize" in problem for problem in examine(str(tmp_path)).problems)
