"""The weights that turn a model's last hidden states into logits, where that is all that happens to them.

Models scale, cap and bias their logits in ways that no configuration lists reliably. So the layer is found by
comparing: hidden states go through the model's own last steps and through each layer that could be the one, and the
bits must be equal. Knows a model and its `RowHead`; what the weights are multiplied by and when is up to others.
"""

from __future__ import annotations

from typing import Any, Final

import mlx.core as mx
from mlx import nn
from mlx_eval_kernels import AffineHead, DenseHead, Head, KernelError, linear_logprob, logprob

from mlx_eval.errors import DeviceError, InvalidOptionError
from mlx_eval.models.head import PROBE_IDS, RowHead

NUM_TARGETS: Final = 16
"""Tokens whose log-probabilities are compared at each position of the probe."""
EPSILONS: Final = 64
"""Of the logits' type and their size, what rounding may change: on the CPU, MLX sums 4-bit products of half types in
the half type, and was off by 13 at a width of 4,096."""
LEAST_TOLERANCE: Final = 5e-3
"""The same beside plain MLX and for float32, whose factors matrix units may round to 10 bits."""
ADVICE: Final = "run without low_memory_head"


def output_layer(model: nn.Module, head: RowHead) -> Head:
    """Find the layer that makes logits of hidden states, and does all that is done to them.

    Args:
        model: an mlx-lm model, ready to run.
        head: of the same model.

    Raises:
        InvalidOptionError: the model's logits are something else than the product with such a layer.
        DeviceError: `linear_logprob` does not give the model's log-probabilities on this machine.
    """
    if not head.is_split:
        raise InvalidOptionError(
            "low_memory_head needs the hidden states before the output layer, which were not found, or the model "
            f"computes NaN: {ADVICE}"
        )
    from mlx_lm.models.cache import make_prompt_cache

    tokens = mx.array(PROBE_IDS)
    states = head.hidden(tokens, mx.arange(tokens.size), make_prompt_cache(model))  # [R, H]
    logits = head.logits_of(states)  # [R, V]
    for layer in model.modules():
        found = _as_head(layer)
        if found is None or found.shape != (logits.shape[1], states.shape[1]):
            continue
        multiply = layer.as_linear if isinstance(layer, nn.Embedding | nn.QuantizedEmbedding) else layer
        if mx.array_equal(multiply(states[None])[0], logits).item():
            _compare(states, found, logits)
            return found
    raise InvalidOptionError(
        "low_memory_head needs logits that are the product of hidden states and an output layer and nothing more; "
        f"this model scales, caps or biases them, or has a layer of another kind: {ADVICE}"
    )


def _as_head(layer: Any) -> Head | None:
    """The weights of a layer that multiplies and nothing more; None: it does something else.

    A class derived from one of these may do anything.
    """
    if (
        type(layer) not in (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding)
        or "bias" in layer
    ):
        return None
    if "scales" not in layer:
        return DenseHead(layer.weight)
    if layer.mode != "affine":
        return None
    return AffineHead(layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits)


def _compare(states: mx.array, found: Head, logits: mx.array) -> None:
    """Raise a `DeviceError` where log-probabilities differ by more than the rounding of logits."""
    rows, size = logits.shape
    spread = mx.arange(NUM_TARGETS) * size // NUM_TARGETS
    targets = mx.concatenate(
        [mx.broadcast_to(spread, (rows, NUM_TARGETS)), mx.argmax(logits, axis=-1, keepdims=True)], axis=1
    )
    try:
        ours = linear_logprob(states, found, targets).logprob
    except KernelError as error:
        raise InvalidOptionError(f"low_memory_head: {error}") from error
    plain = linear_logprob(states, found, targets, backend="reference").logprob
    largest = mx.maximum(1, mx.max(mx.abs(logits.astype(mx.float32))))
    rounding = max(EPSILONS * mx.finfo(logits.dtype).eps, LEAST_TOLERANCE)
    for wanted, tolerance in ((plain, LEAST_TOLERANCE), (logprob(logits, targets).logprob, rounding)):
        difference = mx.max(mx.abs(ours - wanted)) / largest
        if not (difference <= tolerance).item():
            raise DeviceError(
                f"low_memory_head gives log-probabilities that are off by {difference.item():.1e} of the largest "
                f"logit on a probe: {ADVICE}, and please report it"
            )
