"""A job from a model's directory to the run's folder."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from mlx_eval.app import evaluate as module
from mlx_eval.app.evaluate import Job, evaluate, versions
from mlx_eval.errors import InvalidOptionError, MlxEvalError, ModelError, OutputError, UnknownNameError
from mlx_eval.harness.statistics import RunStatistics, Stopwatch
from mlx_eval.harness.tasks import task_manager
from tests.harness.offline_tasks import write_tasks
from tests.tiny import write_directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    write_directory(path)
    return str(path)


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Task files, and lm-eval's own 14,000 left out of the index, which take seconds to read."""
    (tmp_path / "tasks").mkdir()

    def quick(include_path: Any = None, **options: Any) -> Any:
        return task_manager(include_path, include_defaults=False, **options)

    monkeypatch.setattr("mlx_eval.harness.prepare.task_manager", quick)
    return write_tasks(tmp_path / "tasks")


def test_a_job_writes_its_folder_and_sums_up(model: str, tasks: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    outcome = evaluate(
        Job(
            model=model,
            tasks=("tiny_group", "tiny_write"),
            backend={"batch_size": 2},
            evaluation={"bootstrap_iters": 10},
            include_path=(str(tasks),),
            output_path=str(out),
            log_samples=True,
            command=("run", "--model", model),
        )
    )
    assert sorted(path.name.split("_2")[0] for path in outcome.files) == [
        "results", "run.json", "samples_tiny_choice", "samples_tiny_text", "samples_tiny_write",
    ]  # fmt: skip
    assert sorted(out.iterdir()) == sorted(outcome.files)
    flat = outcome.summary.flat()
    assert {"tiny_choice/acc,none", "tiny_text/bits_per_byte,none", "tiny_write/exact_match,none"} <= set(
        flat
    )
    record = json.loads((out / "run.json").read_text(encoding="utf-8"))
    assert record["command"] == ["run", "--model", model]
    assert record["model"]["source"] == model
    assert record["model"]["dtype"] == "float32"
    assert record["batch_size"] == 2
    assert record["requests"] == {"loglikelihood": 9, "loglikelihood_rolling": 2, "generate_until": 2}
    assert record["files"] == [path.name for path in outcome.files[:-1]]
    assert record["tokens"]["computed"] <= record["tokens"]["naive"]
    assert record["peak_memory_bytes"]["process"] > 2**20
    seconds = record["seconds"]
    assert {"imports", "index", "data", "load", "requests", "score", "generate", "metrics"} <= set(seconds)
    parts = sum(value for stage, value in seconds.items() if stage not in ("total", "first_batch"))
    assert seconds["total"] == pytest.approx(parts, abs=0.02)  # each is rounded to milliseconds
    assert all(value >= 0 for value in seconds.values())
    assert set(record["tokens_per_second"]) == {"score", "generate"}


def test_seconds_count_from_the_start_of_the_program(model: str, tasks: Path) -> None:
    began = time.perf_counter() - 1000
    before = time.time() - 1000
    job = Job(model, ("tiny_text",), include_path=(str(tasks),))
    record = evaluate(job, began=began).record
    assert 1000 <= record["seconds"]["imports"] < record["seconds"]["total"] == pytest.approx(1000, abs=500)
    started = time.mktime(time.strptime(record["started"][:19], "%Y-%m-%dT%H:%M:%S"))
    assert started == pytest.approx(before, abs=500)


def test_stages_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    stopwatch = Stopwatch({"imports": 3.0, "index": 1.0, "data": 0.5, "load": 2.0})
    statistics = RunStatistics({"encode": 0.25, "score": 5.0, "fingerprint": 1.5})
    statistics.moments.update(asked=110.0, first_batch=112.0, answered=116.0)
    monkeypatch.setattr(module.time, "perf_counter", lambda: 120.0)
    assert module._stages(stopwatch, statistics, began=100.0, handed_over=107.0) == {
        "imports": 3.0, "index": 1.0, "data": 0.5, "load": 2.0, "requests": 3.0, "encode": 0.25, "score": 5.0,
        "fingerprint": 1.5, "metrics": 2.5, "other": 1.25, "total": 20.0, "first_batch": 12.0,
    }  # fmt: skip


def test_where_nothing_was_asked_there_is_no_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "perf_counter", lambda: 120.0)
    stages = module._stages(Stopwatch({"load": 2.0}), RunStatistics(), began=100.0, handed_over=107.0)
    assert stages == {"load": 2.0, "requests": 13.0, "metrics": 0.0, "other": 5.0, "total": 20.0}


def test_without_an_output_path_nothing_is_written(model: str, tasks: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    outcome = evaluate(Job(model, ("tiny_text",), include_path=(str(tasks),)))
    assert outcome.files == ()
    assert outcome.record["model"]["parameters"] > 0
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before] == []


@pytest.fixture
def inputs(model: str, tasks: Path) -> tuple[str, Path]:
    return model, tasks


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"model": "./nowhere"}, ModelError, "./nowhere does not exist"),
        ({"tasks": ("tiny_chioce",)}, UnknownNameError, "did you mean tiny_choice"),
        ({"loading": {"dtype": "float8"}}, UnknownNameError, "float8"),
        ({"evaluation": {"gen_kwargs": {"temprature": 1}}}, UnknownNameError, "temperature"),
        ({"output_path": "tasks/choice.yaml"}, OutputError, "cannot write to"),
    ],
)
def test_what_is_wrong_is_found_before_a_model_is_loaded(
    changes: dict[str, Any],
    error: type[MlxEvalError],
    text: str,
    inputs: tuple[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, tasks = inputs
    monkeypatch.setattr(module, "load_model", pytest.fail)
    monkeypatch.chdir(tasks.parent)
    job: dict[str, Any] = {"model": model, "tasks": ("tiny_text",), "include_path": (str(tasks),), **changes}
    with pytest.raises(error, match=text) as caught:
        evaluate(Job(**job))
    assert "\n" not in str(caught.value)


def test_a_chat_template_that_is_not_there(model: str, tasks: Path) -> None:
    with pytest.raises(InvalidOptionError, match="no chat template"):
        evaluate(
            Job(model, ("tiny_text",), evaluation={"apply_chat_template": True}, include_path=(str(tasks),))
        )


def test_versions_of_what_results_depend_on() -> None:
    found = versions()
    assert {"python", "mlx", "mlx-lm", "lm-eval", "transformers"} <= set(found)


def test_kernels_that_cannot_be_had_are_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLX_EVAL_KERNELS", "cuda")
    with pytest.raises(InvalidOptionError, match="not 'cuda'"):
        evaluate(Job("/nowhere", ("no_such_task",)))


def test_the_record_says_how_the_kernels_ran(
    model: str, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_EVAL_KERNELS", "reference")
    record = evaluate(Job(model, ("tiny_text",), include_path=(str(tasks),))).record
    assert record["device"]["kernels"] == "reference"
