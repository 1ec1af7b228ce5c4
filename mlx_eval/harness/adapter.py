"""One call from a loaded model to lm-eval's results. Knows lm-eval's evaluator and the backend."""

from __future__ import annotations

import inspect
import pickle
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mlx_eval.errors import InvalidOptionError, MlxEvalError, OutputError, TaskError, unknown_name
from mlx_eval.harness.lm import MLXEvalLM
from mlx_eval.harness.prepare import PreparedTasks, first_line, prepare_tasks
from mlx_eval.harness.presets import EXTRA_ARGUMENTS, EvalPreset, get_preset
from mlx_eval.harness.quiet import quiet_harness

RUN_ARGUMENTS: Final = frozenset({"evaluation_tracker", "log_samples"})
"""Arguments of one run, which no preset has."""

EVALUATE_ARGUMENTS: Final = (
    EXTRA_ARGUMENTS
    | RUN_ARGUMENTS
    | {
        "num_fewshot",
        "batch_size",
        "limit",
        "apply_chat_template",
        "fewshot_as_multiturn",
        "system_instruction",
        "gen_kwargs",
    }
)
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
        known = list(inspect.signature(MLXEvalLM.__init__).parameters)[3:]
        for name in options:
            if name not in known:
                raise unknown_name("option", name, known)
        if isinstance(model, MLXEvalLM):
            if tokenizer is not None or options:
                raise InvalidOptionError(
                    "a ready MLXEvalLM takes no tokenizer and options: give them when making it"
                )
            self.lm = model
        else:
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
            arguments: those of lm-eval's `simple_evaluate`, with its meanings. Without them examples are turns of the
                conversation only where a chat template is applied, and `batch_size` is the backend's own.

        Returns:
            lm-eval's results, with `samples` unless `log_samples=False`.

        Raises:
            UnknownNameError: a task or an argument that does not exist.
            TaskError: a task that cannot be run here, or whose own templates and functions fail.
            InvalidOptionError: a value that makes no sense, a chat template where the model has none, or more
                shots than a task has examples.
        """
        _check_arguments(arguments)
        given = {name: value for name, value in arguments.items() if value is not None}
        self.lm.chat_template(given.get("apply_chat_template", False))
        metadata = {"pretrained": self.lm.loaded.source, **given.pop("metadata", {})}
        manager = given.pop("task_manager", None)
        if manager is not None and (include_path is not None or isinstance(tasks, PreparedTasks)):
            raise InvalidOptionError("task_manager goes with names of tasks only, and without include_path")
        if not isinstance(tasks, PreparedTasks):
            tasks = prepare_tasks(
                tasks,
                include_path=include_path,
                manager=manager,
                confirm_run_unsafe_code=given.get("confirm_run_unsafe_code", False),
                metadata=metadata,
            )
        tasks.check_generation(given.get("gen_kwargs"))
        rows = given.pop("batch_size", self.lm.batch_size)
        if "torch_random_seed" in given:  # what lm-eval's `hf` backend samples with
            self.lm.seed = given["torch_random_seed"]
        defaults = {
            "fewshot_as_multiturn": bool(given.get("apply_chat_template", False)),
            "model_args": {"pretrained": self.lm.loaded.source},
        }
        with self.lm.in_batches_of(rows), quiet_harness():
            return self._simple_evaluate(
                tasks, metadata=metadata, batch_size=self.lm.batch_size, **{**defaults, **given}
            )

    def _simple_evaluate(self, tasks: PreparedTasks, **arguments: Any) -> dict[str, Any]:
        """Run lm-eval; what goes wrong in a task's own files and code is a `TaskError`."""
        from lm_eval import simple_evaluate

        try:
            results: dict[str, Any] = simple_evaluate(
                model=self.lm, tasks=tasks.names, task_manager=tasks, **arguments
            )
        except (sqlite3.Error, pickle.UnpicklingError) as error:
            raise OutputError(
                f"the answers' database of --use_cache failed: {error}; give another path"
            ) from error
        except Exception as error:
            if isinstance(error, MlxEvalError) or _is_ours(error):
                raise
            if str(error) == TOO_FEW_EXAMPLES:
                raise InvalidOptionError(
                    f"num_fewshot={arguments.get('num_fewshot')}: a task has fewer examples than that to show"
                ) from error
            raise TaskError(
                f"lm-eval could not run {tasks.listed()}: {type(error).__name__}: {first_line(error)}"
            ) from error
        return results


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """The same checks as for a preset, of names and values.

    Raises:
        UnknownNameError, InvalidOptionError: a name that does not exist, a value that makes no sense.
    """
    for name in arguments:
        if name not in EVALUATE_ARGUMENTS:
            raise unknown_name("argument of lm-eval", name, EVALUATE_ARGUMENTS)
    fields = {
        name: value
        for name, value in arguments.items()
        if name not in EXTRA_ARGUMENTS | RUN_ARGUMENTS
        and (value is not None or name != "apply_chat_template")
    }
    EvalPreset(name="evaluate", task="given", **fields)


def _is_ours(error: BaseException) -> bool:
    """Whether an error comes from our backend and not from a task: then it is a bug to be seen whole."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") == MLXEvalLM.__module__:
            return True
        trace = trace.tb_next
    return False


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
    adapter = LmEvalAdapter(model, tokenizer)
    return adapter.evaluate(arguments.pop("tasks"), include_path=include_path, **arguments)
