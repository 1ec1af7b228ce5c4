"""What a batch may take of the device's memory. Knows the device and the model's sizes, no tokens.

On Metal the budget is what the system recommends as a working set, on Linux what memory is available now.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import mlx.core as mx
from mlx import nn

from mlx_eval import config
from mlx_eval.engine.batches import CacheSize, Limits

OUT_OF_MEMORY: Final = ("[malloc", "[metal::malloc", "Insufficient Memory", "OutOfMemory", "std::bad_alloc")
"""Parts of the messages that MLX raises when memory runs out."""


def scoring_limits(cache: CacheSize, batch_size: int | None = None, *, reserved_bytes: int = 0) -> Limits:
    """Limits for the memory that is free now.

    Args:
        cache: what the model keeps of each token.
        batch_size: the most rows of a batch; None: as many as fit.
        reserved_bytes: of the free memory, what something else will take, such as weights not yet loaded.

    Returns:
        Limits whose KV is never less than that of one batch, free or not: it is tried then.
    """
    share = int(max(0, free_bytes() - reserved_bytes) * config.KV_SHARE)
    largest_buffer = mx.device_info().get("max_buffer_length")
    if largest_buffer:
        # keys of one layer are one buffer: an eighth of all KV in a model of four layers, less in larger ones
        share = min(share, int(largest_buffer) * 8)
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    batch_tokens = config.CPU_BATCH_TOKENS if on_cpu else config.BATCH_TOKENS
    return Limits(
        max_rows=config.MAX_ROWS if batch_size is None else batch_size,
        batch_tokens=batch_tokens,
        kv_bytes=max(share, batch_tokens * cache.token_bytes + cache.row_bytes),
        step=config.CPU_PREFILL_STEP if on_cpu else config.PREFILL_STEP,
    )


def free_bytes() -> int:
    """Bytes that arrays may still take."""
    recommended = mx.device_info().get("max_recommended_working_set_size")
    if recommended:
        return max(0, int(recommended) - mx.get_active_memory())
    return available_bytes()


def available_bytes() -> int:
    """Bytes that programs can have without swapping, as Linux reports it; elsewhere a default."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return config.AVAILABLE_BYTES


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether MLX raised it because memory ran out."""
    return any(part in str(error) for part in OUT_OF_MEMORY)


@contextlib.contextmanager
def wired(model: nn.Module) -> Iterator[None]:
    """Keep the model's memory from being paged out while the block runs, as mlx-lm does on macOS."""
    from mlx_lm.generate import wired_limit

    with wired_limit(model):
        yield
