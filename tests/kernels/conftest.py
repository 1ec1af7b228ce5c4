"""The ways in which the kernels can run: plain MLX, the Metal source on the CPU, the Metal source on a GPU."""

from __future__ import annotations

import mlx.core as mx
import pytest

try:
    from tests.msl.build import why_not
except ImportError:

    def why_not():
        return None


from tests.kernels.ways import Way
from tests.msl.emulate import Emulator


@pytest.fixture(params=["reference", "emulated", "metal"])
def way(request: pytest.FixtureRequest) -> Way:
    """Each way that this machine has; the others are skipped with the reason."""
    if request.param == "reference":
        return Way("reference", None)
    if request.param == "emulated":
        if reason := why_not():
            pytest.skip(reason)
        return Way("emulated", Emulator())
    if not mx.metal.is_available():
        pytest.skip("no Metal here")
    from mlx_eval_kernels.launch import on_metal

    return Way("metal", on_metal)


@pytest.fixture
def emulated() -> None:
    """Skips where Metal source cannot be run on the CPU."""
    if reason := why_not():
        pytest.skip(reason)
