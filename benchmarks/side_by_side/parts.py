"""A model's forward taken apart: the seconds of its linear layers, attention, head and the rest, each by itself.

Knows models of llama's form only. Layers do the same work, so a few of them are run and the time is scaled to all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
from mlx import nn
from mlx_eval_kernels import logprob, prefix_attention
from mlx_lm.models.activations import swiglu

from benchmarks.side_by_side.backends import stopwatch
from benchmarks.side_by_side.bare import ForwardShape
from mlx_eval import config
from mlx_eval.engine.batches import ScoringPlan

PROJECTIONS: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP: Final = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
NORMS: Final = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the number of operations follows from."""

    num_layers: int
    linear_weights: int
    """Weights that multiply every token, of all layers."""
    attention_width: int
    """Query heads times their size, of all layers: queries and keys meet on it, and so do values and weights."""
    head_weights: int
    """Weights that multiply every position to be predicted."""

    def linear_flops(self, num_tokens: float) -> float:
        """Of the linear layers; a multiplication and an addition a weight."""
        return 2.0 * self.linear_weights * num_tokens

    def attention_flops(self, num_pairs: float) -> float:
        """Of attention; a pair is a token and one that it sees, itself included."""
        return 4.0 * self.attention_width * num_pairs

    def head_flops(self, num_positions: float) -> float:
        """Of the output layer."""
        return 2.0 * self.head_weights * num_positions


def num_pairs(plan: ScoringPlan) -> int:
    """Pairs of a token and one that it sees, itself included, over all rows of a plan."""
    return sum(
        row.length * (row.start + row.end + 1) // 2  # start + 1 up to end
        for batch in plan.batches
        for row in batch.rows
    )


def module_at(root: Any, path: str) -> Any:
    """A module's descendant by its dotted path."""
    for name in path.split("."):
        root = getattr(root, name)
    return root


def seconds(work: Callable[..., Any], *arguments: Any) -> float:
    """CPU seconds of evaluating what a call returns; its arguments are evaluated before."""
    mx.eval([argument for argument in arguments if isinstance(argument, mx.array)])
    with stopwatch() as taken:
        mx.eval(work(*arguments))
    return taken().cpu


class Parts:
    """Times the parts of one model's forward."""

    def __init__(self, model: nn.Module, num_sampled: int) -> None:
        """Look the parts up.

        Args:
            model: of llama's form.
            num_sampled: layers that are run; the time is scaled to all.

        Raises:
            SystemExit: the model has another form.
        """
        layers = list(model.layers)
        try:
            linears = [[module_at(layer, path) for path in (*PROJECTIONS, *MLP)] for layer in layers]
            body = module_at(model, "model")
            head = (
                module_at(model, "model.embed_tokens")
                if "lm_head" not in model
                else module_at(model, "lm_head")
            )
            self.sizes = Sizes(
                num_layers=len(layers),
                linear_weights=sum(linear.weight.size for layer in linears for linear in layer),
                attention_width=sum(layer[3].weight.shape[1] for layer in linears),
                head_weights=head.weight.size,
            )
            attention = layers[0].self_attn
            width = attention.q_proj.weight.shape[0] // attention.n_heads
            self._heads = attention.n_heads, attention.n_kv_heads, width, attention.scale
        except AttributeError as error:
            raise SystemExit(f"parts are known of models of llama's form only: {error}") from error
        self._sampled = layers[:num_sampled]
        self._scale = len(layers) / len(self._sampled)
        self._norm, self._head_weight = body.norm, head.weight

    def best_rate(self) -> float:
        """FLOPs a second of the linear layers, over as many rows as a full batch has; the best of three."""
        num_rows = config.BATCH_TOKENS
        best = min(self.linear([ForwardShape(1, num_rows, 0, 0)]) for _ in range(3))
        return self.sizes.linear_flops(num_rows) / best

    def linear(self, shapes: Sequence[ForwardShape]) -> float:
        """Seconds of all linear layers but the head."""
        linears = [module_at(layer, path) for layer in self._sampled for path in (*PROJECTIONS, *MLP)]
        total = 0.0
        for shape in shapes:
            num_rows = shape.num_rows * shape.num_tokens
            inputs = {
                width: mx.random.normal((num_rows, width))
                for width in {one.weight.shape[1] for one in linears}
            }
            total += sum(seconds(one, inputs[one.weight.shape[1]]) for one in linears)
        return total * self._scale

    def attention(self, shapes: Sequence[ForwardShape]) -> float:
        """Seconds of all layers' attention, the shared prefix read once for all rows."""
        return sum(map(self._attention_once, shapes)) * self.sizes.num_layers

    def _attention_once(self, shape: ForwardShape) -> float:
        num_heads, num_kv_heads, width, scale = self._heads
        own = shape.num_cached - shape.num_shared + shape.num_tokens
        queries = mx.random.normal((shape.num_rows, num_heads, shape.num_tokens, width))
        keys = mx.random.normal((shape.num_rows, num_kv_heads, own, width))
        options = {"scale": scale, "mask": "causal" if shape.num_tokens > 1 else None}
        if shape.num_shared:
            prefix = mx.random.normal((1, num_kv_heads, shape.num_shared, width))
            attend = functools.partial(prefix_attention, **options)
            return seconds(attend, queries, prefix, prefix, keys, keys)
        return seconds(
            functools.partial(mx.fast.scaled_dot_product_attention, **options), queries, keys, keys
        )

    def elementwise(self, shapes: Sequence[ForwardShape]) -> dict[str, float]:
        """Seconds of what is no product, of all layers, by what it is."""
        num_heads, num_kv_heads, width, _ = self._heads
        layer = self._sampled[0]
        hidden, inner = layer.mlp.down_proj.weight.shape
        works: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
            "norms": (lambda x: [module_at(layer, path)(x) for path in NORMS], (hidden,)),
            "residual additions": (lambda x: [x + x, x + 1], (hidden,)),
            "activations": (lambda x: swiglu(x, x), (inner,)),
            "rotations": (
                lambda x: layer.self_attn.rope(x.transpose(0, 2, 1, 3), offset=1),
                (num_heads + num_kv_heads, width),
            ),
        }
        return {
            name: self.sizes.num_layers
            * sum(seconds(work, mx.random.normal((one.num_rows, one.num_tokens, *tail))) for one in shapes)
            for name, (work, tail) in works.items()
        }

    def copies(self, shapes: Sequence[ForwardShape]) -> float:
        """Seconds of giving each row its ancestors' KV, where that is not stored once, and of adding its own."""
        _, num_kv_heads, width, _ = self._heads
        total = 0.0
        for shape in shapes:
            own = shape.num_cached - shape.num_shared
            if own:
                before = mx.random.normal((shape.num_rows, num_kv_heads, own, width))
                new = mx.random.normal((shape.num_rows, num_kv_heads, shape.num_tokens, width))
                total += seconds(_behind, before, new, mx.arange(shape.num_rows))
        return 2 * total * self.sizes.num_layers  # keys and values

    def head(self, shapes: Sequence[ForwardShape]) -> tuple[float, float]:
        """Seconds of the output layer with the norm before it, and of normalising its logits."""
        vocabulary, hidden = self._head_weight.shape
        most_rows = max(1, config.LOGITS_BYTES // (4 * vocabulary))
        output = normalised = 0.0
        for shape in shapes:
            for begin in range(0, shape.num_logits, most_rows):
                rows = min(most_rows, shape.num_logits - begin)
                output += seconds(self._logits, mx.random.normal((rows, hidden)))
                logits, targets = mx.random.normal((rows, vocabulary)), mx.zeros((rows, 4), dtype=mx.int32)
                normalised += seconds(_normalised, logits, targets)
        return output, normalised

    def _logits(self, states: mx.array) -> mx.array:
        logits: mx.array = self._norm(states) @ self._head_weight.T
        return logits


def _behind(before: mx.array, new: mx.array, rows: mx.array) -> mx.array:
    return mx.concatenate([before[rows], new], axis=-2)


def _normalised(logits: mx.array, targets: mx.array) -> tuple[mx.array, mx.array]:
    found = logprob(logits, targets)
    return found.logprob, found.argmax
