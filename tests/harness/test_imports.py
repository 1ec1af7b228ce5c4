"""What a run imports of other packages: in one go, and with the collector as it was before."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator

import pytest

from mlx_eval.errors import MissingDependencyError
from mlx_eval.harness import imports as module
from mlx_eval.harness.imports import import_lm_eval, import_mlx_lm

pytest.importorskip("lm_eval")


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.parametrize("bring_in", [import_lm_eval, import_mlx_lm])
@pytest.mark.parametrize("set_collector", [gc.enable, gc.disable])
def test_the_collector_is_left_as_it_was(
    bring_in: Callable[[], None], set_collector: Callable[[], None]
) -> None:
    set_collector()
    before = gc.isenabled()
    bring_in()
    assert gc.isenabled() is before


def test_the_collector_wakes_after_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        assert not gc.isenabled()
        raise MissingDependencyError("lm-eval", "finding tasks", "harness")

    monkeypatch.setattr(module, "import_task_manager", missing)
    with pytest.raises(MissingDependencyError):
        import_lm_eval()
    assert gc.isenabled()


def test_what_a_run_uses_is_there_afterwards() -> None:
    import_lm_eval()
    import_mlx_lm()
    assert {"lm_eval.tasks", "lm_eval.evaluator", "datasets", "mlx_lm.utils"} <= set(sys.modules)
