from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from tests.msl.build import why_not
from tests.msl.emulate import Emulator, on_every_schedule
from tests.msl.kernels import dispatch

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

START = "uint i = thread_position_in_grid.x; uint lane = thread_index_in_simdgroup;"
LANES = np.arange(32)


def lanes(body: str, values: np.ndarray, dtype: mx.Dtype, *, group: int = 64) -> np.ndarray:
    """`out[i] = body` for every thread, on every schedule; [simdgroups, lanes]."""
    kernel = dispatch(
        f"{START} out[i] = {body};",
        {"x": mx.array(values.reshape(-1))},
        [("out", (values.size,), dtype)],
        values.size,
        group=group,
    )
    (result,) = on_every_schedule(lambda run: run(kernel))
    return np.array(result).reshape(values.shape)


def whole_numbers(dtype: type) -> np.ndarray:
    """Small ones, so that sums are exact in every type and order; [2, 32]."""
    return np.random.default_rng(0).integers(0, 9, (2, 32)).astype(dtype)


REDUCTIONS = {
    "simd_sum": np.add.reduce,
    "simd_max": np.maximum.reduce,
    "simd_min": np.minimum.reduce,
}
BITS = {
    "simd_and": np.bitwise_and.reduce,
    "simd_or": np.bitwise_or.reduce,
    "simd_xor": np.bitwise_xor.reduce,
}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, np.uint32, np.int16])
def test_reductions(name: str, dtype: type) -> None:
    values = whole_numbers(dtype)
    expected = np.broadcast_to(REDUCTIONS[name](values, axis=1)[:, None], values.shape)
    np.testing.assert_array_equal(lanes(f"{name}(x[i])", values, mx.array(values).dtype), expected)


@pytest.mark.parametrize("name", BITS)
def test_reductions_of_bits(name: str) -> None:
    values = whole_numbers(np.uint32) + 16
    expected = np.broadcast_to(BITS[name](values, axis=1)[:, None], values.shape)
    np.testing.assert_array_equal(lanes(f"{name}(x[i])", values, mx.uint32), expected)


def test_product() -> None:
    values = np.where(whole_numbers(np.float32) > 4, 2, 1).astype(np.float32)
    expected = np.broadcast_to(values.prod(axis=1)[:, None], values.shape)
    np.testing.assert_array_equal(lanes("simd_product(x[i])", values, mx.float32), expected)


def test_a_group_that_is_no_multiple_of_32_reduces_the_lanes_it_has() -> None:
    values = np.arange(40, dtype=np.float32)
    result = lanes("simd_sum(x[i])", values, mx.float32, group=40)
    assert result.tolist() == [float(values[:32].sum())] * 32 + [float(values[32:].sum())] * 8


def test_votes() -> None:
    values = np.zeros((3, 32), np.int32)
    values[1, 5] = values[2] = 1
    assert lanes("simd_any(x[i] != 0) ? 1 : 0", values, mx.int32, group=96)[:, 0].tolist() == [0, 1, 1]
    assert lanes("simd_all(x[i] != 0) ? 1 : 0", values, mx.int32, group=96)[:, 0].tolist() == [0, 0, 1]
    ballots = lanes("uint(ulong(simd_ballot(x[i] != 0)))", values, mx.uint32, group=96)
    assert ballots[:, 0].tolist() == [0, 1 << 5, 0xFFFFFFFF]


Source = Callable[[np.ndarray], np.ndarray]
SHUFFLES: dict[str, Source] = {
    "simd_shuffle(x[i], ushort(31 - lane))": lambda x: x[:, ::-1],
    "simd_shuffle_xor(x[i], 5)": lambda x: x[:, LANES ^ 5],
    "simd_shuffle_up(x[i], 3)": lambda x: x[:, np.where(LANES < 3, LANES, LANES - 3)],
    "simd_shuffle_down(x[i], 3)": lambda x: x[:, np.where(LANES > 28, LANES, LANES + 3)],
    "simd_shuffle_rotate_up(x[i], 3)": lambda x: np.roll(x, 3, axis=1),
    "simd_shuffle_rotate_down(x[i], 3)": lambda x: np.roll(x, -3, axis=1),
    "simd_shuffle_and_fill_up(x[i], 77.0f, 2)": lambda x: np.where(LANES < 2, 77, np.roll(x, 2, axis=1)),
    "simd_shuffle_and_fill_down(x[i], 77.0f, 2)": lambda x: np.where(LANES > 29, 77, np.roll(x, -2, axis=1)),
    "simd_broadcast(x[i], 9)": lambda x: np.broadcast_to(x[:, 9:10], x.shape),
    "simd_broadcast_first(x[i])": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "simd_prefix_inclusive_sum(x[i])": lambda x: np.cumsum(x, axis=1),
    "simd_prefix_exclusive_sum(x[i])": lambda x: np.cumsum(x, axis=1) - x,
    "quad_sum(x[i])": lambda x: np.repeat(x.reshape(-1, 8, 4).sum(axis=2), 4, axis=1),
    "quad_shuffle_xor(x[i], 1)": lambda x: x[:, LANES ^ 1],
}


@pytest.mark.parametrize("call", SHUFFLES)
def test_values_of_other_lanes(call: str) -> None:
    values = whole_numbers(np.float32)
    np.testing.assert_array_equal(lanes(call, values, mx.float32), SHUFFLES[call](values))


def product(body: str, a: np.ndarray, b: np.ndarray, *, dtype: str = "float") -> np.ndarray:
    """The 8x8 matrix that a simdgroup stores into `out`; `ta` and `tb` are a and b in threadgroup memory."""
    header = f"""
      threadgroup {dtype} ta[{a.size}], tb[{b.size}];
      for (uint k = i; k < {a.size}u; k += 32u) ta[k] = a[k];
      for (uint k = i; k < {b.size}u; k += 32u) tb[k] = b[k];
      threadgroup_barrier(mem_flags::mem_threadgroup);
      simdgroup_matrix<{dtype}, 8, 8> ma, mb;
      simdgroup_float8x8 mc = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    """
    inputs = {"a": mx.array(a), "b": mx.array(b)}
    kernel = dispatch(START + header + body, inputs, [("out", (8, 8), mx.float32)], 32, group=32)
    (result,) = on_every_schedule(lambda run: run(kernel))
    return np.array(result)


def small_matrices(shape: tuple[int, int], dtype: type = np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Of whole numbers, so that products are exact in every order."""
    generator = np.random.default_rng(1)
    return generator.integers(-4, 5, shape).astype(dtype), generator.integers(-4, 5, shape).astype(dtype)


MULTIPLY = "simdgroup_multiply_accumulate(mc, ma, mb, mc); simdgroup_store(mc, out, 8);"


@pytest.mark.parametrize("memory", ["", "t"])
@pytest.mark.parametrize("dtype", ["float", "half"])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_matrices(memory: str, dtype: str, transposed: bool) -> None:
    a, b = small_matrices((8, 8), np.float32 if dtype == "float" else np.float16)
    load = (
        f"simdgroup_load(ma, {memory}a, 8); simdgroup_load(mb, {memory}b, 8, 0, {str(transposed).lower()});"
    )
    expected = a.astype(np.float32) @ (b.T if transposed else b).astype(np.float32)
    np.testing.assert_array_equal(product(load + MULTIPLY, a, b, dtype=dtype), expected)


def test_parts_of_larger_matrices() -> None:
    """A row stride, and an origin that counts columns first."""
    a, b = small_matrices((20, 24))
    load = "simdgroup_load(ma, ta + 24 * 3 + 5, 24); simdgroup_load(mb, tb, 24, ulong2(16, 12));"
    np.testing.assert_array_equal(product(load + MULTIPLY, a, b), a[3:11, 5:13] @ b[12:20, 16:24])


def test_accumulation_starts_with_the_third_matrix() -> None:
    a, b = small_matrices((8, 8))
    body = (
        "simdgroup_load(ma, a, 8); simdgroup_load(mb, b, 8); simdgroup_multiply_accumulate(mc, ma, mb, ma);"
    )
    np.testing.assert_array_equal(product(body + "simdgroup_store(mc, out, 8);", a, b), a @ b + a)


def test_transposed_store() -> None:
    a, b = small_matrices((8, 8))
    body = "simdgroup_load(ma, a, 8); simdgroup_store(ma, out, 8, 0, true);"
    np.testing.assert_array_equal(product(body, a, b), a.T)


def test_a_lane_s_own_elements_may_be_changed_one_by_one() -> None:
    a, b = small_matrices((8, 8))
    body = """
      simdgroup_load(ma, a, 8); simdgroup_load(mb, b, 8);
      for (int k = 0; k < 2; k++) ma.thread_elements()[k] = ma.thread_elements()[k] * 2.0f + mb.thread_elements()[k];
      simdgroup_store(ma, out, 8);
    """
    np.testing.assert_array_equal(product(body, a, b), 2 * a + b)


def test_a_matrix_made_of_a_number_is_diagonal() -> None:
    a, b = small_matrices((8, 8))
    body = "simdgroup_store(simdgroup_float8x8(3.0f), out, 8);"
    np.testing.assert_array_equal(product(body, a, b), 3 * np.eye(8, dtype=np.float32))


ATOMICS = {
    "fetch_add": (0, 2016),
    "fetch_sub": (5000, 5000 - 2016),
    "fetch_max": (7, 63),
    "fetch_min": (7, 0),
    "fetch_or": (0, 63),
    "fetch_and": (127, 0),
    "fetch_xor": (0, 0),
}


@pytest.mark.parametrize("name", ATOMICS)
def test_atomics_of_all_threads(name: str) -> None:
    start, expected = ATOMICS[name]
    body = f"""{START}
      threadgroup atomic_int shared;
      if (i == 0) atomic_store_explicit(&shared, {start}, memory_order_relaxed);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      atomic_{name}_explicit(&shared, int(i), memory_order_relaxed);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      out[i] = atomic_load_explicit(&shared, memory_order_relaxed) + 0 * x[i];
    """
    kernel = dispatch(body, {"x": mx.arange(64).astype(mx.int32)}, [("out", (64,), mx.int32)])
    (result,) = on_every_schedule(lambda run: run(kernel))
    assert np.unique(np.array(result)).tolist() == [expected]


def test_exchange_and_compare_give_what_was_there() -> None:
    body = f"""{START}
      device atomic_float* place = (device atomic_float*)out;
      if (i == 0) atomic_store_explicit(place, 2.0f, memory_order_relaxed);
      threadgroup_barrier(mem_flags::mem_device);
      if (i == 0) {{
        float expected = 3.0f;
        const bool first = atomic_compare_exchange_weak_explicit(place, &expected, 9.0f, memory_order_relaxed,
                                                                 memory_order_relaxed);
        const bool second = atomic_compare_exchange_weak_explicit(place, &expected, 9.0f, memory_order_relaxed,
                                                                  memory_order_relaxed);
        out[1] = expected;
        out[2] = float(first) + 2.0f * float(second);
        out[3] = atomic_exchange_explicit(place, x[0], memory_order_relaxed);
      }}
    """
    kernel = dispatch(body, {"x": mx.array([5.0] * 8)}, [("out", (4,), mx.float32)])
    (result,) = Emulator()(kernel)
    assert result.tolist() == [5.0, 2.0, 2.0, 9.0]
