"""Makes `--model mlx` known to lm-eval, and reads its `--model_args`. Imports lm_eval when called."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from mlx_eval.errors import InvalidOptionError, MlxEvalError, TaskError, unknown_name
from mlx_eval.harness.prepare import first_line
from mlx_eval.harness.tasks import DEMO_TASKS

T = TypeVar("T")

MODEL_NAME: Final = "mlx"
OTHER_COMMANDS: Final = ("ls", "validate", "--help", "-h")
"""Words that lm-eval's command line may begin with when it does not evaluate."""
OWN_TASKS: Final = ["--include_path", str(DEMO_TASKS)]
LOADING: Final = ("dtype", "quantize", "dequantize", "tokenizer", "revision", "trust_remote_code")
"""Arguments that go to `load_model`; all others go to `MLXEvalLM`."""


def register() -> None:
    """Register the backend under the name `mlx` in lm-eval's registry; more than once does no harm.

    Raises:
        ImportError: lm_eval is not installed.
    """
    from mlx_eval.harness.lm import MLXEvalLM, bind

    backend = bind(MLXEvalLM)
    import lm_eval.models  # noqa: F401  (the registry fills itself only while it is empty)
    from lm_eval.api.registry import model_registry, register_model

    if MODEL_NAME not in model_registry:
        register_model(MODEL_NAME)(backend)


def backend_from_arguments(cls: Callable[..., T], arguments: Mapping[str, Any]) -> T:
    """Load the model that `--model_args` names and wrap it.

    Args:
        cls: `MLXEvalLM` or a subclass.
        arguments: `pretrained` (a path, a hub id or `demo`), what `load_model` takes, what `cls` takes.

    Raises:
        UnknownNameError: an argument that neither takes.
        InvalidOptionError: no `pretrained`.
    """
    from mlx_eval.models.load import load_model

    options = dict(arguments)
    source = options.pop("pretrained", None)
    if source is None:
        raise InvalidOptionError(
            "--model_args needs pretrained=MODEL: a directory, a .gguf file, a hub id or demo"
        )
    taken = [name for name in _parameters_of(cls) if name not in ("model", "tokenizer")]
    for name in options:
        if name not in LOADING and name not in taken:
            raise unknown_name("model argument", name, ("pretrained", *LOADING, *taken))
    loading = {name: options.pop(name) for name in LOADING if name in options}
    return cls(load_model(source, **loading), **options)


def _parameters_of(cls: Any) -> list[str]:
    """What may be given to `cls` by name; what its bases take as well, as far as it passes `**` on to them."""
    names: list[str] = []
    # not inspect.signature(cls): that would be the signature of __new__
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(base.__init__).parameters.values())[1:]
        names += [one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
        if all(one.kind is not one.VAR_KEYWORD for one in parameters):
            break
    return names


def run_command_line(words: Sequence[str]) -> None:
    """lm-eval's own command line, with `--model mlx` known, and the demo tasks unless an `--include_path` is given.

    Raises:
        ImportError: lm_eval is not installed.
        TaskError: lm-eval refuses its arguments, or cannot load or run a task.
    """
    register()
    from datasets.exceptions import DatasetsError
    from jinja2.exceptions import TemplateError
    from lm_eval.__main__ import cli_evaluate

    before = sys.argv
    own_tasks = [] if "--include_path" in words or not words or words[0] in OTHER_COMMANDS else OWN_TASKS
    sys.argv = ["lm-eval", *words, *own_tasks]  # where lm-eval reads its arguments from
    try:
        cli_evaluate()
    except (ValueError, OSError, ImportError, DatasetsError, TemplateError) as error:
        if isinstance(error, MlxEvalError):
            raise
        raise TaskError(f"lm-eval: {first_line(error)}") from error
    finally:
        sys.argv = before


def __getattr__(name: str) -> Any:
    """`RegisteredLM`, for the entry point: the class exists only once lm_eval is imported."""
    if name == "RegisteredLM":
        from mlx_eval.harness.lm import MLXEvalLM, bind

        return bind(MLXEvalLM)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
