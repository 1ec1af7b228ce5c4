"""Brings in what a run needs of other packages, at a time of its own. Knows their names only.

Most of a warm start is Python running these packages' modules, three thousand of them. Threads do not help, as
imports hold Python's lock; what helps is to leave the garbage collector asleep meanwhile, which would go through
the growing heap again and again and find nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from mlx_eval.harness.tasks import import_task_manager


def import_lm_eval() -> None:
    """lm-eval's tasks and evaluator, which bring `datasets` along.

    Raises:
        MissingDependencyError: lm-eval is not installed.
    """
    with _collector_asleep():
        import_task_manager()
        import lm_eval.evaluator  # noqa: F401


def import_mlx_lm() -> None:
    """mlx-lm's loader, which brings `transformers` along."""
    with _collector_asleep():
        import mlx_lm.utils  # noqa: F401


@contextmanager
def _collector_asleep() -> Iterator[None]:
    awake = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if awake:
            gc.enable()
