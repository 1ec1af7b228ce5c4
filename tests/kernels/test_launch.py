"""Which backend a call takes, and how a dispatch reaches MLX."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_eval_kernels import KernelError, logprob
from mlx_eval_kernels.launch import VARIABLE, Dispatch, Source, chosen_backend, on_metal, read


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with Metal, its GPU the default device."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))


@pytest.fixture
def no_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)


def test_metal_is_taken_where_mlx_computes_on_it(metal: None) -> None:
    assert chosen_backend(None) == "metal"


def test_the_reference_is_taken_on_the_cpu_of_a_mac(metal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    assert chosen_backend(None) == "reference"


def test_the_reference_is_taken_without_metal(no_metal: None) -> None:
    assert chosen_backend(None) == "reference"


def test_the_reference_is_taken_for_what_the_kernel_does_not_support(metal: None) -> None:
    assert chosen_backend(None, "heads of size 3") == "reference"


def test_the_variable_forces_one(metal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "reference")
    assert chosen_backend(None) == "reference"


def test_the_argument_goes_before_the_variable(metal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "reference")
    assert chosen_backend("metal") == "metal"


def test_an_empty_variable_forces_nothing(metal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    assert chosen_backend(None) == "metal"


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "cuda")
    with pytest.raises(KernelError, match=r"reference or metal, not 'cuda' .*MLX_EVAL_KERNELS"):
        chosen_backend(None)


def test_metal_that_is_not_there_is_refused(no_metal: None) -> None:
    with pytest.raises(KernelError, match="Metal is not available here"):
        logprob(mx.zeros((1, 4)), mx.array([[0]]), backend="metal")


def test_forced_metal_says_what_it_does_not_support(metal: None) -> None:
    with pytest.raises(KernelError, match=r"does not support logits of type mlx\.core\.int32"):
        logprob(mx.zeros((1, 4), mx.int32), mx.array([[0]]), backend="metal")


def test_other_types_of_logits_are_computed_by_the_reference(metal: None) -> None:
    assert logprob(mx.array([[1, 1]]), mx.array([[0]])).argmax.item() == 0


@pytest.mark.skipif(mx.metal.is_available(), reason="Metal would run it")
def test_a_dispatch_reaches_mlx_which_has_no_metal_here() -> None:
    source = Source("mlx_eval_double", ("values",), ("doubled",), "  doubled[thread_position_in_grid.x] = 2;")
    dispatch = Dispatch(source, [mx.zeros(8)], (), (8, 1, 1), (8, 1, 1), [(8,)], [mx.float32])
    with pytest.raises(RuntimeError, match="No Metal back-end"):
        mx.eval(on_metal(dispatch))


def test_sources_are_read_from_the_package() -> None:
    assert "threadgroup_barrier" in read("logprob.metal")
    with pytest.raises(FileNotFoundError):
        read("none.metal")
