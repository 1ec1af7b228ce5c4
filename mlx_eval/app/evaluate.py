"""The main job: load a model, run lm-eval on it, write the run's folder, sum up.

Knows the order of these steps and what `run.json` records of them.
"""

from __future__ import annotations

import contextlib
import resource
import sqlite3
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from mlx_eval.app.awake import kept_awake
from mlx_eval.engine.known import model_identity, remember_source
from mlx_eval.engine.sharing import describe
from mlx_eval.errors import InputError, OutputError
from mlx_eval.harness.adapter import LmEvalAdapter
from mlx_eval.harness.files import new_tracker, write_results
from mlx_eval.harness.gen_kwargs import parse_gen_kwargs
from mlx_eval.harness.lm import MLXEvalLM
from mlx_eval.harness.prepare import PreparedTasks, prepare_tasks
from mlx_eval.harness.statistics import ANSWERED, ASKED, FINGERPRINT, FIRST_BATCH, RunStatistics, Stopwatch
from mlx_eval.models import runtime
from mlx_eval.models.load import check_source, load_model
from mlx_eval.models.precision import check_precision
from mlx_eval.results.run_folder import open_folder, write_run_file
from mlx_eval.results.summary import Summary, summarize

PACKAGES: Final = ("mlx-eval", "mlx", "mlx-lm", "lm-eval", "transformers", "tokenizers", "numpy", "datasets")
"""Packages whose version a result depends on."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a run is asked to do."""

    model: str
    """A directory, a `.gguf` file, a hub id or `demo`."""
    tasks: tuple[str, ...]
    loading: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `load_model`."""
    backend: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `MLXEvalLM`."""
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of lm-eval's `simple_evaluate`."""
    include_path: tuple[str, ...] = ()
    output_path: str | None = None
    log_samples: bool = False
    command: tuple[str, ...] = ()
    """The command line, for `run.json`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run has produced."""

    summary: Summary
    record: Mapping[str, Any]
    """The contents of `run.json`."""
    files: tuple[Path, ...]
    """What was written; empty without an output path."""
    problem: str | None = None
    """Why not everything was written: no reason to lose the scores too."""


def evaluate(
    job: Job, on_stage: Callable[[str], None] = lambda text: None, *, began: float | None = None
) -> Outcome:
    """Do a job.

    Args:
        job: what to do.
        on_stage: told what begins, for somebody who waits.
        began: when the program started, as `time.perf_counter` counts; None: now.

    Raises:
        MlxEvalError: whatever is wrong with the model, the tasks or the options, as far as possible
            before anything is computed.
    """
    if began is None:
        began = time.perf_counter()
    stopwatch = Stopwatch({"imports": time.perf_counter() - began})
    started = time.time() - stopwatch.seconds["imports"]
    _check(job)
    folder = None if job.output_path is None else open_folder(job.output_path)
    with kept_awake(on_stage):
        return _evaluate(job, folder, on_stage, stopwatch=stopwatch, began=began, started=started)


def _evaluate(
    job: Job,
    folder: Path | None,
    on_stage: Callable[[str], None],
    *,
    stopwatch: Stopwatch,
    began: float,
    started: float,
) -> Outcome:
    """Do a job whose options are known to be right.

    Args:
        job: what to do.
        folder: where its files go.
        on_stage: told what begins.
        stopwatch: of the whole run.
        began: when the program started, as `time.perf_counter` counts.
        started: the same as `time.time` counts.
    """
    on_stage("reading lm-eval's task files and the data")
    tasks = load_tasks(job, stopwatch)
    on_stage(f"loading {job.model}")
    with stopwatch.timed("imports"):
        import mlx_lm.utils  # noqa: F401  (apart from `load`: two thirds of a warm start are imports)
    with stopwatch.timed("load"):
        adapter = LmEvalAdapter(load_model(job.model, **job.loading), **job.backend)
    on_stage("evaluating")
    tracker = None if folder is None else new_tracker(folder)
    evaluation = {**job.evaluation, "log_samples": job.log_samples, "evaluation_tracker": tracker}
    handed_over = time.perf_counter()
    results = adapter.evaluate(tasks, **evaluation)
    adapter.lm.statistics.seconds = _stages(stopwatch, adapter.lm.statistics, began, handed_over)
    fingerprint = str(results["config"]["model_fingerprint"])  # a pass over all weights: not twice
    remember_source(job.model, job.loading, model_identity(adapter.lm.loaded, fingerprint))
    record = _record(job, adapter.lm, started, fingerprint)
    summary = summarize(results)
    if folder is None:
        return Outcome(summary, record, ())
    files: list[Path] = []
    try:
        files += write_results(tracker, results, folder, log_samples=job.log_samples)
        files.append(write_run_file(folder, {**record, "files": [path.name for path in files]}))
    except OutputError as error:
        return Outcome(summary, record, tuple(files), problem=str(error))
    return Outcome(summary, record, tuple(files))


def load_tasks(job: Job, stopwatch: Stopwatch | None = None) -> PreparedTasks:
    """Find a job's tasks and load their data; arguments and errors as in `prepare_tasks`."""
    return prepare_tasks(
        job.tasks,
        include_path=job.include_path,
        confirm_run_unsafe_code=bool(job.evaluation.get("confirm_run_unsafe_code", False)),
        metadata={"pretrained": job.model, **(job.evaluation.get("metadata") or {})},
        stopwatch=stopwatch,
    )


def _stages(
    stopwatch: Stopwatch, statistics: RunStatistics, began: float, handed_over: float
) -> dict[str, float]:
    """Where the seconds went, in the order of the run.

    Args:
        stopwatch: what was timed here.
        statistics: what the backend timed.
        began: when the run did, as `time.perf_counter` counts.
        handed_over: when lm-eval's evaluator took over.
    """
    now = time.perf_counter()
    moments = statistics.moments
    stages = {**stopwatch.seconds, "requests": moments.get(ASKED, now) - handed_over, **statistics.seconds}
    stages["metrics"] = now - moments.get(ANSWERED, now) - statistics.seconds.get(FINGERPRINT, 0.0)
    stages["other"] = now - began - sum(stages.values())
    stages["total"] = now - began
    if FIRST_BATCH in moments:
        stages[FIRST_BATCH] = moments[FIRST_BATCH] - began
    return stages


def _check(job: Job) -> None:
    """Find what is wrong with the options themselves before tasks are read and models loaded.

    Raises:
        MlxEvalError: something is.
    """
    runtime.kernel_backend()
    check_source(job.model)
    precision = {name: job.loading.get(name) for name in ("dtype", "quantize", "dequantize")}
    check_precision(**precision)
    gen_kwargs = job.evaluation.get("gen_kwargs")
    if isinstance(gen_kwargs, Mapping):
        parse_gen_kwargs(gen_kwargs, default_max_tokens=1, seed=0)
    if use_cache := job.evaluation.get("use_cache"):
        open_folder(Path(use_cache).parent, "--use_cache")
        _check_database(Path(f"{use_cache}_rank0.db"))


def _check_database(path: Path) -> None:
    """Refuse a file of answers that is none, before hours are spent.

    Raises:
        InputError: the file is there and no database.
    """
    if not path.exists():
        return
    try:
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute("select count(*) from sqlite_master").fetchone()
    except sqlite3.Error as error:
        raise InputError(
            f"--use_cache: {path} is no database of answers ({error}); give another path"
        ) from error


def _record(job: Job, lm: MLXEvalLM, started: float, fingerprint: str) -> dict[str, Any]:
    """What a reader of the results will want to know of the run."""
    statistics = lm.statistics.as_dict()
    return {
        "command": list(job.command),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(started)),
        "versions": versions(),
        "device": describe_device(),
        "model": {
            "source": job.model,
            "fingerprint": fingerprint,
            "dtype": lm.loaded.dtype,
            "quantization": lm.loaded.quantization,
            "parameters": lm.loaded.num_parameters,
            "bytes": lm.loaded.num_bytes,
            "max_length": lm.max_length,
            "tokenizer": lm.tokenizer_name,
        },
        "tasks": list(job.tasks),
        "batch_size": lm.batch_size,
        "options": {**job.loading, **job.backend, **job.evaluation},
        "sharing": _sharing(lm),
        **statistics,
        "tokens_per_second": _rates(statistics),
        "peak_memory_bytes": _peak_memory(),
    }


def _sharing(lm: MLXEvalLM) -> dict[str, Any] | None:
    """How far rows shared prefixes and batches, and why not more."""
    if lm.sharing is None:
        return None
    return {"way": describe(lm.sharing.way), "off": list(lm.sharing.findings)}


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on; those not installed are left out."""
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def describe_device() -> dict[str, Any]:
    """What the numbers of a run depend on beside the versions: the machine and how it computes."""
    device = runtime.device()
    return {
        "name": device.name,
        "kind": device.kind,
        "memory_bytes": device.memory_bytes,
        "os": device.os,
        "blas": device.blas,
        "kernels": runtime.kernel_backend(),
    }


def _rates(statistics: Mapping[str, Any]) -> dict[str, float]:
    """Tokens a second of wall time: scored ones, padding aside, and generated ones."""
    tokens = {
        "score": statistics["tokens"].get("computed", 0),
        "generate": statistics["decoding"]["generated_tokens"],
    }
    seconds = statistics["seconds"]
    return {stage: round(count / seconds[stage], 1) for stage, count in tokens.items() if seconds.get(stage)}


def _peak_memory() -> dict[str, int]:
    """`mlx`: the most that arrays took at once. `process`: the most that the process had in memory."""
    import mlx.core as mx

    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "mlx": int(mx.get_peak_memory()),
        "process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
    }
