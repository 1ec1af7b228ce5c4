from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import pytest
from mlx_eval_kernels.launch import Dispatch, on_metal

from mlx_eval.engine import kernel_check
from mlx_eval.engine.kernel_check import check_kernels, disagreement
from mlx_eval.errors import DeviceError, InvalidOptionError
from mlx_eval.models import runtime
from tests.msl.build import why_not
from tests.msl.emulate import Emulator

emulated = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@emulated
def test_right_kernels_agree() -> None:
    assert disagreement(Emulator()) is None


@emulated
@pytest.mark.parametrize(
    ("right", "wrong", "kernel"),
    [
        ("state.top) - log_sum : NAN;", "state.top) : NAN;", "logprob"),
        ("argmax[row] = state.index", "argmax[row] = state.index + 1", "logprob"),
        ("chosen[place] = logits[", "chosen[place] = 2.0f * logits[", "linear_logprob"),
        ("- length + token;", "- length;", "prefix_attention"),
        ("near_weight * near_mixture", "near_mixture", "prefix_attention"),
    ],
)
def test_a_wrong_kernel_is_named(right: str, wrong: str, kernel: str) -> None:
    emulator = Emulator()

    def run(dispatch: Dispatch) -> Sequence[mx.array]:
        source = replace(dispatch.source, body=dispatch.source.body.replace(right, wrong))
        return emulator(replace(dispatch, source=source))

    assert str(disagreement(run)).startswith(f"{kernel} differs by ")


@pytest.mark.skipif(not mx.metal.is_available(), reason="no Metal here")
def test_the_kernels_agree_on_this_gpu() -> None:
    assert disagreement(on_metal) is None


def test_another_text_is_compared_again(metal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setattr(kernel_check, "disagreement", lambda: calls.append(None))
    monkeypatch.setattr(runtime, "device", lambda: runtime.Device("other", "metal", 1, "macOS", "Accelerate"))
    check_kernels()
    changed = replace(kernel_check.SOURCES[0], body=kernel_check.SOURCES[0].body + " ")
    monkeypatch.setattr(kernel_check, "SOURCES", (changed, *kernel_check.SOURCES[1:]))
    check_kernels()
    assert len(calls) == 2


@pytest.mark.skipif(mx.metal.is_available(), reason="Metal would run them")
def test_a_kernel_that_cannot_be_built_says_so() -> None:
    assert "No Metal back-end" in str(disagreement(on_metal))


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "kernel_backend", lambda: "metal")


def test_a_failure_is_one_error_with_the_remedy(metal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_check, "disagreement", lambda: "logprob differs by 3.0e+00")
    for _ in range(2):  # what failed is not remembered
        with pytest.raises(DeviceError, match=r"logprob differs by 3\.0e\+00.*MLX_EVAL_KERNELS=reference"):
            check_kernels()


def test_what_agreed_is_not_compared_again(metal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setattr(kernel_check, "disagreement", lambda: calls.append(None))
    monkeypatch.setattr(
        runtime, "device", lambda: runtime.Device("chip", "metal", 1, "macOS 26", "Accelerate")
    )
    check_kernels()
    check_kernels()
    assert len(calls) == 1
    monkeypatch.setattr(
        runtime, "device", lambda: runtime.Device("chip", "metal", 1, "macOS 27", "Accelerate")
    )
    check_kernels()
    assert len(calls) == 2


def test_the_reference_is_not_compared_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "kernel_backend", lambda: "reference")
    monkeypatch.setattr(kernel_check, "disagreement", lambda: pytest.fail("compared"))
    check_kernels()


def test_a_backend_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_EVAL_KERNELS", "cuda")
    with pytest.raises(InvalidOptionError):
        check_kernels()
