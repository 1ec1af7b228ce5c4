"""Every default of the package, once. Knows nothing of what is done with them."""

from __future__ import annotations

from typing import Final

BATCH_SIZE: Final = 8
"""Rows a forward pass (lm-eval's `hf` backend would take 1; 8 is what mlx_lm.evaluate takes)."""

MAX_LENGTH: Final = 2048
"""Context window in tokens where neither the model's configuration nor its tokenizer names one
(lm_eval.models.utils.DEFAULT_MAX_LENGTH)."""

MAX_GEN_TOKS: Final = 256
"""Generated tokens where the task sets no limit (lm-eval's `hf` backend)."""

PREFILL_STEP: Final = 2048
"""Tokens of a row computed in one forward pass. A multiple of 256: mlx-lm's mamba2 kernels go silently
wrong for padded chunks that are not."""

LOGITS_BYTES: Final = 256 * 2**20
"""The largest [rows, vocabulary] block of float32 logits that is held at once."""

QUANTIZATION_GROUP_SIZE: Final = 64
"""Weights that share a scale when `--quantize` is given (mlx-lm's own default)."""

DEMO_SOURCE: Final = "demo"
"""The model source that means the model embedded in the package."""

SEED: Final = 1234
"""For sampled generation and few-shot selection (lm-eval's own default for all but Python's `random`)."""
