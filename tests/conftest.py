"""Keeps the tests off the network and out of the user's caches."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest

import mlx_eval.models  # noqa: F401  (brings the BLAS in before a test module imports mlx)

_CACHE = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Before anything imports datasets or huggingface_hub, which read these once."""
    config.stash[_CACHE] = tempfile.mkdtemp(prefix="mlx_eval_tests_")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_DATASETS_CACHE"] = os.path.join(config.stash[_CACHE], "datasets")
    os.environ["MLX_EVAL_CACHE"] = os.path.join(config.stash[_CACHE], "mlx_eval")
    os.environ["LM_HARNESS_CACHE_PATH"] = os.path.join(config.stash[_CACHE], "requests")


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_CACHE], ignore_errors=True)
