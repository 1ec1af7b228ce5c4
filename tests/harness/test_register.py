from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

import pytest

from mlx_eval import config
from mlx_eval.errors import InvalidOptionError, ModelError, UnknownNameError
from mlx_eval.harness.lm import MLXEvalLM
from mlx_eval.harness.register import MODEL_NAME, backend_from_arguments, register, run_command_line
from mlx_eval.harness.tasks import DEMO_TASKS
from tests.tiny import write_directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    write_directory(path)
    return str(path)


def test_registering_keeps_lm_evals_own_models_and_may_be_repeated() -> None:
    register()
    register()
    from lm_eval.api.model import LM
    from lm_eval.api.registry import get_model, model_registry

    assert {"hf", "dummy", MODEL_NAME} <= set(model_registry)
    found = get_model(MODEL_NAME)
    assert issubclass(found, LM)
    assert issubclass(found, MLXEvalLM)


def test_the_entry_point_loads_the_class() -> None:
    from lm_eval.api.model import LM

    (entry,) = [
        entry for entry in importlib.metadata.entry_points(group="lm_eval.models") if entry.name == MODEL_NAME
    ]
    found = entry.load()
    assert issubclass(found, LM)
    assert issubclass(found, MLXEvalLM)


@pytest.mark.parametrize("registered", [False, True])
def test_a_model_is_made_of_an_argument_string(registered: bool, directory: str) -> None:
    """On the class as it is imported, and on the one in lm-eval's registry."""
    cls: Any = MLXEvalLM
    if registered:
        register()
        from lm_eval.api.registry import get_model

        cls = get_model(MODEL_NAME)
    lm = cls.create_from_arg_string(
        f"pretrained={directory},max_length=60,dtype=float32,add_bos_token=True",
        {"batch_size": 3, "device": "cuda:0", "max_batch_size": None},
    )
    assert (lm.batch_size, lm.max_length, lm.loaded.source) == (3, 60, directory)
    assert lm.tok_encode("Answer")[0] == lm.prefix_token_id


def test_arguments_as_an_object(directory: str) -> None:
    lm: Any = MLXEvalLM.create_from_arg_obj(
        {"pretrained": directory, "quantize": None}, {"batch_size": "auto"}
    )
    assert lm.batch_size == config.BATCH_SIZE


def test_a_subclass_takes_arguments_of_its_own(directory: str) -> None:
    class Louder(MLXEvalLM):
        def __init__(self, *args: Any, loud: bool = False, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.loud = loud

    lm: Any = Louder.create_from_arg_string(f"pretrained={directory},loud=True")
    assert isinstance(lm, Louder)
    assert lm.loud


def test_unknown_arguments_are_named() -> None:
    with pytest.raises(UnknownNameError, match="'max_lenght'; did you mean max_length"):
        MLXEvalLM.create_from_arg_string("pretrained=demo,max_lenght=3")


def test_no_model_is_named() -> None:
    with pytest.raises(InvalidOptionError, match="pretrained=MODEL"):
        backend_from_arguments(MLXEvalLM, {})
    with pytest.raises(ModelError, match="nowhere/at/all"):
        MLXEvalLM.create_from_arg_string("pretrained=nowhere/at/all")


def test_lm_evals_command_line_runs_with_our_name_and_gives_the_arguments_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = list(sys.argv)
    seen: list[list[str]] = []
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: seen.append(list(sys.argv)))
    run_command_line(["run", "--model", "mlx"])
    run_command_line(["run", "--include_path", "mine"])
    run_command_line(["ls", "tasks"])
    assert seen == [
        ["lm-eval", "run", "--model", "mlx", "--include_path", str(DEMO_TASKS)],
        ["lm-eval", "run", "--include_path", "mine"],
        ["lm-eval", "ls", "tasks"],
    ]
    assert sys.argv == before


def test_unknown_attributes_are_refused() -> None:
    from mlx_eval.harness import register as module

    with pytest.raises(AttributeError, match="Nothing"):
        _ = module.Nothing  # type: ignore[attr-defined]
