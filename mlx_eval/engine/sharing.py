"""How far a model's rows may share prefixes and batches: asked of the model itself, as no class or name tells.

Knows a model and the engine; knows neither requests of a user nor text. A small forest of a few dozen tokens is
scored in every way that the engine has, the fastest first, and compared with each row alone from its first
token, in mlx-lm's own caches; the first way that gives the same numbers is taken. mlx-lm computes some models
wrongly in some of these ways, loudly or silently (docs/guides/architectures.md has the table).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx import nn
from mlx.utils import tree_flatten

from mlx_eval.engine.batches import CacheSize, Level, Limits, Sharing
from mlx_eval.engine.branch import Layout
from mlx_eval.engine.budget import is_out_of_memory
from mlx_eval.engine.execute import FAILURES, Executor, ModelCallError, Tally
from mlx_eval.engine.kv import CacheFactory, arrays_of
from mlx_eval.engine.plan import plan_scoring
from mlx_eval.models.head import RowHead, replace_module
from mlx_eval.records import IntArray, Score, ScoringRequest

FloatArray = npt.NDArray[np.float64]

PROBE_LIMITS: Final = Limits(max_rows=6)
"""So few rows that the probe's forests take several batches."""

Tree = tuple[int, tuple[Any, ...]]
"""A node's length, and below it a tree or a length for each child."""
PROBE: Final[tuple[tuple[Tree, ...], ...]] = (
    ((8, (1, (9, ((12, (2, 1)), (2, (1, 3, 2)), (3, (2, 1, 3)), 1)))),),
    ((12, ((3, (1,)), 1)), (3, ((4, (2, 1)), 2, 1)), (2, (1, 3, (2, (1, 2))))),
    ((6, (1, 1, 1, 1)),),
)
"""One stem, whose rows stand behind prefixes within prefixes; three stems, whose rows get copies; and rows of
single tokens, for which many models have code of their own. In the first two, rows of 2 and 3 tokens beside one of
12 are gone on from: what their padding does to a recurrent state shows in a third of the scores or more."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a forest."""

    level: Level
    branches: bool
    """Whether keys and values are kept in `BranchCache`."""
    splits_attention: bool
    """Whether attention reads a prefix that is stored once."""


WAYS: Final = (
    Way(Level.RAGGED, branches=True, splits_attention=True),
    Way(Level.RAGGED, branches=True, splits_attention=False),
    Way(Level.EQUAL, branches=True, splits_attention=True),
    Way(Level.EQUAL, branches=True, splits_attention=False),
    Way(Level.EQUAL, branches=False, splits_attention=False),
    Way(Level.ROWS, branches=False, splits_attention=False),
    Way(Level.ALONE, branches=False, splits_attention=False),
)
"""The fastest first; the last is what all others are compared with."""


@dataclass(frozen=True, slots=True)
class ModelSharing:
    """What the self-test found."""

    way: Way
    keys_only: bool
    """See `plan.Sharing`."""
    cache: CacheSize
    findings: tuple[str, ...] = ()
    """A line for each way that does not hold, and why."""

    @property
    def sharing(self) -> Sharing:
        """For the planner."""
        return Sharing(self.way.level, self.way.branches, self.keys_only)

    def caches(self, model: Any) -> CacheFactory:
        """For the executor."""
        return _factory(model, self.way)

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return {**asdict(self), "way": {**asdict(self.way), "level": self.way.level.name}}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> ModelSharing:
        """From what `as_dict` wrote.

        Raises:
            KeyError, TypeError: it is something else.
        """
        if not all(isinstance(number, int) for number in stored["cache"].values()):
            raise TypeError("bytes are whole numbers")
        way = Way(**{**stored["way"], "level": Level[stored["way"]["level"]]})
        return cls(way, stored["keys_only"], CacheSize(**stored["cache"]), tuple(stored["findings"]))


def find_sharing(model: nn.Module, head: RowHead, after: Way | None = None) -> ModelSharing:
    """Find the fastest way that gives the numbers of each row alone.

    Args:
        model: an mlx-lm model.
        head: of the same model.
        after: try only what comes after this way, which is not the last.

    Raises:
        RuntimeError: memory ran out.
        Exception: whatever the model raises for a single row.
    """
    ways = WAYS[:-1] if after is None else WAYS[WAYS.index(after) + 1 : -1]
    forests = probe_requests(head.vocab_size)
    wide = in_float32(model)
    wide_head = head if wide is model else RowHead(wide, 4 * head.vocab_size * head.max_rows)
    try:
        alone = _scores(wide, wide_head, WAYS[-1], forests)
    except ModelCallError as refusal:
        raise (refusal.__cause__ or refusal) from None
    findings: list[str] = []
    for way in ways:
        try:
            difference = _difference(alone, _scores(wide, wide_head, way, forests))
            if difference <= tolerance(wide_head.dtype):
                if wide is not model:
                    _scores(model, head, way, forests)  # its own type may be refused where float32 is not
                return _found(model, way, findings)
            finding = f"differs from a row alone by {difference:.1e} of a standard deviation"
        except (ModelCallError, *FAILURES) as raised:
            error = raised.__cause__ or raised
            if isinstance(error, RuntimeError) and is_out_of_memory(error):
                raise  # that says nothing of the model
            finding = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        findings.append(f"{describe(way)}: {finding}")
    return _found(model, WAYS[-1], findings)


def untested_sharing(model: nn.Module) -> ModelSharing:
    """What a model would allow if it passed the self-test in the fastest way; its weights are not looked at."""
    return _found(model, WAYS[0], ())


def describe(way: Way) -> str:
    """A way in words."""
    return {
        Level.RAGGED: "prefixes of any length",
        Level.EQUAL: "prefixes of equal length",
        Level.ROWS: "whole rows side by side",
        Level.ALONE: "one row at a time",
    }[way.level] + (
        (", stored once and read by the attention" if way.splits_attention else ", stored once")
        if way.branches
        else (", copied to each row" if way.level is Level.EQUAL else "")
    )


def tolerance(dtype: mx.Dtype) -> float:
    """The largest difference that is taken for rounding, as `_difference` counts.

    Rounding differs with the shape of a batch and grows over the layers. In float32 what is right differs by 2e-5 at
    most over mlx-lm's architectures, tiny and random, and what is wrong by 0.015 at least. A GPU with matrix units
    multiplies float32 with the 10 bits of tf32 (mlx's MLX_ENABLE_TF32), some shapes only.
    """
    on_gpu = mx.default_device() == mx.Device(mx.gpu)
    return max(math.pow(mx.finfo(dtype).eps, 0.6), 2e-3 if on_gpu else 0.0)


def probe_requests(vocab_size: int) -> list[list[ScoringRequest]]:
    """The requests of each forest of `PROBE`, all tokens of which are scored."""
    rng = np.random.default_rng(0)
    forests: list[list[ScoringRequest]] = []

    def grow(above: IntArray, tree: Any) -> None:
        length, children = (tree, ()) if isinstance(tree, int) else tree
        ids = rng.integers(1, min(vocab_size, 1000), length + 1, dtype=np.int32)  # the last is never fed
        forests[-1].append(ScoringRequest(above, ids) if above.size else ScoringRequest(ids[:1], ids[1:]))
        for child in children:
            grow(np.concatenate([above, ids[:-1]]), child)

    for trees in PROBE:
        forests.append([])
        for tree in trees:
            grow(np.zeros(0, np.int32), tree)
    return forests


def in_float32(model: nn.Module) -> nn.Module:
    """A shallow copy whose embeddings answer in float32, and so does all that follows; `model` if it does itself.

    In half precision, rounding is as large as the smaller mistakes, more so where experts are chosen. Weights stay as
    they are: MLX widens them as it multiplies.
    """
    parameters: Any = tree_flatten(model.parameters())
    types = {array.dtype for _, array in parameters}
    if not types & {mx.bfloat16, mx.float16}:
        return model
    wide = model
    for path, module in model.named_modules():
        if path and isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
            wide = replace_module(wide, path, lambda embedded: embedded.astype(mx.float32))
    return wide


def cache_size(model: nn.Module, factory: CacheFactory) -> CacheSize:
    """Memory that one row takes, from the shapes of what the model would keep; nothing is computed."""
    short, long = (_num_bytes(model, factory, length) for length in (256, 512))
    token_bytes = max(0, long - short) // 256
    return CacheSize(token_bytes=max(1, token_bytes), row_bytes=max(0, short - 256 * token_bytes))


def _found(model: nn.Module, way: Way, findings: Sequence[str]) -> ModelSharing:
    factory = _factory(model, way)
    return ModelSharing(way, factory.keys_only, cache_size(model, factory), tuple(findings))


def _factory(model: Any, way: Way) -> CacheFactory:
    return CacheFactory(model, branches=way.branches, splits_attention=way.splits_attention)


def _scores(
    model: nn.Module, head: RowHead, way: Way, forests: Sequence[Sequence[ScoringRequest]]
) -> list[FloatArray]:
    """Log-probability a token of each request, an array a forest."""
    factory = _factory(model, way)
    sharing = Sharing(way.level, way.branches, factory.keys_only)
    scores = []
    for requests in forests:
        plan = plan_scoring(requests, PROBE_LIMITS, sharing, split_tokens=1)
        found: dict[int, Score] = {}
        tally = Tally(requests, found.__setitem__)
        Executor(model, head, factory, plan=plan, requests=requests, tally=tally).run()
        scores.append(
            np.array([found[index].logprob / one.continuation_ids.size for index, one in enumerate(requests)])
        )
    return scores


def _difference(alone: Sequence[FloatArray], together: Sequence[FloatArray]) -> float:
    """What three in four scores of a forest differ by at most, in standard deviations; the largest of all forests.

    A mistake touches all rows of a kind, and a forest has many of its kind. In a mixture of experts rounding may send
    a token to another expert, which moves single scores as far, so a single one counts a hundredth only. A model that
    gives NaN alone has other troubles than batches.
    """
    everything = np.concatenate(alone)
    deviation = max(
        float(np.std(everything[np.isfinite(everything)] if np.isfinite(everything).any() else 0.0)), 1e-30
    )
    largest = 0.0
    for wanted, given in zip(alone, together, strict=True):
        known = np.isfinite(wanted)
        errors = np.abs(wanted[known] - given[known])
        if not np.isfinite(errors).all():
            return math.inf
        if errors.size:
            largest = max(largest, float(np.quantile(errors, 0.75)), float(errors.max()) / 100)
    return largest / deviation


def _num_bytes(model: nn.Module, factory: CacheFactory, length: int) -> int:
    one = np.zeros(1, np.int32)
    layout = Layout(0, np.zeros((1, 0), np.int32), one, one + length)
    caches = factory.start(layout, None, [])
    model(mx.zeros((1, length), mx.int32), cache=caches)
    return sum(array.nbytes for array in arrays_of(caches))
