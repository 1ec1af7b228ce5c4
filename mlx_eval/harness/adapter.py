"""One call from a loaded model to lm-eval's results. Knows lm-eval's evaluator and the backend."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from mlx_eval import config
from mlx_eval.errors import InvalidOptionError, unknown_name
from mlx_eval.harness.lm import MLXEvalLM
from mlx_eval.harness.prepare import PreparedTasks, prepare_tasks
from mlx_eval.harness.presets import EXTRA_ARGUMENTS, EvalPreset, get_preset

EVALUATE_ARGUMENTS = EXTRA_ARGUMENTS | {
    "num_fewshot",
    "batch_size",
    "limit",
    "apply_chat_template",
    "fewshot_as_multiturn",
    "system_instruction",
    "gen_kwargs",
}
"""What `LmEvalAdapter.evaluate` passes on to lm-eval's `simple_evaluate`."""

TOO_FEW_EXAMPLES: Final = "Sample larger than population or is negative"
"""What Python's `random` says to lm-eval's sampler when more shots are asked for than there are examples."""


class LmEvalAdapter:
    """Evaluates one model on lm-eval's tasks."""

    def __init__(self, model: Any, tokenizer: Any = None, **options: Any) -> None:
        """Wrap a model.

        Args:
            model: from `load_model` or `convert_torch`, an mlx-lm model together with `tokenizer`, or a
                `MLXEvalLM`.
            tokenizer: a transformers tokenizer or mlx-lm's wrapper of one.
            options: what `MLXEvalLM` takes, such as `batch_size` and `max_length`.

        Raises:
            ImportError: lm_eval is not installed.
            UnknownNameError: an option that `MLXEvalLM` does not take.
        """
        if isinstance(model, MLXEvalLM):
            self.lm = model
            return
        known = list(inspect.signature(MLXEvalLM.__init__).parameters)[3:]
        for name in options:
            if name not in known:
                raise unknown_name("option", name, known)
        self.lm = MLXEvalLM(model, tokenizer, **options)

    def evaluate(
        self,
        tasks: str | Sequence[str] | PreparedTasks,
        *,
        include_path: str | Path | Sequence[str | Path] | None = None,
        **arguments: Any,
    ) -> dict[str, Any]:
        """Run lm-eval.

        Args:
            tasks: names of tasks, groups or tags, patterns, YAML files; or tasks prepared before.
            include_path: folders of further task files.
            arguments: those of lm-eval's `simple_evaluate`, with its meanings and defaults.

        Returns:
            lm-eval's results, with `samples` unless `log_samples=False`.

        Raises:
            UnknownNameError: a task or an argument that does not exist.
            TaskError: a task that cannot be run here.
            InvalidOptionError: a chat template is asked for and the model has none, or more shots than a
                task has examples.
        """
        for name in arguments:
            if name not in EVALUATE_ARGUMENTS:
                raise unknown_name("argument of lm-eval", name, EVALUATE_ARGUMENTS)
        self.lm.chat_template(arguments.get("apply_chat_template", False))
        metadata = {"pretrained": self.lm.loaded.source, **(arguments.pop("metadata", None) or {})}
        if not isinstance(tasks, PreparedTasks):
            tasks = prepare_tasks(
                tasks,
                include_path=include_path,
                manager=arguments.pop("task_manager", None),
                confirm_run_unsafe_code=arguments.get("confirm_run_unsafe_code", False),
                metadata=metadata,
            )
        chat = bool(arguments.get("apply_chat_template", False))
        defaults = {
            "batch_size": self.lm.batch_size,
            "fewshot_as_multiturn": chat,
            "model_args": {"pretrained": self.lm.loaded.source},
        }
        given = {name: value for name, value in arguments.items() if value is not None}
        return self._simple_evaluate(tasks, metadata=metadata, **{**defaults, **given})

    def _simple_evaluate(self, tasks: PreparedTasks, **arguments: Any) -> dict[str, Any]:
        from lm_eval import simple_evaluate

        try:
            results: dict[str, Any] = simple_evaluate(
                model=self.lm, tasks=tasks.names, task_manager=tasks, **arguments
            )
        except ValueError as error:
            if str(error) != TOO_FEW_EXAMPLES:
                raise
            raise InvalidOptionError(
                f"num_fewshot={arguments.get('num_fewshot')}: a task has fewer examples than that to show"
            ) from error
        return results


def run_preset(
    preset: str | EvalPreset,
    model: Any,
    tokenizer: Any = None,
    *,
    include_path: str | Path | Sequence[str | Path] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Evaluate a model as a preset says.

    Args:
        preset: a preset or the name of one.
        model: see `LmEvalAdapter`.
        tokenizer: see `LmEvalAdapter`.
        include_path: folders of further task files.
        changes: fields of the preset to be set otherwise, such as `limit`.

    Returns:
        lm-eval's results; `summarize` makes rows and tables of them.

    Raises:
        ImportError: lm_eval is not installed.
        UnknownNameError: there is no such preset, task or field.
    """
    chosen = get_preset(preset) if isinstance(preset, str) else preset
    arguments = chosen.replace(**changes).to_lm_eval_kwargs()
    rows = arguments.pop("batch_size", config.BATCH_SIZE)
    adapter = LmEvalAdapter(
        model, tokenizer, **({} if isinstance(model, MLXEvalLM) else {"batch_size": rows})
    )
    return adapter.evaluate(arguments.pop("tasks"), include_path=include_path, **arguments)
