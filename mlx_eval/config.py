"""Every default of the package, once. Knows nothing of what is done with them."""

from __future__ import annotations

from typing import Final

BATCH_SIZE: Final = "auto"
"""The most rows computed together: as many as memory allows."""

DECODE_ROWS: Final = 32
"""Prompts continued together where the user sets no ceiling and memory allows (as many as mlx-lm's
batch_generate)."""

SPECULATE: Final = "off"
"""Whether answers are drafted from the text before them. Drafts change the shapes that a model computes, and with
them its rounding: off, a run gives the same texts each time."""

LONGEST_DRAFT: Final = 16
"""Tokens of a draft at most: a step computes the logits of one more for each row."""

RUN_TOKENS: Final = 1024
"""What a further run of rows costs in a decoding step, in tokens of KV read: a prefix that saves fewer is copied."""

EXPECTED_TOKENS: Final = 1024
"""Tokens of an answer that memory is set aside for when a row joins; answers whose limit is lower need no more."""

MAX_LENGTH: Final = 2048
"""Context window in tokens where neither the model's configuration nor its tokenizer names one
(lm_eval.models.utils.DEFAULT_MAX_LENGTH)."""

MAX_GEN_TOKS: Final = 256
"""Generated tokens where the task sets no limit (lm-eval's `hf` backend)."""

PREFILL_STEP: Final = 2048
"""Tokens of a row computed in one forward pass. A multiple of 256: mlx-lm's mamba2 kernels go silently
wrong for padded chunks that are not."""

CPU_PREFILL_STEP: Final = 512
"""The same on the CPU device, whose attention computes what the causal mask hides: half of it within a step."""

SMALLEST_STEP: Final = 256
"""The least of these steps that is tried when memory ran out."""

BATCH_TOKENS: Final = 2048
"""Rows times padded length of a scoring batch."""

CPU_BATCH_TOKENS: Final = 1024
"""The same on the CPU device, which is no faster with more, and takes twice the memory."""

MAX_ROWS: Final = 512
"""Rows of a scoring batch where the user sets no ceiling."""

KV_BYTES: Final = 2**30
"""KV that scoring may hold at once where the device's memory is not asked."""

CALIBRATION_TOKENS: Final = 1024
"""About how many tokens a dry run computes to tell how long the run would take."""

KV_SHARE: Final = 0.5
"""Part of the free memory that KV may take; the rest is for what a forward pass computes in between."""

AVAILABLE_BYTES: Final = 4 * 2**30
"""Free memory where the system does not tell."""

SPLIT_TOKENS: Final = 16
"""What it costs to compute a prefix by itself and go on from it, in tokens: a shared prefix that saves fewer is
computed again in each row."""

FORWARD_TOKENS: Final = 32
"""Positions of padding in a batch that cost less than another forward pass."""

PADDING_SHARE: Final = 0.03
"""Padding that a batch may have beyond that, as a part of its tokens."""

AHEAD_TOKENS: Final = 4096
"""Tokens of KV that may wait until their rows go on: parents are computed first, so that their children, which
are short, fill batches of one length."""

PREFIX_COPIES: Final = 4096
"""A family whose rows would copy fewer tokens of KV from their parents than this shares batches with other families;
a larger one gets batches of its own, behind a prefix that is stored once."""

LOGITS_BYTES: Final = 256 * 2**20
"""The largest [rows, vocabulary] block of float32 logits that is held at once."""

QUANTIZATION_GROUP_SIZE: Final = 64
"""Weights that share a scale when `--quantize` is given (mlx-lm's own default)."""

DEMO_SOURCE: Final = "demo"
"""The model source that means the model embedded in the package."""

SEED: Final = 1234
"""For sampled generation and few-shot selection (lm-eval's own default for all but Python's `random`)."""

BENCH_BATCH_SIZES: Final = (1, 8, 32)
"""Prompts that are there at once when speed is measured."""

BENCH_PROMPT_LENGTHS: Final = (128, 512)
"""Their lengths in tokens."""

BENCH_GEN_TOKENS: Final = 64
"""Tokens of each answer then."""

BENCH_REPEAT: Final = 3
"""Timed runs of which the median counts."""
