"""How fast a model reads, continues and scores prompts here, over batch sizes and prompt lengths, and in what memory.

Knows the order of the measurements and what their report records; the engine computes. Prompts are random ids, of
which no two begin alike: nothing is shared, so the speeds are those of tokens that have to be computed.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_eval import config
from mlx_eval.app.awake import kept_awake
from mlx_eval.app.evaluate import describe_device, versions
from mlx_eval.engine.budget import is_out_of_memory
from mlx_eval.engine.counts import DecodeCounts
from mlx_eval.engine.decode import Decoder
from mlx_eval.engine.kernel_check import check_kernels
from mlx_eval.engine.known import decoding_of, model_identity, remember_source, sharing_of
from mlx_eval.engine.score import Scorer
from mlx_eval.engine.sharing import describe
from mlx_eval.errors import InvalidOptionError, OutOfMemoryError, OutputError
from mlx_eval.models.head import RowHead
from mlx_eval.models.load import check_source, load_model
from mlx_eval.models.loaded import LoadedModel
from mlx_eval.models.precision import check_precision
from mlx_eval.records import GenerationRequest, IntArray, ScoringRequest
from mlx_eval.results.run_folder import open_folder

STAGES: Final = ("prefill", "decode", "scoring")
"""What is measured, in the order of the report."""
OUT_OF_MEMORY: Final = "out of memory"


@dataclass(frozen=True, slots=True)
class BenchJob:
    """What is to be measured."""

    model: str
    """A directory, a `.gguf` file, a hub id or `demo`."""
    loading: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `load_model`."""
    batch_sizes: tuple[int, ...] = config.BENCH_BATCH_SIZES
    """Prompts that are there at once."""
    prompt_lengths: tuple[int, ...] = config.BENCH_PROMPT_LENGTHS
    """In tokens."""
    gen_tokens: int = config.BENCH_GEN_TOKENS
    """Tokens of each answer, at least two: decoding is timed from the first to the last."""
    repeat: int = config.BENCH_REPEAT
    """Timed runs of each measurement, behind one that is not timed."""
    seed: int = config.SEED


@dataclass(frozen=True, slots=True)
class Measurement:
    """One stage at one batch size and prompt length."""

    stage: str
    batch_size: int
    prompt_length: int
    tokens: int = 0
    """What one run computes, padding aside."""
    wall_seconds: tuple[float, ...] = ()
    """Of each run."""
    cpu_seconds: tuple[float, ...] = ()
    """Of all threads of this process."""
    peak_bytes: int = 0
    """The most memory that arrays took at once, the weights among it."""
    rows_together: int | None = None
    """The most prompts that were continued in one step; None: prompts were not continued."""
    problem: str | None = None
    """Why there are no figures."""

    @property
    def tokens_per_second(self) -> float:
        """Of wall time, in the median run."""
        return self.tokens / statistics.median(self.wall_seconds)

    def as_dict(self, weight_bytes: int) -> dict[str, Any]:
        """All figures by name.

        Args:
            weight_bytes: memory of the model.
        """
        place = {"stage": self.stage, "batch_size": self.batch_size, "prompt_length": self.prompt_length}
        if self.problem is not None:
            return {**place, "problem": self.problem}
        together = {} if self.rows_together is None else {"rows_together": self.rows_together}
        return {
            **place,
            **together,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "wall_seconds": statistics.median(self.wall_seconds),
            "cpu_seconds": statistics.median(self.cpu_seconds),
            "all_wall_seconds": list(self.wall_seconds),
            "all_cpu_seconds": list(self.cpu_seconds),
            "peak_bytes": self.peak_bytes,
            "above_weights_bytes": self.peak_bytes - weight_bytes,
        }


class Bench:
    """A loaded model, and the measurements of it."""

    def __init__(self, job: BenchJob, on_stage: Callable[[str], None] = lambda text: None) -> None:
        """Load the model and see that every measurement can be made.

        Args:
            job: what is to be measured.
            on_stage: told what begins, for somebody who waits.

        Raises:
            InvalidOptionError: prompts and answers do not fit the model's window, or cannot all differ.
            MlxEvalError: whatever else is wrong with the options or the model.
        """
        check_kernels()
        check_source(job.model)
        check_precision(**{name: job.loading.get(name) for name in ("dtype", "quantize", "dequantize")})
        self._job = job
        self._on_stage = on_stage
        on_stage(f"loading {job.model}")
        loaded = load_model(job.model, **job.loading)
        self._ids = _plain_ids(loaded)
        _check_room(job, loaded, self._ids.size)
        head = RowHead(loaded.model, config.LOGITS_BYTES)
        self._scorer = Scorer(loaded.model, head, sharing_of(loaded, head))
        sharing = self._scorer.sharing
        self._decoder = Decoder(loaded.model, sharing, find_decoding=lambda: decoding_of(loaded, sharing))
        fingerprint = loaded.fingerprint()
        remember_source(job.model, job.loading, model_identity(loaded, fingerprint))
        self.weight_bytes = loaded.num_bytes
        """Memory of the model."""
        self.record: Mapping[str, Any] = {
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "versions": versions(),
            "device": describe_device(),
            "model": {
                "source": job.model,
                "architecture": str(loaded.config.get("model_type", "unknown")),
                "fingerprint": fingerprint,
                "dtype": loaded.dtype,
                "quantization": loaded.quantization,
                "parameters": loaded.num_parameters,
                "bytes": loaded.num_bytes,
            },
            "sharing": describe(self._scorer.sharing.way),
            "options": {
                **job.loading,
                "batch_sizes": list(job.batch_sizes),
                "prompt_lengths": list(job.prompt_lengths),
                "gen_tokens": job.gen_tokens,
                "repeat": job.repeat,
                "seed": job.seed,
            },
        }
        """What the figures depend on, by name."""

    @property
    def num_measurements(self) -> int:
        """How many there are to be."""
        return len(STAGES) * len(self._job.batch_sizes) * len(self._job.prompt_lengths)

    def measurements(self) -> Iterator[Measurement]:
        """Measure one after the other; what finds no memory says so, and the next one is tried.

        Raises:
            ModelError: the model computes NaN.
        """
        with kept_awake(self._on_stage):
            for length in self._job.prompt_lengths:
                for batch_size in self._job.batch_sizes:
                    prompts = random_prompts(self._ids, batch_size, length + 1, self._job.seed)
                    for stage in STAGES:
                        self._on_stage(f"{stage} of {batch_size} prompts of {length:,} tokens")
                        try:
                            yield self._measure(stage, prompts)
                        except (OutOfMemoryError, MemoryError):
                            yield Measurement(stage, batch_size, length, problem=OUT_OF_MEMORY)
                        except RuntimeError as error:
                            if not is_out_of_memory(error):
                                raise
                            yield Measurement(stage, batch_size, length, problem=OUT_OF_MEMORY)
                        mx.clear_cache()

    def _measure(self, stage: str, prompts: IntArray) -> Measurement:
        """Run a stage once to warm up, and as often as asked with the clock running.

        Args:
            stage: one of `STAGES`.
            prompts: [B, P + 1], of which scoring predicts the last column and the other stages leave it out.
        """
        run = {"prefill": self._prefill, "decode": self._decode, "scoring": self._score}[stage]
        run(prompts)
        timings = [run(prompts) for _ in range(self._job.repeat)]
        return Measurement(
            stage,
            batch_size=prompts.shape[0],
            prompt_length=prompts.shape[1] - 1,
            tokens=timings[0].tokens,
            wall_seconds=tuple(timing.wall_seconds for timing in timings),
            cpu_seconds=tuple(timing.cpu_seconds for timing in timings),
            peak_bytes=max(timing.peak_bytes for timing in timings),
            rows_together=None if stage == "scoring" else self._decoder.counts.peak_rows,
        )

    def _prefill(self, prompts: IntArray) -> Timing:
        """Time until every prompt has the first token of an answer, which reads the prompt's last token."""
        return self._continue(prompts, max_tokens=1)[0]

    def _decode(self, prompts: IntArray) -> Timing:
        """Time from there until every prompt has its last token."""
        return self._continue(prompts, max_tokens=self._job.gen_tokens)[1]

    def _continue(self, prompts: IntArray, max_tokens: int) -> tuple[Timing, Timing]:
        """Continue all prompts; what passed before the last of them had its first token, and what after.

        Raises:
            OutOfMemoryError: not all of them fit together.
        """
        self._decoder.counts = DecodeCounts()
        clock = AnswerClock(len(prompts))
        self._decoder.run(
            [GenerationRequest(tuple(row[:-1].tolist()), max_tokens) for row in prompts],
            batch_size=len(prompts),
            decode=lambda ids: "",
            eos_token_ids=frozenset(),
            on_generation=lambda index, generation: None,
            on_tokens=clock.count,
        )
        if self._decoder.counts.restarted_rows:
            raise OutOfMemoryError(f"{len(prompts)} rows do not fit together")
        return clock.timings()

    def _score(self, prompts: IntArray) -> Timing:
        """Time the scores of every token behind the first of each prompt."""
        requests = [ScoringRequest(row[:1], row[1:]) for row in prompts]
        num_tokens = prompts.shape[0] * (prompts.shape[1] - 1)
        mx.reset_peak_memory()
        start = Moment.now()
        self._scorer.run(self._scorer.plan(requests, len(requests)), requests, lambda index, score: None)
        return Moment.now().since(start, num_tokens, int(mx.get_peak_memory()))


class Timing(NamedTuple):
    """What a stretch of time has brought."""

    tokens: int
    wall_seconds: float
    cpu_seconds: float
    """Of all threads of this process."""
    peak_bytes: int


class Moment(NamedTuple):
    """A reading of the clocks, in seconds."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Moment:
        """Read them."""
        return cls(time.perf_counter(), time.process_time())

    def since(self, start: Moment, tokens: int, peak_bytes: int) -> Timing:
        """The stretch from `start` to here."""
        return Timing(tokens, self.wall - start.wall, self.cpu - start.cpu, peak_bytes)


class AnswerClock:
    """Tells reading prompts from continuing them, by what a decoder says that it has computed."""

    def __init__(self, num_rows: int) -> None:
        """Start now, with `num_rows` prompts to be read."""
        self._num_unread = num_rows
        self._prompt_tokens = 0
        self._answer_tokens = 0
        self._prefill: Timing | None = None
        mx.reset_peak_memory()
        self._start = self._first = Moment.now()

    def count(self, num_tokens: int) -> None:
        """Note a token of an answer; with the first one of each come those of its prompt."""
        if self._prefill is not None:
            self._answer_tokens += num_tokens
        elif num_tokens > 1:
            self._num_unread -= 1
            self._prompt_tokens += num_tokens - 1
            if not self._num_unread:
                self._first = Moment.now()
                self._prefill = self._first.since(self._start, self._prompt_tokens, int(mx.get_peak_memory()))
                mx.reset_peak_memory()

    def timings(self) -> tuple[Timing, Timing]:
        """What passed until the last prompt had its first token, and from then until now."""
        assert self._prefill is not None
        rest = Moment.now().since(self._first, self._answer_tokens, int(mx.get_peak_memory()))
        return self._prefill, rest


def random_prompts(ids: IntArray, num_prompts: int, length: int, seed: int) -> IntArray:
    """Prompts of which no two begin with the same token; the same for the same arguments.

    Args:
        ids: what they are made of, at least `num_prompts` different ones.
        num_prompts: rows.
        length: columns.
        seed: 0 or more.

    Returns:
        [num_prompts, length]
    """
    rng = np.random.default_rng([seed, num_prompts, length])
    prompts = rng.choice(ids, (num_prompts, length))
    prompts[:, 0] = rng.choice(ids, num_prompts, replace=False)
    return prompts


def _plain_ids(loaded: LoadedModel) -> IntArray:
    """Ids of the tokenizer's ordinary tokens that the model has embeddings for."""
    special = set(loaded.tokenizer.all_special_ids)
    known = {*loaded.tokenizer.get_vocab().values()} - special
    size = loaded.vocab_size
    return np.array(sorted(one for one in known if size is None or one < size), np.int32)


def _check_room(job: BenchJob, loaded: LoadedModel, num_ids: int) -> None:
    """Refuse what cannot be measured with this model.

    Raises:
        InvalidOptionError: it cannot.
    """
    window = min(loaded.max_length, loaded.num_positions or loaded.max_length)
    longest = max(job.prompt_lengths)
    if longest + job.gen_tokens > window:
        raise InvalidOptionError(
            f"a prompt of {longest:,} tokens and an answer of {job.gen_tokens:,} do not fit the model's window of "
            f"{window:,}: give smaller --prompt_lengths or --gen_tokens"
        )
    if max(job.batch_sizes) > num_ids:
        raise InvalidOptionError(
            f"{max(job.batch_sizes):,} prompts cannot all begin with another of the model's {num_ids:,} tokens: "
            "give smaller --batch_sizes"
        )


def report_of(
    bench: Bench, measurements: Sequence[Measurement], command: Sequence[str] = ()
) -> dict[str, Any]:
    """Everything that was measured and what it depends on, fit for JSON.

    Args:
        bench: where the measurements come from.
        measurements: all of them, or those that there was time for.
        command: the command line.
    """
    return {
        "command": list(command),
        **bench.record,
        "complete": len(measurements) == bench.num_measurements,
        "measurements": [one.as_dict(bench.weight_bytes) for one in measurements],
    }


def check_target(path: str, option: str) -> Path:
    """See that a file can be written, before anything is computed.

    Args:
        path: the file.
        option: where it was given, for the error.

    Raises:
        OutputError: it cannot.
    """
    target = Path(path).expanduser()
    if target.is_dir():
        raise OutputError(f"cannot write to {path}: it is a folder; give {option} the name of a file")
    open_folder(target.parent, option)
    return target


def write_report(report: Mapping[str, Any], target: Path) -> None:
    """Write a report as JSON, whole or not at all.

    Raises:
        OutputError: it cannot be written.
    """
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OutputError(f"cannot write {target}: {error.strerror or error}") from error
