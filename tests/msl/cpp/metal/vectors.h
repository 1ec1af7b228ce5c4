// vec<T, 2>, vec<T, 3> and vec<T, 4> with Metal's sizes and alignments. No swizzles but single components.
#pragma once
#include "bfloat.h"

namespace metal {
template <class T, int N>
struct vec;

#define MSL_VECTOR(N)                                                                                     \
  vec() = default;                                                                                        \
  template <class U>                                                                                      \
  explicit constexpr vec(vec<U, N> other) : vec(T(0)) {                                                   \
    for (int i = 0; i < N; i++) (*this)[i] = T(other[i]);                                                 \
  }                                                                                                       \
  constexpr T& operator[](int i) { return *msl_component(*this, i, N); }                                  \
  constexpr const T& operator[](int i) const { return *msl_component(const_cast<vec&>(*this), i, N); }

template <class V>
constexpr inline auto msl_component(V& v, int i, int size) -> decltype(&v.x) {
  if (i < 0 || i >= size) msl_fail("VECTOR INDEX out of range", 0);
  return v.msl_at(i);
}

template <class T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  T x, y;
  MSL_VECTOR(2)
  constexpr vec(T all) : x(all), y(all) {}
  constexpr vec(T a, T b) : x(a), y(b) {}
  constexpr T* msl_at(int i) { return i == 0 ? &x : &y; }
};
template <class T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  T x, y, z;
  MSL_VECTOR(3)
  constexpr vec(T all) : x(all), y(all), z(all) {}
  constexpr vec(T a, T b, T c) : x(a), y(b), z(c) {}
  constexpr T* msl_at(int i) { return i == 0 ? &x : i == 1 ? &y : &z; }
};
template <class T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
  MSL_VECTOR(4)
  constexpr vec(T all) : x(all), y(all), z(all), w(all) {}
  constexpr vec(T a, T b, T c, T d) : x(a), y(b), z(c), w(d) {}
  constexpr T* msl_at(int i) { return i == 0 ? &x : i == 1 ? &y : i == 2 ? &z : &w; }
};
#undef MSL_VECTOR

#define MSL_VECTOR_OPERATOR(op)                              \
  template <class T, int N>                                  \
  constexpr vec<T, N> operator op(vec<T, N> a, vec<T, N> b) { \
    for (int i = 0; i < N; i++) a[i] = T(a[i] op b[i]);      \
    return a;                                                \
  }                                                          \
  template <class T, int N>                                  \
  constexpr vec<T, N> operator op(vec<T, N> a, T b) {        \
    for (int i = 0; i < N; i++) a[i] = T(a[i] op b);         \
    return a;                                                \
  }                                                          \
  template <class T, int N>                                  \
  constexpr vec<T, N> operator op(T a, vec<T, N> b) {        \
    for (int i = 0; i < N; i++) b[i] = T(a op b[i]);         \
    return b;                                                \
  }                                                          \
  template <class T, int N, class B>                         \
  constexpr vec<T, N>& operator op##=(vec<T, N>& a, B b) {   \
    return a = a op b;                                       \
  }
MSL_VECTOR_OPERATOR(+)
MSL_VECTOR_OPERATOR(-)
MSL_VECTOR_OPERATOR(*)
MSL_VECTOR_OPERATOR(/)

template <class T, int N>
constexpr T dot(vec<T, N> a, vec<T, N> b) {
  T sum = T(0);
  for (int i = 0; i < N; i++) sum += a[i] * b[i];
  return sum;
}
}  // namespace metal

#define MSL_VECTOR_NAMES(T)      \
  using T##2 = metal::vec<T, 2>; \
  using T##3 = metal::vec<T, 3>; \
  using T##4 = metal::vec<T, 4>;
MSL_VECTOR_NAMES(bool)
MSL_VECTOR_NAMES(char)
MSL_VECTOR_NAMES(uchar)
MSL_VECTOR_NAMES(short)
MSL_VECTOR_NAMES(ushort)
MSL_VECTOR_NAMES(int)
MSL_VECTOR_NAMES(uint)
MSL_VECTOR_NAMES(long)
MSL_VECTOR_NAMES(ulong)
MSL_VECTOR_NAMES(half)
MSL_VECTOR_NAMES(bfloat)
MSL_VECTOR_NAMES(float)
using metal::vec;
