"""Constructs that C++ takes and Metal does not, or that neither takes; and which pass notices each."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Pass = Literal["rules", "clang", "compile"]


class Construct(NamedTuple):
    """Something to add to a kernel that copies `inp` [64] to `out`; `small` [3] lies in constant."""

    name: str
    header: str
    body: str
    noticed_by: frozenset[Pass]


def _construct(name: str, *noticed_by: Pass, header: str = "", body: str = "") -> Construct:
    return Construct(name, header, body, frozenset(noticed_by))


ADDRESS_SPACES: Final = (
    _construct("device pointer as a plain one", "rules", "clang", body="float* p = out; p[0] = 1.0f;"),
    _construct(
        "device pointer as a thread one",
        "clang",
        header="inline float f(const thread float* p) { return p[0]; }\n",
        body="out[0] = f(inp);",
    ),
    _construct(
        "threadgroup pointer as a device one",
        "clang",
        header="inline float f(const device float* p) { return p[0]; }\n",
        body="threadgroup float s[4]; s[0] = 1.0f; out[0] = f(s);",
    ),
    _construct(
        "constant input as a device pointer",
        "clang",
        header="inline float f(const device float* p) { return p[0]; }\n",
        body="out[0] = f(small);",
    ),
    _construct(
        "device input as a constant pointer",
        "clang",
        header="inline float f(const constant float* p) { return p[0]; }\n",
        body="out[0] = f(inp);",
    ),
    _construct("write through a const device pointer", "clang", "compile", body="inp[0] = 1.0f;"),
    _construct(
        "const cast away by a pointer", "clang", "compile", body="device float* p = inp; p[0] = 1.0f;"
    ),
    _construct("write to a constant input", "clang", "compile", body="small[0] = 1.0f;"),
    _construct(
        "pointer parameter without address space",
        "rules",
        header="inline float f(const float* p) { return p[0]; }\n",
        body="float v[2] = {1.0f, 2.0f}; out[0] = f(v);",
    ),
    _construct(
        "reference parameter without address space",
        "rules",
        header="inline void f(float& p) { p = 1.0f; }\n",
        body="float v; f(v); out[0] = v;",
    ),
    _construct(
        "reference to a structure without address space",
        "rules",
        header="struct S { float x; };\ninline void f(S& s) { s.x = 1.0f; }\n",
        body="S s; f(s); out[0] = s.x;",
    ),
    _construct(
        "template parameter's pointer without address space",
        "rules",
        header="template <typename U>\ninline U f(const U* p) { return p[0]; }\n",
        body="float v[1] = {1.0f}; out[0] = f(v);",
    ),
    _construct(
        "local pointer to a structure without address space",
        "rules",
        header="struct S { float x; };\n",
        body="S s; S* p = &s; p->x = 1.0f; out[0] = s.x;",
    ),
    _construct(
        "threadgroup item as a thread reference",
        "clang",
        body="threadgroup float s[2]; thread float& r = s[0]; r = 1.0f;",
    ),
    _construct(
        "address of a local as a threadgroup pointer",
        "clang",
        body="float v = 1.0f; threadgroup float* p = &v; out[0] = *p;",
    ),
    _construct(
        "global not in constant", "rules", header="static constexpr int K = 4;\n", body="out[0] = float(K);"
    ),
    _construct("mutable global", "rules", header="int counter = 0;\n", body="counter++;"),
    _construct("static local", "rules", body="static int n = 0; n++; out[0] = float(n);"),
    _construct(
        "threadgroup variable in a function",
        "rules",
        header="inline void f() { threadgroup float s[4]; s[0] = 1.0f; }\n",
        body="f();",
    ),
    _construct(
        "threadgroup variable with a value",
        "rules",
        "clang",
        "compile",
        body="threadgroup float s[4] = {0.0f}; out[0] = s[0];",
    ),
    _construct(
        "global threadgroup variable", "rules", header="threadgroup float s[4];\n", body="s[0] = 1.0f;"
    ),
)
TYPES: Final = (
    _construct("double", "rules", "clang", body="double d = inp[0]; out[0] = float(d);"),
    _construct("long double literal", "rules", body="out[0] = 1.0L;"),
    _construct("long long", "rules", body="long long d = 3; out[0] = float(d);"),
    _construct("float to bfloat by itself", "compile", body="bfloat16_t b = 1.0f; out[0] = float(b);"),
    _construct(
        "half to bfloat by itself", "clang", "compile", body="bfloat16_t b = half(1.0f); out[0] = float(b);"
    ),
    _construct(
        "float returned as bfloat",
        "compile",
        header="inline bfloat16_t f(float x) { return x; }\n",
        body="out[0] = float(f(1.0f));",
    ),
    _construct("narrowing in braces", "clang", body="int v[1] = {inp[0]}; out[0] = float(v[0]);"),
    _construct("as_type between sizes", "clang", "compile", body="out[0] = float(as_type<ushort>(inp[0]));"),
    _construct(
        "array of a length unknown",
        "clang",
        body="int n = inp_shape[0]; float v[n]; v[0] = 1.0f; out[0] = v[0];",
    ),
    _construct(
        "threadgroup array of a length unknown",
        "clang",
        "compile",
        body="threadgroup float s[inp_shape[0]]; s[0] = 1.0f;",
    ),
    _construct(
        "component that a vector has not",
        "clang",
        "compile",
        body="float2 v = float2(1.0f, 2.0f); out[0] = v.z;",
    ),
    _construct(
        "class template without its arguments",
        "clang",
        header="template <typename U>\nstruct S { U x; S(U x) : x(x) {} };\n",
        body="S s(1.0f); out[0] = s.x;",
    ),
    _construct(
        "function pointer",
        "rules",
        header="inline float f(float x) { return x; }\n",
        body="float (*g)(float) = f; out[0] = g(1.0f);",
    ),
    _construct(
        "virtual function",
        "rules",
        header="struct A { virtual float f() { return 1.0f; } };\n",
        body="A a; out[0] = a.f();",
    ),
    _construct("string", "rules", body='auto s = "text"; out[0] = float(s[0]);'),
)
LIBRARY: Final = (
    _construct("std:: function", "rules", "clang", "compile", body="out[0] = std::exp(inp[0]);"),
    _construct(
        "header of C++", "rules", "clang", "compile", header="#include <cmath>\n", body="out[0] = 1.0f;"
    ),
    _construct("printf", "rules", "clang", "compile", body='printf("x");'),
    _construct("function of another language", "clang", "compile", body="__syncthreads();"),
    _construct("index of another language", "clang", "compile", body="out[blockIdx.x] = 1.0f;"),
    _construct("operation that is not there", "clang", "compile", body="out[0] = metal::simd_average(1.0f);"),
    _construct("simd_sum of 64 bits", "clang", body="out[0] = float(metal::simd_sum(ulong(i)));"),
    _construct("simd_max of a bool", "clang", body="out[0] = float(metal::simd_max(i > 3u));"),
    _construct(
        "simd_sum of a structure",
        "clang",
        "compile",
        header="struct A { float x; };\n",
        body="A a; a.x = 1.0f; out[0] = metal::simd_sum(a).x;",
    ),
    _construct("shuffle of 64 bits", "clang", body="out[0] = float(metal::simd_shuffle_xor(long(i), 1));"),
    _construct("min of int and uint", "clang", "compile", body="out[0] = float(metal::min(3, i));"),
    _construct(
        "max of float and half", "clang", "compile", body="out[0] = float(metal::max(half(1.0f), inp[0]));"
    ),
    _construct("pow of ints", "clang", "compile", body="out[0] = metal::pow(2, 3);"),
    _construct("barrier of a number", "clang", "compile", body="threadgroup_barrier(1);"),
    _construct("barrier of nothing", "clang", "compile", body="threadgroup_barrier();"),
    _construct(
        "atomic without explicit order",
        "clang",
        "compile",
        body="threadgroup atomic_uint n; atomic_fetch_add(&n, 1u);",
    ),
    _construct(
        "atomic of a strict order",
        "clang",
        "compile",
        body="threadgroup atomic_uint n; atomic_store_explicit(&n, 1u, memory_order_seq_cst);",
    ),
    _construct(
        "float atomic in threadgroup memory",
        "clang",
        body="threadgroup atomic_float n; atomic_store_explicit(&n, 1.0f, memory_order_relaxed);",
    ),
    _construct(
        "float atomic maximum",
        "clang",
        body="atomic_fetch_max_explicit((device atomic_float*)out, 1.0f, memory_order_relaxed);",
    ),
    _construct(
        "atomic on a plain number",
        "clang",
        "compile",
        body="atomic_fetch_add_explicit(out, 1.0f, memory_order_relaxed);",
    ),
    _construct("matrix of 4x4", "clang", "compile", body="simdgroup_matrix<float, 4, 4> m; out[0] = 1.0f;"),
    _construct("matrix of ints", "clang", body="simdgroup_matrix<int, 8, 8> m; out[0] = 1.0f;"),
    _construct(
        "matrix loaded from thread memory",
        "clang",
        body="float v[64]; for (int j = 0; j < 64; j++) v[j] = 0.0f; simdgroup_float8x8 m; simdgroup_load(m, v, 8);",
    ),
    _construct(
        "matrix loaded from another type",
        "clang",
        "compile",
        body="threadgroup half s[64]; s[i] = half(1.0f); simdgroup_float8x8 m; simdgroup_load(m, s, 8);",
    ),
)
LANGUAGE: Final = (
    _construct("lambda", "rules", body="auto f = [&](float x) { return x + 1.0f; }; out[0] = f(inp[0]);"),
    _construct("goto", "rules", body="goto end; end: out[0] = 1.0f;"),
    _construct(
        "recursion",
        "rules",
        header="inline int f(int n) { return n < 2 ? n : f(n - 1) + 1; }\n",
        body="out[0] = float(f(3));",
    ),
    _construct(
        "recursion by way of another",
        "rules",
        header="inline int g(int n);\n"
        "inline int f(int n) { return n < 2 ? n : g(n - 1); }\n"
        "inline int g(int n) { return f(n); }\n",
        body="out[0] = float(f(3));",
    ),
    _construct("new", "rules", body="float* p = new float[3]; out[0] = p[0];"),
    _construct("exceptions", "rules", "clang", "compile", body="try { out[0] = 1.0f; } catch (...) {}"),
    _construct("inline assembly", "rules", body='asm("nop");'),
    _construct("thread_local", "rules", body="thread_local int z = 0; out[0] = float(z);"),
    _construct(
        "function without a return",
        "clang",
        header="inline float f(int n) { if (n > 1) return 1.0f; }\n",
        body="out[0] = f(int(i));",
    ),
    _construct("variable that may be unset", "clang", body="float x; if (i > 3u) x = 1.0f; out[0] = x;"),
    _construct(
        "word of Metal as a name", "clang", "compile", body="int constant = 3; out[0] = float(constant);"
    ),
    _construct("parameter declared again", "clang", "compile", body="int inp = 3; out[0] = float(inp);"),
    _construct(
        "attribute that was not asked for by its name",
        "clang",
        "compile",
        header="inline uint f() { return thread_index_in_simdgroup; }\n",
        body="out[0] = float(f());",
    ),
    _construct(
        "pointer to a local returned",
        "clang",
        header="inline thread float* f() { float v = 1.0f; return &v; }\n",
        body="out[0] = *f();",
    ),
)
CONSTRUCTS: Final = (*ADDRESS_SPACES, *TYPES, *LIBRARY, *LANGUAGE)
