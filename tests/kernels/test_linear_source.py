"""The dispatches of `linear_logprob`: their sizes and what they read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_eval_kernels import AffineHead, DenseHead, linear_logprob
from mlx_eval_kernels.linear_logprob import ROWS, TOKENS, by_kernel

from tests.kernels.examples import Example
from tests.kernels.test_linear_logprob import (
    DTYPES,
    affine,
    check,
    dense,
    in_float64,
    states,
    targets_for,
    weights_of,
)
from tests.kernels.ways import Recorder
from tests.msl.emulate import Emulator

linear: Any = sys.modules[linear_logprob.__module__]


@pytest.mark.parametrize("blocks", [1, 2, 100])
def test_a_dispatch_has_so_many_rows_that_its_work_is_bounded(
    emulated: None, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "DISPATCH_WORK", blocks * ROWS * 131 * 16)
    hidden, head, targets = states(150, 16), dense(131, 16), targets_for(150, 131, 3)
    recorder = Recorder(Emulator())
    check(by_kernel(hidden, head, mx.array(targets), recorder), hidden, head, targets)
    rows = [dispatch.inputs[0].shape[0] for dispatch in recorder.dispatches]
    assert sum(rows) == 150
    assert max(rows) == min(150, blocks * ROWS)


@pytest.mark.parametrize(
    ("rows", "size"), [(1, 1), (1, 151_936), (32, 6200), (33, 151_936), (4096, 262_144), (500, 70)]
)
def test_parts_of_the_vocabulary_are_short_and_none_is_empty(rows: int, size: int) -> None:
    head = DenseHead(mx.broadcast_to(mx.zeros(()), (size, 8)))
    targets = mx.zeros((rows, 1), mx.int32)
    (dispatch,) = Example("", lambda run: by_kernel(mx.zeros((rows, 8)), head, targets, run)).dispatches()
    parts = dispatch.grid[0] // dispatch.threadgroup[0]
    per_part = -(-size // (parts * TOKENS)) * TOKENS  # as the kernel counts
    assert per_part <= linear.PART_TOKENS
    assert (parts - 1) * per_part < size
    groups = parts * -(-rows // ROWS)
    assert groups >= min(linear.GROUPS // 2, -(-size // TOKENS))


PACKED = [(0, 8), (0, 64), (4, 64), (8, 64)]


@pytest.mark.parametrize(("bits", "width"), PACKED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_are_read_once_for_32_rows(emulated: None, bits: int, width: int, dtype: mx.Dtype) -> None:
    rows, size, count = 70, 1000, 3
    head = affine(size, width, 32, bits, dtype) if bits else dense(size, width, dtype)
    recorder = Recorder(emulator := Emulator())
    by_kernel(states(rows, width, dtype), head, mx.array(targets_for(rows, size, count)), recorder)
    (dispatch,), (report,) = recorder.dispatches, emulator.reports
    parts = dispatch.grid[0] // dispatch.threadgroup[0]
    blocks = -(-rows // ROWS)
    tiles = -(-size // TOKENS)
    assert report.read["weight"] == blocks * head.weight.nbytes
    assert report.read["hidden"] == tiles * rows * width * dtype.size
    assert report.read["targets"] <= 4 * rows * count * (tiles + 3)
    if isinstance(head, AffineHead):
        # eight weights are unpacked together, those of a group in four of these
        assert report.read["scales"] == report.read["biases"] == 4 * blocks * head.scales.nbytes
    assert sum(report.written.values()) == 4 * rows * (3 * parts + count)


@pytest.mark.parametrize("bits", [0, 8])
def test_offsets_beyond_32_bits(emulated: None, bits: int) -> None:
    """2^33 weights or words, of which the last token's are there."""
    size, width = 2**30, 32 if bits else 8
    small = affine(1, width, 32, bits) if bits else dense(1, width, mx.bfloat16)
    names = ("weight", "scales", "biases")
    given = {name: getattr(small, name) for name in names if hasattr(small, name)}
    virtual = {
        name: mx.broadcast_to(mx.zeros((), array.dtype), (size, *array.shape[1:]))
        for name, array in given.items()
    }
    head = AffineHead(**virtual, group_size=32, bits=bits) if bits else DenseHead(**virtual)
    parts = size // linear.PART_TOKENS
    emulator = Emulator(
        sparse={name: {size - 1: array[0]} for name, array in given.items()}, groups=[(parts - 1, 0, 0)]
    )
    hidden, outputs = states(1, width), []

    def run(dispatch: Any) -> Sequence[mx.array]:
        assert dispatch.grid[0] == parts * dispatch.threadgroup[0]
        outputs.append(emulator(dispatch))
        return outputs[-1]

    by_kernel(hidden, head, mx.array([[size - 1, size - 2]]), run)
    tops, _, indices, chosen = outputs[0]
    logit = (in_float64(hidden) @ weights_of(small).T).item()
    assert chosen[0, 0].item() == pytest.approx(logit, rel=1e-5)  # of a sum of a few products of either sign
    assert chosen[0, 1].item() == 0
    assert tops[0, -1].item() == max(0, chosen[0, 0].item())
    assert indices[0, -1].item() == (size - 1 if logit > 0 else size - linear.PART_TOKENS)
