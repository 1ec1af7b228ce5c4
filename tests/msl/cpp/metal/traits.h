// <metal_type_traits>, <metal_uniform>
#pragma once
#include "types.h"

namespace metal {
template <class T, T v>
struct integral_constant {
  static constexpr T value = v;
  constexpr operator T() const { return v; }
};
using true_type = integral_constant<bool, true>;
using false_type = integral_constant<bool, false>;
template <bool B>
using bool_constant = integral_constant<bool, B>;

template <class A, class B>
struct is_same : false_type {};
template <class A>
struct is_same<A, A> : true_type {};
template <class A, class B>
constexpr bool is_same_v = is_same<A, B>::value;

template <class T>
struct remove_cv {
  using type = T;
};
template <class T>
struct remove_cv<const T> {
  using type = T;
};
template <class T>
using remove_cv_t = typename remove_cv<T>::type;

template <class T>
struct remove_reference {
  using type = T;
};
template <class T>
struct remove_reference<T&> {
  using type = T;
};
template <class T>
using remove_reference_t = typename remove_reference<T>::type;

template <class T>
using remove_addrspace_t = remove_cv_t<T>;

template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  using type = T;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;

template <bool B, class T, class F>
struct conditional {
  using type = T;
};
template <class T, class F>
struct conditional<false, T, F> {
  using type = F;
};
template <bool B, class T, class F>
using conditional_t = typename conditional<B, T, F>::type;

template <class T>
constexpr bool is_floating_point_v = is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>;

template <class T>
struct is_integral : false_type {};
#define MSL_IS_INTEGRAL(T) \
  template <>              \
  struct is_integral<T> : true_type {};
MSL_IS_INTEGRAL(bool)
MSL_IS_INTEGRAL(char)
MSL_IS_INTEGRAL(signed char)
MSL_IS_INTEGRAL(uchar)
MSL_IS_INTEGRAL(short)
MSL_IS_INTEGRAL(ushort)
MSL_IS_INTEGRAL(int)
MSL_IS_INTEGRAL(uint)
MSL_IS_INTEGRAL(long)
MSL_IS_INTEGRAL(ulong)
template <class T>
constexpr bool is_integral_v = is_integral<T>::value;

// <metal_uniform>: a value that all threads share.
template <class T>
using uniform = T;
template <class T>
constexpr T make_uniform(T value) {
  return value;
}

// Not Metal's: the type in an array of arrays.
template <class T>
struct msl_item {
  using type = T;
};
template <class T, size_t N>
struct msl_item<T[N]> {
  using type = typename msl_item<T>::type;
};
}  // namespace metal
