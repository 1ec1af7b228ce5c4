"""mlx_eval: evaluate language models on Apple silicon with MLX, through lm-evaluation-harness.

Importing this package imports neither mlx, mlx-lm, transformers nor lm_eval: each public name is
loaded from its module when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_eval.harness.adapter import LmEvalAdapter as LmEvalAdapter
    from mlx_eval.harness.adapter import run_preset as run_preset
    from mlx_eval.harness.lm import MLXEvalLM as MLXEvalLM
    from mlx_eval.harness.presets import ARCEASY_PRESET as ARCEASY_PRESET
    from mlx_eval.harness.presets import MMLU_PRESET as MMLU_PRESET
    from mlx_eval.harness.presets import WIKITEXT_PRESET as WIKITEXT_PRESET
    from mlx_eval.harness.presets import EvalPreset as EvalPreset
    from mlx_eval.models.load import load_model as load_model
    from mlx_eval.models.loaded import LoadedModel as LoadedModel
    from mlx_eval.models.torch import convert_torch as convert_torch
    from mlx_eval.results.summary import Summary as Summary
    from mlx_eval.results.summary import summarize as summarize

_HOMES = {
    "ARCEASY_PRESET": "mlx_eval.harness.presets",
    "EvalPreset": "mlx_eval.harness.presets",
    "LmEvalAdapter": "mlx_eval.harness.adapter",
    "LoadedModel": "mlx_eval.models.loaded",
    "MLXEvalLM": "mlx_eval.harness.lm",
    "MMLU_PRESET": "mlx_eval.harness.presets",
    "Summary": "mlx_eval.results.summary",
    "WIKITEXT_PRESET": "mlx_eval.harness.presets",
    "convert_torch": "mlx_eval.models.torch",
    "load_model": "mlx_eval.models.load",
    "run_preset": "mlx_eval.harness.adapter",
    "summarize": "mlx_eval.results.summary",
}

__all__ = [
    "ARCEASY_PRESET",
    "MMLU_PRESET",
    "WIKITEXT_PRESET",
    "EvalPreset",
    "LmEvalAdapter",
    "LoadedModel",
    "MLXEvalLM",
    "Summary",
    "__version__",
    "convert_torch",
    "load_model",
    "run_preset",
    "summarize",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("mlx-eval")
    if name not in _HOMES:
        raise AttributeError(f"module 'mlx_eval' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
