// <metal_math>, <metal_integer>, <metal_common>. Computed in float by the host's libm; half and bfloat round the
// result. That is more exact than a GPU: the emulation says nothing about Metal's own rounding.
#pragma once
#include "limits.h"
#include "vectors.h"

#define MSL_UNARY(name, expression)     \
  inline float name(float x) {          \
    return expression;                  \
  }                                     \
  inline half name(half x_) {           \
    const float x = float(x_);          \
    return half(expression);            \
  }                                     \
  inline bfloat name(bfloat x_) {       \
    const float x = float(x_);          \
    return bfloat(float(expression));   \
  }
#define MSL_BINARY(name, expression)                \
  inline float name(float x, float y) {             \
    return expression;                              \
  }                                                 \
  inline half name(half x_, half y_) {              \
    const float x = float(x_), y = float(y_);       \
    return half(expression);                        \
  }                                                 \
  inline bfloat name(bfloat x_, bfloat y_) {        \
    const float x = float(x_), y = float(y_);       \
    return bfloat(float(expression));               \
  }
// These three families differ on a GPU (metal::exp may be either, by the compiler's mode), not here.
#define MSL_TRANSCENDENTAL                    \
  MSL_UNARY(exp, __builtin_expf(x))           \
  MSL_UNARY(exp2, __builtin_exp2f(x))         \
  MSL_UNARY(exp10, __builtin_powf(10.0f, x))  \
  MSL_UNARY(log, __builtin_logf(x))           \
  MSL_UNARY(log2, __builtin_log2f(x))         \
  MSL_UNARY(log10, __builtin_log10f(x))       \
  MSL_UNARY(sqrt, __builtin_sqrtf(x))         \
  MSL_UNARY(rsqrt, 1.0f / __builtin_sqrtf(x)) \
  MSL_UNARY(sin, __builtin_sinf(x))           \
  MSL_UNARY(cos, __builtin_cosf(x))           \
  MSL_UNARY(tan, __builtin_tanf(x))           \
  MSL_UNARY(tanh, __builtin_tanhf(x))         \
  MSL_BINARY(pow, __builtin_powf(x, y))       \
  MSL_BINARY(atan2, __builtin_atan2f(x, y))   \
  MSL_BINARY(fmod, __builtin_fmodf(x, y))     \
  MSL_BINARY(divide, x / y)

namespace metal {
MSL_TRANSCENDENTAL
namespace fast {
MSL_TRANSCENDENTAL
}
namespace precise {
MSL_TRANSCENDENTAL
}

MSL_UNARY(fabs, __builtin_fabsf(x))
MSL_UNARY(abs, __builtin_fabsf(x))
MSL_UNARY(floor, __builtin_floorf(x))
MSL_UNARY(ceil, __builtin_ceilf(x))
MSL_UNARY(trunc, __builtin_truncf(x))
MSL_UNARY(rint, __builtin_rintf(x))
MSL_UNARY(round, __builtin_roundf(x))
MSL_UNARY(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x == 0.0f ? x : 0.0f)
MSL_BINARY(copysign, __builtin_copysignf(x, y))
// A NaN loses against a number, as Metal's do.
MSL_BINARY(fmin, y < x || x != x ? y : x)
MSL_BINARY(fmax, y > x || x != x ? y : x)
MSL_BINARY(min, y < x || x != x ? y : x)
MSL_BINARY(max, y > x || x != x ? y : x)

inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline half fma(half a, half b, half c) { return half(__builtin_fmaf(float(a), float(b), float(c))); }
inline float ldexp(float a, int b) { return __builtin_ldexpf(a, b); }
inline float clamp(float x, float least, float most) { return fmin(fmax(x, least), most); }
inline half clamp(half x, half least, half most) { return fmin(fmax(x, least), most); }

#define MSL_INTEGER(T)                                                     \
  inline T min(T a, T b) { return a < b ? a : b; }                         \
  inline T max(T a, T b) { return a > b ? a : b; }                         \
  inline T clamp(T x, T least, T most) { return min(max(x, least), most); }
MSL_INTEGER(int)
MSL_INTEGER(uint)
MSL_INTEGER(long)
MSL_INTEGER(ulong)
MSL_INTEGER(short)
MSL_INTEGER(ushort)
inline int abs(int a) { return a < 0 ? -a : a; }
inline uint popcount(uint x) { return uint(__builtin_popcount(x)); }
inline uint ctz(uint x) { return x ? uint(__builtin_ctz(x)) : 32u; }
inline uint clz(uint x) { return x ? uint(__builtin_clz(x)) : 32u; }

// Componentwise.
#define MSL_VECTOR_BINARY(name)                          \
  template <class T, int N>                              \
  inline vec<T, N> name(vec<T, N> a, vec<T, N> b) {      \
    for (int i = 0; i < N; i++) a[i] = name(a[i], b[i]); \
    return a;                                            \
  }
#define MSL_VECTOR_UNARY(name)                     \
  template <class T, int N>                        \
  inline vec<T, N> name(vec<T, N> a) {             \
    for (int i = 0; i < N; i++) a[i] = name(a[i]); \
    return a;                                      \
  }
MSL_VECTOR_BINARY(min)
MSL_VECTOR_BINARY(max)
MSL_VECTOR_UNARY(exp)
MSL_VECTOR_UNARY(abs)

template <class T>
inline T select(T no, T yes, bool choose) {
  return choose ? yes : no;
}
inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline bool signbit(float x) { return __builtin_signbit(x); }
}  // namespace metal
