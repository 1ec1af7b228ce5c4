from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_eval_kernels.launch import Dispatch

from tests.msl.build import CompileError, kernel_library, why_not
from tests.msl.clang_pass import clang_findings
from tests.msl.declarations import SourceError
from tests.msl.emulate import Emulator
from tests.msl.kernels import dispatch
from tests.msl.not_metal import CONSTRUCTS, Construct, Pass
from tests.msl.rules import rule_findings
from tests.msl.signature import generated
from tests.msl.static import findings
from tests.msl.translate import translated

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

COPY = "uint i = thread_position_in_grid.x;\nout[i] = inp[i];\n"
RIGHT_HEADER = """
#define STEP 2
constant constexpr float TABLE[3] = {1.0f, 2.5f, -3.0e-2f};
constant float HALF = 0.5;
enum class Kind : uint { first, second };
struct Pair {
  float value;
  uint index;
};
struct Counter {
  int count = 0;
  void add(int by) thread { count += by; }
};
template <typename U, int N>
struct Row {
  static constexpr constant int size = N;
  U items[N];
};
inline void keep(thread Pair& best, float value, uint index) {
  if (value > best.value) {
    best.value = value;
    best.index = index;
  }
}
template <typename P>
inline float first(P p) {
  return float(p[0]);
}
template <typename U>
inline U twice(const device U* p, const int at = 0) {
  return U(float(p[at]) * 2.0f);
}
inline float scaled(float x) { return x * HALF; }
inline float scaled(half x) { return scaled(float(x)); }
"""
RIGHT_BODY = """
  constexpr int WIDTH = 8;
  const uint i = thread_position_in_grid.x;
  const uint lane = thread_index_in_simdgroup;
  threadgroup T tile[WIDTH * WIDTH];
  threadgroup float plane[WIDTH][WIDTH], sums[TGS / 32];
  threadgroup Pair pairs[2];
  threadgroup atomic_uint total;
  if (i == 0) atomic_store_explicit(&total, 0u, memory_order_relaxed);
  for (uint j = i; j < uint(WIDTH * WIDTH); j += TGS) {
    tile[j] = inp[j];
    plane[j / WIDTH][j % WIDTH] = float(inp[j]) + first(small) + first(inp + j);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  atomic_fetch_add_explicit(&total, flags[i % 4] ? 1u : 0u, memory_order_relaxed);
  Pair best;
  best.value = -INFINITY;
  best.index = 0u;
  MLX_MTL_PRAGMA_UNROLL
  for (int k = 0; k < 2; k++) keep(best, plane[lane % WIDTH][k], uint(k));
  best.value = metal::simd_max(best.value);
  const bool any = metal::simd_any(metal::isnan(best.value));
  metal::simdgroup_matrix<float, 8, 8> acc = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  metal::simdgroup_matrix<T, 8, 8> a;
  metal::simdgroup_load(a, tile, WIDTH);
  metal::simdgroup_multiply_accumulate(acc, a, a, acc);
  for (ushort k = 0; k < 2; k++) acc.thread_elements()[k] *= 0.5;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup_index_in_threadgroup == 0) metal::simdgroup_store(acc, &plane[0][0], WIDTH);
  const float4 v = float4(1.0f, 2.0f, 3.0f, 4.0f) * 2.0f;
  const device vec<T, 4>* wide = (const device vec<T, 4>*)inp;
  auto at = inp + i;
  thread Pair* chosen = &best;
  if (lane == 0) {
    sums[i / 32] = metal::exp(scaled(chosen->value) - metal::max(v.x, v[3]));
    pairs[i / 32].value = sums[i / 32];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  Counter counter;
  counter.add(STEP);
  const int wanted = inp_shape[0] > 3 && !any ? counter.count : 0;
  switch (wanted) {
    case 2: out[i] = T(pairs[0].value + plane[0][0]); break;
    default: out[i] = twice(inp, int(i)) + at[0] + T(wide[0].x) + T(TABLE[i % 3]);
  }
  const T other = metal::simd_shuffle_xor(out[i], 1);
  out[i] = other + T(float(Row<T, 3>::size) + float(Kind::second == Kind::first));
"""


def altered_copy(construct: Construct) -> Dispatch:
    inputs = {"inp": mx.zeros((64,)), "small": mx.zeros((3,))}
    return dispatch(COPY + construct.body, inputs, [("out", (64,), mx.float32)], header=construct.header)


def right(dtype: mx.Dtype, num_items: int) -> Dispatch:
    inputs = {
        "inp": mx.random.uniform(shape=(num_items,), key=mx.random.key(0)).astype(dtype),
        "small": mx.array([3], dtype=mx.int32),
        "flags": mx.array([True, False, True, True]),
    }
    template = (("T", dtype), ("TGS", 64))
    return dispatch(RIGHT_BODY, inputs, [("out", (64,), dtype)], header=RIGHT_HEADER, template=template)


def noticed(of: Dispatch) -> set[Pass]:
    """The passes that object."""
    text = generated(of)
    found: set[Pass] = set()
    if rule_findings(text.text):
        found.add("rules")
    try:
        if clang_findings(text.text):
            found.add("clang")
    except SourceError:
        found.add("clang")
    try:
        kernel_library(translated(text.text, text.function, text.call))
    except (SourceError, CompileError):
        found.add("compile")
    return found


@pytest.mark.parametrize("construct", CONSTRUCTS, ids=[construct.name for construct in CONSTRUCTS])
def test_what_metal_rejects_is_noticed_by_the_pass_that_looks_for_it(construct: Construct) -> None:
    assert construct.noticed_by
    assert noticed(altered_copy(construct)) == construct.noticed_by
    assert bool(findings(altered_copy(construct))) == bool(construct.noticed_by - {"compile"})


def test_the_kernel_that_they_alter_passes() -> None:
    assert noticed(altered_copy(Construct("nothing", "", "", frozenset()))) == set()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a_right_kernel_that_uses_much_of_metal_passes_and_runs(dtype: mx.Dtype) -> None:
    assert findings(right(dtype, 64)) == []
    Emulator()(right(dtype, 64))


def test_a_finding_names_the_line_of_the_text_that_mlx_makes() -> None:
    wrong = dispatch(
        COPY + "double d = 1.0; out[0] = d;", {"inp": mx.zeros((64,))}, [("out", (64,), mx.float32)]
    )
    (line,) = [n for n, text in enumerate(generated(wrong).text.split("\n"), 1) if "double" in text]
    assert next(finding.split(":")[0] for finding in findings(wrong)) == f"line {line}"
