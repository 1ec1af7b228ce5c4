"""One way of computing the kernels' functions, for suites that all ways must pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
from mlx_eval_kernels.attention_parts import attention_by_parts
from mlx_eval_kernels.launch import Dispatch, Run
from mlx_eval_kernels.logprob import LogProb
from mlx_eval_kernels.logprob import by_kernel as logprob_by_kernel
from mlx_eval_kernels.logprob import by_reference as logprob_by_reference
from mlx_eval_kernels.prefix_attention import by_reference as attention_by_reference


@dataclass(frozen=True, slots=True)
class Way:
    """The functions as one backend computes them."""

    name: str
    run: Run | None
    """Carries Metal source out; None: plain MLX."""

    def logprob(self, logits: mx.array, targets: mx.array) -> LogProb:
        if self.run is None:
            return logprob_by_reference(logits, targets)
        return logprob_by_kernel(logits, targets, self.run)

    def prefix_attention(
        self,
        *arrays: mx.array,
        scale: float,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if self.run is None:
            return attention_by_reference(*arrays, scale=scale, mask=mask, sinks=sinks)
        return attention_by_parts(*arrays, scale=scale, mask=mask, sinks=sinks, run=self.run)


@dataclass(frozen=True, slots=True)
class Recorder:
    """Carries dispatches out and keeps them."""

    run: Run
    dispatches: list[Dispatch] = field(default_factory=list)

    def __call__(self, dispatch: Dispatch) -> Sequence[mx.array]:
        self.dispatches.append(dispatch)
        return self.run(dispatch)
