from __future__ import annotations

import builtins
import io
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_eval import config
from mlx_eval.engine import budget
from mlx_eval.engine.batches import CacheSize
from tests.tiny import tiny_model

GIGABYTE = 2**30


def usual_tokens() -> int:
    """Tokens of a batch on this device."""
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    return config.CPU_BATCH_TOKENS if on_cpu else config.BATCH_TOKENS


def device(monkeypatch: pytest.MonkeyPatch, active: int = 0, **info: int) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"memory_size": 64 * GIGABYTE, **info})
    monkeypatch.setattr(mx, "get_active_memory", lambda: active)


def meminfo(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    """Replaces the file that Linux reports its memory in; None: there is none."""
    real = builtins.open

    def opened(name: Any, *args: Any, **kwargs: Any) -> Any:
        if name != "/proc/meminfo":
            return real(name, *args, **kwargs)
        if text is None:
            raise FileNotFoundError(name)
        return io.StringIO(text)

    monkeypatch.setattr(builtins, "open", opened)


def test_on_metal_it_is_the_recommended_working_set_without_what_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device(monkeypatch, active=3 * GIGABYTE, max_recommended_working_set_size=20 * GIGABYTE)
    assert budget.free_bytes() == 17 * GIGABYTE
    device(monkeypatch, active=30 * GIGABYTE, max_recommended_working_set_size=20 * GIGABYTE)
    assert budget.free_bytes() == 0


def test_elsewhere_it_is_what_linux_says_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    device(monkeypatch)
    meminfo(monkeypatch, "MemTotal:       16000000 kB\nMemFree:  1 kB\nMemAvailable:    8000000 kB\n")
    assert budget.free_bytes() == budget.available_bytes() == 8_000_000 * 1024


@pytest.mark.parametrize("text", [None, "", "MemTotal: 16000000 kB\n"])
def test_a_default_where_the_system_does_not_say(text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    device(monkeypatch)
    meminfo(monkeypatch, text)
    assert budget.free_bytes() == config.AVAILABLE_BYTES


def test_this_machine_says_something_sensible() -> None:
    assert 0 < budget.free_bytes() < 2**45


def test_keys_and_values_take_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    device(monkeypatch, max_recommended_working_set_size=20 * GIGABYTE)
    limits = budget.scoring_limits(CacheSize(1000))
    assert limits.kv_bytes == int(20 * GIGABYTE * config.KV_SHARE)
    assert (limits.max_rows, limits.batch_tokens) == (config.MAX_ROWS, usual_tokens())
    assert budget.scoring_limits(CacheSize(1000), 5) == replace(limits, max_rows=5)


def test_what_something_else_will_take_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device(monkeypatch, max_recommended_working_set_size=20 * GIGABYTE)
    limits = budget.scoring_limits(CacheSize(1), reserved_bytes=4 * GIGABYTE)
    assert limits.kv_bytes == int(16 * GIGABYTE * config.KV_SHARE)
    none_left = budget.scoring_limits(CacheSize(1), reserved_bytes=40 * GIGABYTE)
    assert none_left.kv_bytes == usual_tokens()


@pytest.mark.parametrize(("kind", "step"), [(mx.cpu, config.CPU_PREFILL_STEP), (mx.gpu, config.PREFILL_STEP)])
def test_long_rows_are_computed_in_steps_that_suit_the_device(
    kind: Any, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(kind))
    assert budget.scoring_limits(CacheSize(1)).step == step
    assert step % 256 == 0  # mlx-lm's mamba2 kernels


def test_buffers_that_are_small_keep_them_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    device(monkeypatch, max_recommended_working_set_size=200 * GIGABYTE, max_buffer_length=2 * GIGABYTE)
    limits = budget.scoring_limits(CacheSize(1000))
    assert 2 * GIGABYTE <= limits.kv_bytes <= 16 * GIGABYTE


def test_one_batch_is_always_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be that it fits after all; otherwise memory runs out, and less is tried."""
    device(monkeypatch, active=30 * GIGABYTE, max_recommended_working_set_size=20 * GIGABYTE)
    limits = budget.scoring_limits(CacheSize(token_bytes=1000, row_bytes=70))
    assert limits.kv_bytes == usual_tokens() * 1000 + 70


@pytest.mark.parametrize(
    "message",
    [
        "[malloc] Unable to allocate 137438953472 bytes.",
        "[malloc_or_wait] Unable to allocate 1 bytes.",
        "[metal::malloc] Attempting to allocate 1 bytes which is greater than the maximum allowed buffer size",
        "[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPUCommandBufferCallback"
        "ErrorOutOfMemory)",
        "std::bad_alloc",
    ],
)
def test_messages_of_memory_that_ran_out(message: str) -> None:
    assert budget.is_out_of_memory(RuntimeError(message))


@pytest.mark.parametrize(
    "message", ["[broadcast_shapes] Shapes (2,3) and (4) cannot be broadcast.", "[load] no memory of it", ""]
)
def test_other_messages(message: str) -> None:
    assert not budget.is_out_of_memory(RuntimeError(message))


def test_memory_is_wired_for_a_block_and_the_block_runs_once() -> None:
    model = tiny_model("llama", 64)
    ran = []
    with budget.wired(model):
        ran.append(True)
    assert ran == [True]
    with pytest.raises(KeyboardInterrupt), budget.wired(model):
        raise KeyboardInterrupt
