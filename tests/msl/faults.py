"""Kernels with one fault each, and the same kernels without it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import mlx.core as mx
from mlx_eval_kernels.launch import Dispatch

from tests.msl.kernels import dispatch

_START: Final = """
  uint i = thread_position_in_grid.x;
  uint lid = thread_position_in_threadgroup.x;
  uint lane = thread_index_in_simdgroup;
  uint sg = simdgroup_index_in_threadgroup;
"""
_BARRIER: Final = "threadgroup_barrier(mem_flags::mem_threadgroup);"
_ALL: Final = "out[i] = x[i];"


@dataclass(frozen=True, slots=True)
class Fault:
    """Two bodies: of 64 threads, with x [64] and n [64] (0, 1, 2, ...) and out [64]."""

    name: str
    found: str
    """How the first finding begins."""
    wrong: str
    right: str
    header: str = ""
    wrong_header: str | None = None
    """Where the fault is in the header."""
    group: int = 64
    timeout_seconds: float = 60.0

    def dispatch(self, *, faulty: bool) -> Dispatch:
        """The kernel with its fault or without."""
        header = self.wrong_header if faulty and self.wrong_header is not None else self.header
        inputs = {"x": mx.random.normal((64,), key=mx.random.key(1)), "n": mx.arange(64).astype(mx.int32)}
        body = _START + (self.wrong if faulty else self.right)
        return dispatch(body, inputs, [("out", (64,), mx.float32)], group=self.group, header=header)


def _swap(right: str, part: str, by: str, name: str, found: str) -> Fault:
    """A fault in a part of a right body."""
    assert right.count(part) == 1, f"{name}: {part!r} is not there once"
    return Fault(name, found, right.replace(part, by), right)


_TILE: Final = f"threadgroup float s[64]; s[lid] = x[i]; {_BARRIER} out[i] = s[63 - lid];"
_POINTER: Final = (
    f"threadgroup float s[64]; threadgroup float* p = s; p[lid] = x[i]; {_BARRIER} out[i] = p[63 - lid];"
)
_TWICE: Final = (
    f"threadgroup float s[64]; s[lid] = x[i]; {_BARRIER} float v = s[63 - lid]; {_BARRIER} s[lid] = v; {_ALL}"
)
_LANES: Final = """
  threadgroup float s[64]; s[lid] = x[i];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = s[lid ^ 1];
"""
_SHARED: Final = f"threadgroup float s[1]; if (lid == 5) s[0] = 2.0f; {_BARRIER} out[i] = s[0];"
_DEVICE: Final = """
  out[i] = x[i]; threadgroup_barrier(mem_flags::mem_device);
  float v = out[63 - lid]; threadgroup_barrier(mem_flags::mem_device);
  out[i] = v;
"""
_ATOMIC: Final = f"""
  threadgroup atomic_uint a;
  if (lid == 0) atomic_store_explicit(&a, 0u, memory_order_relaxed);
  {_BARRIER}
  atomic_fetch_add_explicit(&a, 1u, memory_order_relaxed);
  {_BARRIER}
  out[i] = float(atomic_load_explicit(&a, memory_order_relaxed));
"""
_MATRIX: Final = f"""
  threadgroup float s[64]; s[lid] = x[i];
  {_BARRIER}
  simdgroup_float8x8 m; simdgroup_load(m, s, 8);
  simdgroup_multiply(m, m, m);
  if (sg == 0) simdgroup_store(m, out, 8);
"""
_STRANGER: Final = f"""
  threadgroup ulong p[64]; float v = x[i]; p[lid] = ulong(&v);
  {_BARRIER}
  out[i] = *(thread float*)p[lid];
  {_BARRIER}
  v = 1.0f;
"""

BOUNDS: Final = (
    _swap(
        _ALL,
        "x[i]",
        "x[i + 1]",
        "input read one past its end",
        "OUT OF BOUNDS device read of 4 bytes at x[64]",
    ),
    _swap(
        _ALL,
        "x[i]",
        "x[int(i) - 1]",
        "input read one before its start",
        "OUT OF BOUNDS device read of 4 bytes at x[-1]",
    ),
    _swap(
        _ALL,
        "out[i]",
        "out[i + 1]",
        "output written past its end",
        "OUT OF BOUNDS device write of 4 bytes at out[64]",
    ),
    _swap(_ALL, "x[i]", "x[i + 100000000]", "input read far away", "OUT OF BOUNDS device read"),
    _swap(_ALL, "x[i]", "x[ulong(i) << 50]", "wild pointer", "WILD read of 4 bytes"),
    _swap(
        _POINTER,
        "p[63 - lid]",
        "p[64 - lid]",
        "threadgroup read past its end",
        "OUT OF BOUNDS threadgroup read",
    ),
    _swap(
        _POINTER,
        "p[lid] =",
        "p[lid + 1] =",
        "threadgroup write past its end",
        "OUT OF BOUNDS threadgroup write",
    ),
    _swap(
        _POINTER,
        "p[63 - lid]",
        "p[100000 - lid]",
        "threadgroup read beyond all variables",
        "OUT OF BOUNDS threadgroup read",
    ),
    Fault(
        "threadgroup array's index out of it",
        "UNDEFINED BEHAVIOUR: index out of a fixed array",
        _TILE.replace("s[63 - lid]", "s[64 - lid]"),
        _TILE,
    ),
    Fault("write to an input", "WRITE to input x[0]", f"((device float*)x)[i] = 1.0f; {_ALL}", _ALL),
    Fault(
        "index out of a local array",
        "UNDEFINED BEHAVIOUR: index out of a fixed array",
        "float v[4]; for (int k = 0; k <= n[4]; k++) v[k] = x[k]; out[i] = v[n[1]];",
        "float v[4]; for (int k = 0; k < n[4]; k++) v[k] = x[k]; out[i] = v[n[1]];",
    ),
    _swap(
        _STRANGER,
        "p[lid];\n",
        "p[63 - lid];\n",
        "pointer to another thread's variable",
        "THREAD MEMORY of thread",
    ),
    Fault(
        "null pointer",
        "WILD read of 4 bytes at (nil)",
        "const device float* p = n[0] == 0 ? nullptr : x; out[i] = p[0];",
        "const device float* p = n[0] == 0 ? x : nullptr; out[i] = p[0];",
    ),
    Fault(
        "vector load that is not aligned",
        "UNDEFINED BEHAVIOUR: misaligned",
        "const device float4* p = (const device float4*)(x + 1); out[i] = p[0].y;",
        "const device float4* p = (const device float4*)(x + 4); out[i] = p[0].y;",
    ),
    Fault(
        "atomic that is not aligned",
        "MISALIGNED access of 4 bytes at out, byte 2",
        "device atomic_uint* a = (device atomic_uint*)((device uchar*)out + 2);"
        f"if (i == 0) atomic_store_explicit(a, 0u, memory_order_relaxed); {_ALL}",
        _ALL,
    ),
    Fault(
        "vector component out of range",
        "VECTOR INDEX",
        "float4 v = float4(x[i]); out[i] = v[n[4]];",
        "float4 v = float4(x[i]); out[i] = v[n[3]];",
    ),
)
RACES: Final = (
    _swap(_TILE, _BARRIER, "", "barrier missing before a read", "RACE read after write on s"),
    Fault(
        "barrier missing before a write",
        "RACE write after read on s",
        _TWICE.replace(f"{_BARRIER} s[lid] = v", "s[lid] = v"),
        _TWICE,
    ),
    _swap(_SHARED, "lid == 5", "lid >= 5", "two threads write one item", "RACE write after write on s[0]"),
    _swap(
        _TILE, "mem_threadgroup", "mem_none", "barrier that orders no memory", "RACE read after write on s"
    ),
    _swap(
        _TILE,
        "mem_threadgroup",
        "mem_device",
        "barrier that orders the other memory",
        "RACE read after write on s",
    ),
    _swap(
        _TILE,
        "threadgroup_barrier",
        "simdgroup_barrier",
        "barrier of a simdgroup for the group",
        "RACE read after write on s",
    ),
    _swap(
        _LANES,
        "simdgroup_barrier(mem_flags::mem_threadgroup);",
        "",
        "simdgroup without a barrier",
        "RACE read after write on s",
    ),
    _swap(
        _LANES,
        "mem_threadgroup",
        "mem_none",
        "simdgroup barrier that orders no memory",
        "RACE read after write on s",
    ),
    _swap(_LANES, "s[lid ^ 1]", "s[lid ^ 32]", "item of another simdgroup", "RACE read after write on s"),
    _swap(
        _DEVICE,
        "x[i]; threadgroup_barrier(mem_flags::mem_device);",
        "x[i]; threadgroup_barrier(mem_flags::mem_threadgroup);",
        "output read without a device barrier",
        "RACE read after write on out",
    ),
    _swap(
        _DEVICE,
        "v = out[63 - lid]; threadgroup_barrier(mem_flags::mem_device);",
        "v = out[63 - lid];",
        "output written while others read it",
        "RACE write after read on out",
    ),
    Fault(
        "two groups write one item",
        "RACE write after write on out[0]",
        f"{_ALL} if (lid == 1) out[0] = x[0];",
        _ALL,
        group=32,
    ),
    Fault(
        "a group reads what another wrote",
        "RACE read after write on out[0]",
        f"{_ALL} if (i == 40) out[40] = out[0];",
        f"{_ALL} if (i == 40) out[40] = x[0];",
        group=32,
    ),
    Fault(
        "a group writes what another read",
        "RACE write after",
        "if (i < 32) out[i] = x[i]; if (i == 0) out[1] = out[0]; if (i >= 32) { out[i] = x[i]; out[0] = x[0]; }",
        _ALL,
        group=32,
    ),
    _swap(
        _ATOMIC,
        "atomic_fetch_add_explicit(&a, 1u, memory_order_relaxed);",
        "*(threadgroup uint*)&a = 3u;",
        "plain writes beside others'",
        "RACE write after write on a",
    ),
    Fault(
        "plain read beside an atomic",
        "RACE atomic after read on a",
        _ATOMIC.replace(
            f"{_BARRIER}\n  out[i] = float(atomic_load_explicit(&a, memory_order_relaxed))",
            "out[i] = float(*(threadgroup uint*)&a)",
        ),
        _ATOMIC,
    ),
)
UNSET: Final = (
    _swap(
        _TILE,
        "s[lid] = x[i]",
        "if (lid != 7) s[lid] = x[i]",
        "threadgroup item that nobody set",
        "UNINITIALISED read of threadgroup s[7]",
    ),
    Fault(
        "threadgroup item set by the group before",
        "UNINITIALISED read of threadgroup s",
        f"threadgroup float s[1]; if (i == 0) s[0] = 1.0f; {_BARRIER} out[i] = s[0];",
        f"threadgroup float s[1]; if (lid == 0) s[0] = 1.0f; {_BARRIER} out[i] = s[0];",
        group=32,
    ),
    Fault("output read before it is written", "UNINITIALISED read of output out", "out[i] += x[i];", _ALL),
    Fault(
        "atomic on memory that nobody set",
        "UNINITIALISED read of threadgroup a",
        _ATOMIC.replace("if (lid == 0) atomic_store_explicit(&a, 0u, memory_order_relaxed);", ""),
        _ATOMIC,
    ),
    Fault(
        "output item that nobody writes", "OUTPUT out: 1 elements never written", f"if (i != 9) {_ALL}", _ALL
    ),
    Fault(
        "half of the output not written",
        "OUTPUT out: 32 elements never written",
        f"if (i % 2 == 0) {_ALL}",
        _ALL,
    ),
)
CONTROL: Final = (
    Fault(
        "barrier in a branch", "DIVERGENCE", f"if (lid < 32) {{ {_BARRIER} }} {_ALL}", f"{_BARRIER} {_ALL}"
    ),
    Fault(
        "two barriers in two branches",
        "BARRIER DIVERGENCE",
        f"if (lid < 32) {{\n {_BARRIER} }} else {{\n {_BARRIER} }} {_ALL}",
        f"{_BARRIER} {_ALL}",
    ),
    Fault(
        "return before a barrier",
        "DIVERGENCE",
        f"{_ALL} if (lid > 40) return; {_BARRIER}",
        f"{_ALL} {_BARRIER} if (lid > 40) return;",
    ),
    Fault(
        "loop of unlike lengths around a barrier",
        "DIVERGENCE",
        f"for (uint k = 0; k < 1 + sg; k++) {{ {_BARRIER} }} {_ALL}",
        f"for (uint k = 0; k < 2; k++) {{ {_BARRIER} }} {_ALL}",
    ),
    Fault(
        "simdgroup operation in a branch",
        "DIVERGENCE",
        f"{_ALL} if (lane < 16) out[i] = simd_sum(x[i]);",
        "out[i] = simd_sum(x[i]);",
    ),
    Fault(
        "simdgroup operation after a lane returned",
        "SIMD DIVERGENCE",
        f"{_ALL} if (lane == 3) return; out[i] = simd_sum(x[i]);",
        "out[i] = simd_sum(x[i]);",
    ),
    Fault(
        "lanes at two operations",
        "SIMD DIVERGENCE",
        "if (lane < 16) out[i] = simd_sum(x[i]); else out[i] = simd_max(x[i]);",
        "float s = simd_sum(x[i]), m = simd_max(x[i]); out[i] = lane < 16 ? s : m;",
    ),
    Fault(
        "a simdgroup at a barrier, its lane in an operation",
        "DIVERGENCE",
        f"if (lane == 0) out[i] = simd_sum(x[i]); else {_ALL} {_BARRIER}",
        f"float s = simd_sum(x[i]); out[i] = lane == 0 ? s : x[i]; {_BARRIER}",
    ),
    Fault(
        "shuffle from a lane that is not there",
        "SIMD SHUFFLE",
        "out[i] = simd_shuffle(x[i], ushort(lane + 1));",
        "out[i] = simd_shuffle(x[i], ushort((lane + 1) % 32));",
    ),
    Fault(
        "shuffle from a lane that the group has not",
        "SIMD SHUFFLE from an inactive lane",
        "out[i] = simd_shuffle_xor(x[i], 16);",
        "out[i] = simd_shuffle_xor(x[i], 1);",
        group=16,
    ),
    Fault(
        "matrix operation of half a simdgroup",
        "SIMDGROUP MATRIX",
        f"{_ALL} simdgroup_float8x8 m; simdgroup_load(m, x, 8);",
        _ALL,
        group=16,
    ),
    Fault(
        "matrix stored by two simdgroups",
        "RACE write after write on out",
        _MATRIX.replace("if (sg == 0) ", ""),
        _MATRIX,
    ),
    Fault(
        "matrix loaded before it is there",
        "RACE read after write on s",
        _MATRIX.replace(_BARRIER, ""),
        _MATRIX,
    ),
    Fault(
        "endless loop",
        "TIMEOUT",
        f"{_ALL} while (n[lane] >= 0) {{}}",
        f"{_ALL} while (n[lane] < 0) {{}}",
        timeout_seconds=0.2,
    ),
    Fault(
        "endless loop that touches no memory",
        "TIMEOUT",
        f"{_ALL} float v = x[i]; for (;;) {{ v = v * 0.5f + 1.0f; if (v < -1.0e9f) break; }} out[i] = v;",
        _ALL,
        timeout_seconds=0.2,
    ),
)
ARITHMETIC: Final = (
    Fault(
        "signed overflow",
        "UNDEFINED BEHAVIOUR: signed multiplication overflows",
        "out[i] = float((n[i] + 1) * 2147483647);",
        "out[i] = float(uint(n[i] + 1) * 2147483647u);",
    ),
    Fault(
        "signed sum overflow",
        "UNDEFINED BEHAVIOUR: signed addition overflows",
        "out[i] = float(n[i] + 2147483647);",
        "out[i] = float(long(n[i]) + 2147483647l);",
    ),
    Fault(
        "shift by 32",
        "UNDEFINED BEHAVIOUR: shift out of range",
        "out[i] = float(1u << (n[i] / 2 + 1));",
        "out[i] = float(1u << (n[i] / 2));",
    ),
    Fault(
        "negative shift",
        "UNDEFINED BEHAVIOUR: shift out of range",
        "out[i] = float(8 >> (n[i] - 1));",
        "out[i] = float(8 >> (n[i] % 3));",
    ),
    Fault(
        "division by zero",
        "UNDEFINED BEHAVIOUR: integer division by zero",
        "out[i] = float(64 / n[i]);",
        "out[i] = float(64 / (n[i] + 1));",
    ),
    Fault(
        "remainder of zero",
        "UNDEFINED BEHAVIOUR: integer division by zero",
        "out[i] = float(64u % uint(n[i]));",
        "out[i] = float(64u % uint(n[i] + 1));",
    ),
    Fault(
        "float that no int holds",
        "UNDEFINED BEHAVIOUR: float does not fit",
        "out[i] = float(int(x[i] * 1.0e12f));",
        "out[i] = float(int(x[i] * 100.0f));",
    ),
    Fault(
        "NaN as an int",
        "UNDEFINED BEHAVIOUR: float does not fit",
        "out[i] = float(int(x[i] * NAN));",
        "out[i] = float(int(x[i]));",
    ),
    Fault(
        "function that ends without a value",
        "UNDEFINED BEHAVIOUR: function ends without a value",
        "out[i] = f(n[i]);",
        "out[i] = f(n[i]);",
        header="inline float f(int k) { if (k < 9) return 1.0f; return 2.0f; }\n",
        wrong_header="inline float f(int k) { if (k < 9) return 1.0f; }\n",
    ),
)
LIMITS: Final = (
    Fault(
        "too much threadgroup memory",
        "THREADGROUP MEMORY: 32784 bytes",
        f"threadgroup float s[8193]; s[lid] = x[i]; {_BARRIER} out[i] = s[lid];",
        f"threadgroup float s[8192]; s[lid] = x[i]; {_BARRIER} out[i] = s[lid];",
    ),
    Fault(
        "far too much threadgroup memory",
        "THREADGROUP MEMORY: s of 400000 bytes; the limit is 32768",
        f"threadgroup float s[100000]; s[lid] = x[i]; {_BARRIER} out[i] = s[lid];",
        f"threadgroup float s[1000]; s[lid] = x[i]; {_BARRIER} out[i] = s[lid];",
    ),
    Fault(
        "too much in several variables",
        "THREADGROUP MEMORY",
        f"threadgroup float s[8000]; threadgroup half t[400]; s[lid] = x[i]; t[lid] = half(x[i]); {_ALL}",
        f"threadgroup float s[8000]; threadgroup half t[300]; s[lid] = x[i]; t[lid] = half(x[i]); {_ALL}",
    ),
    Fault(
        "stack that overflows",
        "THREAD STACK overflow",
        "float v[40000]; for (int k = 0; k < 40000; k++) v[k] = x[k % 64]; out[i] = v[n[i] * 600];",
        "float v[4000]; for (int k = 0; k < 4000; k++) v[k] = x[k % 64]; out[i] = v[n[i] * 60];",
    ),
)
FAULTS: Final = (*BOUNDS, *RACES, *UNSET, *CONTROL, *ARITHMETIC, *LIMITS)

# Unset variables of a thread's own are not seen by an access: they show as outputs that depend on what memory held.
OWN_UNSET: Final = Fault(
    "array of a thread set in part",
    "ORDER: output 0 of small depends on the schedule or on unset memory",
    "float v[4]; for (int k = 0; k < 3; k++) v[k] = x[k]; out[i] = v[n[i] % 4];",
    "float v[4]; for (int k = 0; k < 4; k++) v[k] = x[k]; out[i] = v[n[i] % 4];",
)
BY_ORDER: Final = replace(
    OWN_UNSET,
    name="result that depends on who comes first",
    wrong=_ATOMIC.replace(
        "atomic_fetch_add_explicit(&a, 1u, memory_order_relaxed);",
        "uint mine = atomic_fetch_add_explicit(&a, 1u, memory_order_relaxed);",
    ).replace("float(atomic_load_explicit(&a, memory_order_relaxed))", "float(mine)"),
    right=_ATOMIC,
)
