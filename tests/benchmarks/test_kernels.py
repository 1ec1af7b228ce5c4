"""The kernels' benchmark on tiny shapes. Nothing depends on how long anything takes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from benchmarks import kernels
from benchmarks.kernel_cases import (
    KERNELS,
    LOGIT_ROWS,
    PREFIXES,
    VOCABULARIES,
    Case,
    attention_case,
    cases,
    linear_case,
    logprob_case,
)
from benchmarks.kernels import Left, Line, columns, disagreement, heading, measure, memory_limit, row

SCRIPT = Path(kernels.__file__)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
MEMORY = 2**40
BATCH, PREFIX, HEADS = (16, 2, 6), 300, (4, 2, 32)


def tiny_cases(dtype: mx.Dtype) -> list[Case]:
    return [
        logprob_case(5, 300, dtype, "reference"),
        attention_case(BATCH, PREFIX, HEADS, dtype, "reference"),
        linear_case(5, (64, 300), None, dtype, "reference"),
        linear_case(5, (64, 300), 4, dtype, "reference"),
    ]


def lines_of(case: Case) -> list[Line]:
    found = list(measure(case, MEMORY, 1e9))
    assert all(isinstance(one, Line) for one in found), found
    return [one for one in found if isinstance(one, Line)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_ways_of_every_kernel_agree_and_are_measured(dtype: mx.Dtype) -> None:
    for case in tiny_cases(dtype):
        lines = lines_of(case)
        assert [line.way for line in lines] == [way.name for way in case.ways]
        assert lines[0].of_ours == 1.0
        for line in lines:
            assert line.gb_per_second == pytest.approx(case.num_bytes / line.seconds / 1e9)
            assert line.of_bandwidth == pytest.approx(line.gb_per_second)  # of 1e9 bytes a second
            assert line.peak_bytes > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bytes_are_those_of_all_inputs_and_outputs_once(dtype: mx.Dtype) -> None:
    for case in tiny_cases(dtype):
        ours = case.ways[0]
        arrays = ours.make()
        assert case.num_bytes == sum(array.nbytes for array in (*arrays, *ours.compute(*arrays)))


def test_copies_of_the_prefix_are_read_where_it_is_not_shared() -> None:
    ours, built_in = attention_case(BATCH, PREFIX, HEADS, mx.float32, "reference").ways
    rows, _, own = BATCH
    _, num_keys, width = HEADS
    assert ours.make()[1].shape == (1, num_keys, PREFIX, width)
    assert built_in.make()[1].shape == (rows, num_keys, PREFIX + own, width)
    held = mx.get_active_memory()  # by other tests of this process
    lines = lines_of(attention_case(BATCH, PREFIX, HEADS, mx.float32, "reference"))
    copies = sum(array.nbytes for array in built_in.make())
    assert lines[1].peak_bytes - held >= copies
    assert lines[0].peak_bytes - held < copies / 2


def test_the_head_in_several_blocks_gives_what_it_gives_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    way = linear_case(5, (64, 300), None, mx.float32, "reference").ways[1]
    whole = way.compute(*way.make())
    monkeypatch.setattr("benchmarks.kernel_cases.BLOCK_BYTES", 2 * 4 * 300)  # two rows
    for one, other in zip(whole, way.compute(*way.make()), strict=True):
        np.testing.assert_allclose(
            np.array(one), np.array(other), rtol=1e-5
        )  # sums of 64 products in float32


@pytest.mark.parametrize("wrong", [1.0, math.nan])
def test_what_is_wrong_is_not_timed(wrong: float) -> None:
    case = logprob_case(3, 50, mx.float32, "reference")
    ours, other, third = case.ways
    broken = replace(other, compute=lambda *arrays: (other.compute(*arrays)[0] + wrong, mx.zeros(3)))
    found = list(measure(replace(case, ways=(ours, broken, third)), MEMORY, 1e9))
    assert [type(one) for one in found] == [Left]
    (left,) = found
    assert isinstance(left, Left)
    assert left.is_wrong
    assert left.what == f"logprob 3 x 50: {other.name}"
    assert "output 0 differs" in left.why


def test_outputs_of_another_shape_disagree() -> None:
    one, other = [np.zeros((3, 1))], [np.zeros(3)]
    assert disagreement(one, one, (0.0,)) is None
    assert "shape" in str(disagreement(one, other, (0.0,)))


def test_another_argmax_disagrees() -> None:
    one, other = [np.zeros(2), np.array([4.0, 7.0])], [np.zeros(2), np.array([4.0, 6.0])]
    assert "output 1 differs from ours by 1" in str(disagreement(one, other, (1.0, 0)))


def test_a_way_that_needs_too_much_memory_is_left_out_by_name() -> None:
    case = logprob_case(3, 50, mx.float32, "reference")
    ours, other, third = case.ways
    large = replace(other, held_bytes=int(kernels.MEMORY_SHARE * MEMORY) + 1)
    left, *lines = measure(replace(case, ways=(ours, large, third)), MEMORY, 1e9)
    assert isinstance(left, Left)
    assert left.what == f"logprob 3 x 50: {other.name}"
    assert f"{large.held_bytes / 1e9:.1f} GB" in left.why
    assert not left.is_wrong
    assert [line.way for line in lines if isinstance(line, Line)] == [ours.name, third.name]


def test_keys_on_which_mlx_ends_the_process_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    decode, heads = (64, 1, 64), (32, 8, 128)
    less, more = (attention_case(decode, size, heads, mx.float32, "reference") for size in (8064, 8192))
    assert less.ways[1].unable is None
    assert [one.why for one in measure(more, MEMORY, 1e9) if isinstance(one, Left)] == [
        more.ways[1].unable,
        "nothing to compare with",
    ]


def test_what_is_held_is_at_least_what_is_read() -> None:
    for case in tiny_cases(mx.bfloat16):
        for way in case.ways:
            numbers = [array for array in way.make() if array.dtype != mx.int32]  # targets are few
            assert way.held_bytes >= sum(array.nbytes for array in numbers)


def test_with_nothing_to_compare_nothing_is_timed() -> None:
    case = logprob_case(3, 50, mx.float32, "reference")
    ways = (case.ways[0], *(replace(way, held_bytes=2 * MEMORY) for way in case.ways[1:]))
    found = list(measure(replace(case, ways=ways), MEMORY, 1e9))
    assert [one.why for one in found[2:] if isinstance(one, Left)] == ["nothing to compare with"]
    assert len(found) == 3


def test_products_that_take_a_cpu_too_long_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    case = logprob_case(3, 50, mx.float32, "reference")
    (left,) = measure(replace(case, products=2**50), MEMORY, 1e9)
    assert isinstance(left, Left)
    assert not left.is_wrong
    assert "CPU" in left.why


def test_the_shapes_are_those_of_real_models_and_each_is_there_once() -> None:
    assert (min(VOCABULARIES), max(VOCABULARIES)) == (32_000, 262_144)
    assert (min(LOGIT_ROWS), max(LOGIT_ROWS)) == (1, 4096)
    assert (min(PREFIXES), max(PREFIXES)) == (512, 8192)
    for kernel in KERNELS:
        found = list(cases(kernel, mx.bfloat16, "metal", quick=False))
        assert {case.kernel for case in found} == {kernel}
        assert len({case.shape for case in found}) == len(found)
        quick = list(cases(kernel, mx.bfloat16, "metal", quick=True))
        assert 0 < len(quick) < len(found)
        assert max(case.num_bytes for case in quick) < max(case.num_bytes for case in found)


def test_the_table_is_markdown_with_a_cell_for_each_column() -> None:
    line = Line("logprob", "3 x 50", "ours", 0.0025, 1.0, 2_000_000, 0.8, 0.125, 3_000_000)
    header, rule, cells = ([cell.strip() for cell in text.strip("|").split("|")] for text in rows_of(line))
    assert cells == ["3 x 50", "ours", "2.5", "1.00", "2.0", "0.8", "12.5%", "3.0"]
    assert len(header) == len(rule) == len(cells)
    assert all(set(cell) <= set("-:") for cell in rule)
    assert "| 3,125 |" in row(replace(line, seconds=3.125))


def rows_of(line: Line) -> list[str]:
    return [*columns().splitlines(), row(line)]


@pytest.mark.skipif(mx.metal.is_available(), reason="there is Metal here")
def test_without_metal_the_heading_says_so() -> None:
    assert "This says nothing about Metal." in heading("reference", "float32", 1e9)


def test_memory_is_limited_by_the_machine() -> None:
    assert 2**28 < memory_limit() <= kernels.runtime.device().memory_bytes


def test_the_script_prints_and_writes_the_same_figures(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--kernel", "prefix_attention", "--json", str(file)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    figures = json.loads(file.read_text())
    expected = list(cases("prefix_attention", mx.float32, "reference", quick=True))
    assert len(figures["lines"]) == sum(len(case.ways) for case in expected)
    assert figures["left"] == []
    assert figures["bandwidth"] > 0
    for line in figures["lines"]:
        assert f"{line['peak_bytes'] / 1e6:,.1f} |" in finished.stdout
    assert f"MLX {figures['mlx']}" in finished.stdout
    assert figures["date"] in finished.stdout


@pytest.mark.skipif(mx.metal.is_available(), reason="there is Metal here")
def test_metal_is_refused_where_there_is_none() -> None:
    command = [sys.executable, str(SCRIPT), "--backend", "metal"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 2
    assert "Metal is not available here" in finished.stderr
