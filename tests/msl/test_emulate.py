from __future__ import annotations

import platform

import mlx.core as mx
import numpy as np
import pytest
from mlx_eval_kernels.launch import Dispatch, Source

from tests.msl.build import why_not
from tests.msl.emulate import EmulationError, Emulator, Order, on_every_schedule
from tests.msl.kernels import dispatch
from tests.msl.signature import ATTRIBUTES

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

START = "uint i = thread_position_in_grid.x; uint lid = thread_position_in_threadgroup.x;"
DTYPES = [mx.float32, mx.float16, mx.bfloat16, mx.int32, mx.uint32, mx.uint8, mx.bool_, mx.int64]


def copy(values: mx.array, num_threads: int | None = None, *, group: int = 32) -> Dispatch:
    num_threads = values.size if num_threads is None else num_threads
    body = "uint i = thread_position_in_grid.x; if (i < inp_shape[0]) out[i] = inp[i];"
    return dispatch(body, {"inp": values}, [("out", values.shape, values.dtype)], num_threads, group=group)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 8, 100])
def test_every_type_goes_in_and_comes_out(dtype: mx.Dtype, size: int) -> None:
    values = (mx.arange(size) % 2 if dtype == mx.bool_ else mx.arange(size)).astype(dtype)
    (result,) = Emulator()(copy(values))
    assert result.dtype == dtype
    assert mx.array_equal(result, values)


def test_scalars_shapes_strides_and_dimensions_arrive() -> None:
    body = """
      uint i = thread_position_in_grid.x;
      out[i] = i == 0 ? int(scalar) : i == 1 ? inp_ndim : i < 5 ? inp_shape[i - 2] : int(inp_strides[i - 5]);
    """
    inputs = {"scalar": mx.array(42.0), "inp": mx.zeros((2, 3, 4))}
    (result,) = Emulator()(dispatch(body, inputs, [("out", (8,), mx.int32)], 8))
    assert result.tolist() == [42, 3, 2, 3, 4, 12, 4, 1]


def test_inputs_that_are_not_contiguous_are_made_so() -> None:
    values = mx.arange(64).reshape(8, 8).T
    body = "uint i = thread_position_in_grid.x; out[i] = inp[i];"
    (result,) = Emulator()(dispatch(body, {"inp": values}, [("out", (8, 8), mx.int32)]))
    assert mx.array_equal(result, values)


def test_every_attribute_is_what_metal_says_at_the_edge_of_a_grid() -> None:
    """A grid of (5, 3, 2) threads in groups of (4, 2, 1): the last groups are smaller."""
    grid, group = (5, 3, 2), (4, 2, 1)
    names = list(ATTRIBUTES)
    parts = [f"{name}.{axis}" for name in names if ATTRIBUTES[name] == "uint3" for axis in "xyz"]
    parts += [name for name in names if ATTRIBUTES[name] == "uint"]
    body = "uint at = (thread_position_in_grid.z * 3 + thread_position_in_grid.y) * 5 + thread_position_in_grid.x;"
    body += "".join(f"out[at * {len(parts)} + {index}] = {part};" for index, part in enumerate(parts))
    source = Source("attributes", ("inp",), ("out",), body + "(void)inp;")
    shape = (2, 3, 5, len(parts))
    (result,) = Emulator()(Dispatch(source, [mx.zeros((1,))], [], grid, group, [shape], [mx.uint32]))
    values = dict(zip(parts, np.moveaxis(np.array(result), -1, 0), strict=True))
    z, y, x = np.indices((2, 3, 5))
    positions = dict(zip("xyz", (x, y, z), strict=True))
    for axis, size, threads in zip("xyz", group, grid, strict=True):
        at = positions[axis]
        np.testing.assert_array_equal(values[f"thread_position_in_grid.{axis}"], at)
        np.testing.assert_array_equal(values[f"thread_position_in_threadgroup.{axis}"], at % size)
        np.testing.assert_array_equal(values[f"threadgroup_position_in_grid.{axis}"], at // size)
        np.testing.assert_array_equal(
            values[f"threads_per_threadgroup.{axis}"], np.minimum(size, threads - at // size * size)
        )
        assert (values[f"dispatch_threads_per_threadgroup.{axis}"] == size).all()
        assert (values[f"threads_per_grid.{axis}"] == threads).all()
        assert (values[f"threadgroups_per_grid.{axis}"] == -(-threads // size)).all()
    across = np.minimum(4, 5 - x // 4 * 4)
    np.testing.assert_array_equal(values["thread_index_in_threadgroup"], y % 2 * across + x % 4)
    np.testing.assert_array_equal(values["thread_index_in_simdgroup"], values["thread_index_in_threadgroup"])
    assert (values["simdgroup_index_in_threadgroup"] == 0).all()
    assert (values["threads_per_simdgroup"] == 32).all()


def test_a_report_counts_bytes_barriers_and_memory() -> None:
    body = f"""{START}
      threadgroup float s[32];
      threadgroup half t[3];
      s[lid] = x[i] + x[i ^ 1];
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (lid == 0) t[0] = half(s[1]);
      out[i] = simd_sum(s[31 - lid]);
    """
    emulator = Emulator()
    emulator(dispatch(body, {"x": mx.ones((64,))}, [("out", (64,), mx.float32)], group=32))
    (report,) = emulator.reports
    assert report.kernel == "small"
    assert report.errors == ()
    assert report.read == {"x": 2 * 64 * 4, "out": 0}
    assert report.written == {"x": 0, "out": 64 * 4}
    assert report.unwritten == {"out": 0}
    assert report.barriers == 2
    assert report.collectives == 2
    assert report.threadgroup_bytes == 32 * 4 + 16


def test_a_vector_load_counts_its_bytes_once() -> None:
    body = f"{START} float4 v = ((const device float4*)x)[i]; out[i] = v.x + v.y + v.z + v.w;"
    emulator = Emulator()
    emulator(dispatch(body, {"x": mx.ones((256,))}, [("out", (64,), mx.float32)]))
    assert emulator.reports[-1].read["x"] == 256 * 4


def test_findings_stay_in_the_report_where_they_are_not_raised() -> None:
    emulator = Emulator(raises=False)
    (result,) = emulator(
        dispatch(f"{START} out[i] = x[i];", {"x": mx.ones((63,))}, [("out", (64,), mx.float32)])
    )
    assert result.shape == (64,)
    (error,) = emulator.reports[-1].errors
    assert error.startswith(
        "OUT OF BOUNDS device read of 4 bytes at x[63] (63 elements) by thread 63 of group 0"
    )


def test_a_finding_quotes_the_line() -> None:
    body = f"{START}\n  float v = x[i];\n  v += x[i + 1];\n  out[i] = v;"
    with pytest.raises(EmulationError, match=r"at line \d+: v \+= x\[i \+ 1\];"):
        Emulator()(dispatch(body, {"x": mx.ones((64,))}, [("out", (64,), mx.float32)]))


def test_equal_findings_are_counted_not_repeated() -> None:
    emulator = Emulator(raises=False)
    emulator(dispatch(f"{START} out[0] = x[i];", {"x": mx.ones((64,))}, [("out", (1,), mx.float32)]))
    (error,) = emulator.reports[-1].errors
    assert error.startswith("RACE write after write on out[0]")
    assert error.endswith("(and 62 times more)")


def test_source_that_does_not_compile_raises_what_the_compiler_says() -> None:
    with pytest.raises(EmulationError, match=r"COMPILE: (.|\n)*kernel\.metal:\d+.*nonsense"):
        Emulator()(
            dispatch(f"{START} out[i] = nonsense(x[i]);", {"x": mx.ones((64,))}, [("out", (64,), mx.float32)])
        )


# ---- parts of a grid


def test_chosen_groups_run_alone_and_nobody_asks_for_the_others_outputs() -> None:
    emulator = Emulator(groups=[(0, 0, 0), (2, 0, 0)], poison=0)
    (result,) = emulator(copy(mx.ones((128,))))
    assert np.array(result).reshape(4, 32).sum(axis=1).tolist() == [32, 0, 32, 0]
    assert emulator.reports[-1].unwritten == {"out": 64}


def test_a_group_that_the_grid_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no threadgroup \(4, 0, 0\) in a grid of \(4, 1, 1\) groups"):
        Emulator(groups=[(4, 0, 0)])(copy(mx.ones((128,))))


@pytest.mark.parametrize(
    ("grid", "group", "says"),
    [
        ((2048, 1, 1), (1025, 1, 1), "has 1025 threads; Metal allows 1024"),
        ((64, 64, 64), (16, 16, 8), "has 2048 threads"),
        ((0, 1, 1), (1, 1, 1), "every size is 1 or more"),
    ],
)
def test_sizes_that_metal_does_not_take_are_refused(
    grid: tuple[int, int, int], group: tuple[int, int, int], says: str
) -> None:
    source = Source("sizes", ("x",), ("out",), "out[thread_position_in_grid.x] = x[0];")
    with pytest.raises(ValueError, match=says):
        Emulator()(Dispatch(source, [mx.ones((1,))], [], grid, group, [(2048,)], [mx.float32]))


def test_a_group_larger_than_the_grid_is_cut_to_it() -> None:
    (result,) = Emulator()(copy(mx.arange(5), 5, group=256))
    assert result.tolist() == [0, 1, 2, 3, 4]


# ---- inputs of more elements than 32 bits count


NUM_ROWS, WIDTH = 16_385, 262_144
LAST = 4_295_229_439
"""NUM_ROWS * WIDTH - 1, past 2^32."""


def row_sums(offset: str) -> Dispatch:
    """The sum of the first eight items of each row."""
    body = f"""
      uint row = threadgroup_position_in_grid.x;
      float sum = 0.0f;
      for (int j = 0; j < 8; j++) sum += float(x[{offset} + j]);
      out[row] = sum;
    """
    x = mx.broadcast_to(mx.zeros((), mx.bfloat16), (NUM_ROWS, WIDTH))
    return dispatch(body, {"x": x}, [("out", (NUM_ROWS,), mx.float32)], NUM_ROWS, group=1)


def sparse_sum(offset: str, *rows: int) -> float:
    given = {row: mx.full((WIDTH,), 1.0 + index, dtype=mx.bfloat16) for index, row in enumerate(rows)}
    last = NUM_ROWS - 1
    (sums,) = Emulator(sparse={"x": given}, groups=[(last, 0, 0)])(row_sums(offset))
    return float(np.array(sums)[last])


def test_a_virtual_input_is_read_beyond_two_to_the_32() -> None:
    assert NUM_ROWS * WIDTH - 1 == LAST > 2**32
    assert sparse_sum("size_t(row) * 262144", NUM_ROWS - 1) == 8.0


def test_an_offset_of_32_bits_shows_in_the_result() -> None:
    """It wraps to the first row."""
    assert sparse_sum("row * 262144u", NUM_ROWS - 1, 0) == 16.0


def test_a_placeholder_whose_name_is_not_in_sparse_is_refused_before_it_takes_memory() -> None:
    with pytest.raises(ValueError, match="x has 8590458880 bytes: name its rows in `sparse`, which has y"):
        Emulator(sparse={"y": {}}, groups=[(0, 0, 0)])(row_sums("0"))


@pytest.mark.parametrize(
    ("row", "index"),
    [
        (mx.zeros((WIDTH - 1,), mx.bfloat16), 0),
        (mx.zeros((WIDTH,), mx.float16), 0),
        (mx.zeros((WIDTH,), mx.bfloat16), NUM_ROWS),
    ],
)
def test_a_row_that_does_not_fit_is_refused(row: mx.array, index: int) -> None:
    with pytest.raises(ValueError, match=r"a row of x is .*bfloat16 \(262144,\) below 16385"):
        Emulator(sparse={"x": {index: row}}, groups=[(0, 0, 0)])(row_sums("0"))


# ---- schedules


def tickets(seed: int, order: Order) -> list[int]:
    """Which turn each thread of a group had."""
    body = f"""{START}
      threadgroup atomic_int turn;
      if (lid == 0) atomic_store_explicit(&turn, 0, memory_order_relaxed);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      out[i] = atomic_fetch_add_explicit(&turn, 1, memory_order_relaxed) + 0 * x[i];
    """
    kernel = dispatch(body, {"x": mx.zeros((64,), mx.int32)}, [("out", (64,), mx.int32)])
    (result,) = Emulator(order=order, seed=seed)(kernel)
    return [int(turn) for turn in np.array(result)]


def test_schedules_are_what_they_are_called() -> None:
    assert tickets(0, "forward") == list(range(64))
    assert tickets(0, "reverse") == list(range(63, -1, -1))
    assert tickets(1, "shuffled") == tickets(1, "shuffled")
    assert len({tuple(tickets(seed, "shuffled")) for seed in range(5)}) == 5


def test_a_right_kernel_gives_the_same_bits_on_every_schedule() -> None:
    body = f"""{START}
      threadgroup float s[64];
      s[lid] = x[i];
      threadgroup_barrier(mem_flags::mem_threadgroup);
      float sum = 0.0f;
      for (int k = 0; k < 64; k++) sum += s[k];
      out[i] = sum;
    """
    kernel = dispatch(
        body, {"x": mx.random.normal((64,), key=mx.random.key(0))}, [("out", (64,), mx.float32)]
    )
    (result,) = on_every_schedule(lambda run: run(kernel))
    assert np.unique(np.array(result)).size == 1


# ---- options


def test_misaligned_inputs_show_a_vector_load_that_trusts_alignment() -> None:
    """A row of a sliced array starts anywhere."""
    body = f"{START} const device float4* p = (const device float4*)x; out[i] = p[i].x;"
    kernel = dispatch(body, {"x": mx.ones((256,))}, [("out", (64,), mx.float32)])
    Emulator()(kernel)
    with pytest.raises(EmulationError, match="misaligned"):
        Emulator(misalign=1)(kernel)


def test_outputs_hold_the_poison_before() -> None:
    (result,) = Emulator(groups=[(0, 0, 0)], poison=0x11)(copy(mx.zeros((64,), mx.uint8)))
    assert result.tolist() == [0] * 32 + [0x11] * 32


def test_an_unknown_order_and_a_poison_that_is_no_byte_are_refused() -> None:
    with pytest.raises(ValueError, match="the order is forward, reverse, shuffled, not 'backward'"):
        Emulator(order="backward")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the poison is a byte, not 256"):
        Emulator(poison=256)


def test_a_machine_that_cannot_run_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    with pytest.raises(RuntimeError, match="written for x86-64 Linux, not arm64"):
        Emulator()


def test_an_emulator_keeps_a_report_of_every_dispatch() -> None:
    emulator = Emulator()
    for size in (32, 64):
        emulator(copy(mx.ones((size,))))
    assert [report.written["out"] for report in emulator.reports] == [128, 256]
