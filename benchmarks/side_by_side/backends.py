"""The backends that are compared, behind one face: load, score texts, say what was computed.

Each is imported only when asked for, so that a process holds one of them. On Linux an optimised BLAS must be in
the process before mlx is: ours sees to it itself, for the peer it is done here.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, Final, Protocol

from benchmarks.side_by_side.works import Work

Answer = tuple[float, bool | None]
"""Log-probability in nats and whether greedy decoding would give it; None for rolling requests."""

WARM_UP: Final = (
    ("The quick brown fox", " jumps over the dog"),
    ("The quick brown fox", " sleeps"),
    ("Question: what is it? Answer:", " a test"),
)
"""Scored before the clock starts: threads, allocators and checks of the model are started by then."""


@dataclass(frozen=True, slots=True)
class Computed:
    """What a backend computed for its answers."""

    tokens: int
    """Tokens that went through the model; of a peer, which does not tell, its padding with them."""
    padding: int | None
    """Positions computed for nothing; None where the backend does not tell."""
    forwards: int


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of one piece of work."""

    wall: float
    cpu: float
    """User and system, all threads of this process."""


@contextmanager
def stopwatch() -> Iterator[Callable[[], Seconds]]:
    """Measure a block; what it yields tells the block's seconds afterwards."""
    wall, cpu = time.perf_counter(), time.process_time()
    taken: list[Seconds] = []
    yield lambda: taken[0]
    taken.append(Seconds(time.perf_counter() - wall, time.process_time() - cpu))


class Backend(Protocol):
    """One way of scoring."""

    packages: tuple[str, ...]
    """What its speed depends on."""

    def score(self, work: Work) -> list[Answer]:
        """Answer all requests; this is what is measured."""

    def computed(self) -> Computed:
        """What was computed since the last call."""

    def num_tokens(self, text: str) -> int:
        """Tokens of a text, for scaling and tolerances."""


class Ours:
    """This project."""

    packages: tuple[str, ...] = ("mlx", "mlx-lm")

    def __init__(self, model: str, batch_size: str) -> None:
        from mlx_eval.harness.lm import MLXEvalLM
        from mlx_eval.models.load import load_model

        self._make: Callable[..., Any] = MLXEvalLM
        self._loaded = load_model(model, dtype="float32")
        self._batch_size = int(batch_size) if batch_size.isdecimal() else batch_size
        self.model: Any = self._loaded.model
        self._use(None)

    def _use(self, max_length: int | None) -> None:
        self.lm = self._make(self._loaded, batch_size=self._batch_size, max_length=max_length)
        self.scorer = WatchedScorer(self.lm._ready_scorer())
        self.lm._ready_scorer = lambda: self.scorer

    def score(self, work: Work) -> list[Answer]:
        """Through the methods that lm-eval calls."""
        if work.max_length is not None and work.max_length != self.lm.max_length:
            self._use(work.max_length)
        return _ask(self.lm, work, disable_tqdm=True)

    def computed(self) -> Computed:
        """The plan's own figures."""
        statistics = self.lm.statistics
        found = Computed(statistics.tokens["computed"], statistics.tokens["padding"], statistics.forwards)
        statistics.tokens.clear()
        statistics.forwards = 0
        return found

    def num_tokens(self, text: str) -> int:
        """Without special tokens."""
        return len(self.lm.tok_encode(text, add_special_tokens=False))


class WatchedScorer:
    """Stands in for the engine's scorer and remembers what it was given."""

    def __init__(self, scorer: Any) -> None:
        self._scorer = scorer
        self.plan_made: Any = None
        self.requests: Any = ()
        self.seconds = {"plan": Seconds(0.0, 0.0), "run": Seconds(0.0, 0.0)}
        """Of the last call."""

    def plan(self, *arguments: Any) -> Any:
        """The engine's own call."""
        with stopwatch() as taken:
            plan = self._scorer.plan(*arguments)
        self.seconds["plan"] = taken()
        return plan

    def run(self, plan: Any, requests: Any, *arguments: Any) -> None:
        """The engine's own call."""
        self.plan_made, self.requests = plan, requests
        with stopwatch() as taken:
            self._scorer.run(plan, requests, *arguments)
        self.seconds["run"] = taken()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scorer, name)


class MlxLm:
    """`mlx_lm.evaluate`. Its rolling scores leave out the first token and know no windows."""

    packages: tuple[str, ...] = ("mlx", "mlx-lm")

    def __init__(self, model: str, batch_size: str) -> None:
        from mlx_eval.models.runtime import preload_blas

        preload_blas()
        from mlx_lm.evaluate import MLXLM

        self._lm = MLXLM(model, batch_size=int(batch_size))
        self._counter = CountingModel(self._lm._model)
        self._lm._model = self._counter

    def score(self, work: Work) -> list[Answer]:
        """One question at a time, its context once for its choices."""
        return _ask(self._lm, work)

    def computed(self) -> Computed:
        """Counted at the model's call."""
        return self._counter.take()

    def num_tokens(self, text: str) -> int:
        """Without special tokens."""
        return len(self._lm.tokenizer.encode(text, add_special_tokens=False))


class HuggingFace:
    """lm-eval's `hf` backend: torch on the CPU."""

    packages: tuple[str, ...] = ("torch", "transformers", "lm-eval")

    def __init__(self, model: str, batch_size: str) -> None:
        import torch
        from lm_eval.models.huggingface import HFLM

        self._make: Callable[..., Any] = HFLM
        self._source = model
        self._options = {"batch_size": int(batch_size), "device": "cpu", "dtype": torch.float32}
        self._lm: Any = HFLM(pretrained=model, **self._options)
        self._max_length: int | None = None
        self._counts = [0, 0]
        self._lm.model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _module: Any, arguments: Sequence[Any], named: dict[str, Any]) -> None:
        ids = arguments[0] if arguments else named["input_ids"]
        self._counts[0] += ids.numel()
        self._counts[1] += 1

    def score(self, work: Work) -> list[Answer]:
        """Every distinct row of context and continuation by itself."""
        self._lm._max_length = work.max_length
        return _ask(self._lm, work, disable_tqdm=True)

    def computed(self) -> Computed:
        """Counted at the model's call."""
        tokens, forwards = self._counts
        self._counts[:] = [0, 0]
        return Computed(tokens, None, forwards)

    def num_tokens(self, text: str) -> int:
        """Without special tokens."""
        return len(self._lm.tok_encode(text, add_special_tokens=False))


class Oracle:
    """What the answers should be, see `oracle`; in no table of speed, unless asked for."""

    packages: tuple[str, ...] = ("mlx", "mlx-lm", "lm-eval")

    def __init__(self, model: str, batch_size: str) -> None:
        from benchmarks.side_by_side.oracle import OracleLM

        self._lm: Any = OracleLM(model)

    def score(self, work: Work) -> list[Answer]:
        """One request or window at a time."""
        self._lm.max_length = work.max_length
        return _ask(self._lm, work, disable_tqdm=True)

    def computed(self) -> Computed:
        """Its own count."""
        found = Computed(self._lm.num_tokens, 0, self._lm.num_forwards)
        self._lm.num_tokens = self._lm.num_forwards = 0
        return found

    def num_tokens(self, text: str) -> int:
        """Without special tokens."""
        return len(self._lm.tok_encode(text))


class CountingModel:
    """Stands in for an mlx-lm model and counts what runs through it."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._tokens = self._forwards = 0

    def __call__(self, inputs: Any, **options: Any) -> Any:
        """The model's own call."""
        self._tokens += inputs.size
        self._forwards += 1
        return self._model(inputs, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def take(self) -> Computed:
        """The counts, set back to zero."""
        found = Computed(self._tokens, None, self._forwards)
        self._tokens = self._forwards = 0
        return found


BACKENDS: Final[dict[str, Callable[[str, str], Backend]]] = {
    "ours": Ours,
    "mlx_lm": MlxLm,
    "hf": HuggingFace,
    "oracle": Oracle,
}
"""By the names of the command line."""


def backend_versions(name: str) -> dict[str, str]:
    """What a stored measurement of a backend depends on, beside model and requests."""
    packages = BACKENDS[name].packages  # type: ignore[attr-defined]  # a class
    return {"python": platform.python_version(), **{package: version(package) for package in packages}}


def warm_up(backend: Backend, work: Work) -> None:
    """Score a few short requests of the work's kind."""
    texts = WARM_UP if work.kind == "loglikelihood" else tuple((context,) for context, _ in WARM_UP)
    backend.score(Work("warm-up", work.kind, texts, tuple(range(len(texts))), work.max_length))
    backend.computed()


def _ask(lm: Any, work: Work, **options: Any) -> list[Answer]:
    """Call the method that lm-eval would call."""
    found = getattr(lm, work.kind)([SimpleNamespace(args=texts) for texts in work.texts], **options)
    if work.kind == "loglikelihood_rolling":
        return [(float(score), None) for score in found]
    return [(float(score), bool(is_greedy)) for score, is_greedy in found]
