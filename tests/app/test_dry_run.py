"""What a run would cost, told before it is run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_eval.app.dry_run import forecast
from mlx_eval.app.evaluate import Job, evaluate
from mlx_eval.engine.score import Scorer
from mlx_eval.errors import InvalidOptionError, ModelError
from mlx_eval.harness.tasks import task_manager
from tests.harness.offline_tasks import write_tasks
from tests.tiny import write_directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    write_directory(path)
    return str(path)


@pytest.fixture
def job(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    (tmp_path / "tasks").mkdir()
    monkeypatch.setenv("MLX_EVAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "mlx_eval.harness.prepare.task_manager",
        lambda path=None, **options: task_manager(path, include_defaults=False, **options),
    )
    tasks = write_tasks(tmp_path / "tasks")
    return Job(
        model=model,
        tasks=("tiny_group", "tiny_write"),
        backend={"batch_size": 2},
        evaluation={"bootstrap_iters": 10, "use_cache": str(tmp_path / "answers")},
        include_path=(str(tasks),),
    )


def test_the_figures_are_those_of_the_run(job: Job) -> None:
    told = forecast(job)
    record = evaluate(job).record
    plans = [one.plan for one in told.scoring]
    assert {one.kind: one.plan.num_requests for one in told.scoring}.items() <= record["requests"].items()
    assert sum(plan.naive_tokens for plan in plans) == record["tokens"]["naive"]
    assert sum(plan.unique_tokens for plan in plans) == record["tokens"]["unique"]
    assert sum(plan.planned_tokens for plan in plans) == record["tokens"]["computed"]
    assert sum(plan.padding for plan in plans) == record["tokens"]["padding"]
    assert sum(plan.num_forwards for plan in plans) == record["forwards"]
    assert max(plan.peak_kv_bytes for plan in plans) == record["peak_kv_bytes"]
    assert told.generation is not None
    assert told.generation.num_requests == record["requests"]["generate_until"]
    assert told.generation.prompt_tokens == record["decoding"]["prompt_tokens"]
    assert record["decoding"]["generated_tokens"] <= told.generation.max_tokens == 10
    assert told.is_tested
    assert told.seconds is not None
    assert told.seconds > 0


def test_nothing_is_written_and_no_answer_kept(job: Job, tmp_path: Path) -> None:
    forecast(job)
    assert not list(tmp_path.glob("answers*"))


def test_without_weights_what_an_earlier_run_found_is_known(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unused(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was run")

    hoped = forecast(job, weights=False)
    assert not hoped.is_tested
    tested = forecast(job)
    monkeypatch.setattr(Scorer, "run", unused)
    monkeypatch.setattr("mlx_eval.app.dry_run.load_model", unused)
    known = forecast(job, weights=False)
    assert known.is_tested
    assert known.sharing == tested.sharing
    assert known.tokens_per_second is None
    assert known.seconds is None
    assert [one.plan.planned_tokens for one in known.scoring] == [
        one.plan.planned_tokens for one in tested.scoring
    ]


def test_changed_weights_are_another_model(job: Job, model: str) -> None:
    forecast(job)
    file = Path(model) / "model.safetensors"
    state = file.stat()
    import os

    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns + 10**9))
    assert not forecast(job, weights=False).is_tested


def test_a_model_that_is_none_is_named_before_the_tasks_are_read(job: Job) -> None:
    from dataclasses import replace

    with pytest.raises(ModelError, match="nowhere"):
        forecast(replace(job, model="/nowhere"))


@pytest.mark.parametrize("weights", [True, False])
def test_a_low_memory_head_changes_no_plan(job: Job, weights: bool) -> None:
    plain = forecast(job, weights=weights)
    low = forecast(replace(job, backend={**job.backend, "low_memory_head": True}), weights=weights)
    figures = [[(one.kind, one.plan.planned_tokens) for one in told.scoring] for told in (low, plain)]
    assert figures[0] == figures[1]
    assert low.is_tested is weights


def test_a_low_memory_head_that_the_run_would_refuse_is_refused(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> Any:
        raise InvalidOptionError("run without low_memory_head")

    monkeypatch.setattr("mlx_eval.app.dry_run.output_layer", refused)
    forecast(job)
    with pytest.raises(InvalidOptionError, match="run without low_memory_head"):
        forecast(replace(job, backend={**job.backend, "low_memory_head": True}))
