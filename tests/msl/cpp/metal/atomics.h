// <metal_atomic>: relaxed order only, as in Metal. Not inlined, so that the caller's address names the place.
#pragma once
#include "types.h"

namespace metal {
enum memory_order { memory_order_relaxed };
template <class T>
struct atomic {
  T msl_value;
};
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;
using atomic_bool = atomic<bool>;

#define MSL_ATOMIC MSL_UNCHECKED __attribute__((noinline))
#define MSL_TOUCH(place, reads, writes) msl_atomic(place, sizeof(T), reads, writes, __builtin_return_address(0))
#define MSL_FETCH(name, expression)                                                            \
  template <class T, class U>                                                                  \
  MSL_ATOMIC T atomic_fetch_##name##_explicit(volatile atomic<T>* place, U operand, memory_order) { \
    MSL_TOUCH(place, true, true);                                                              \
    const T old = place->msl_value, by = T(operand);                                           \
    place->msl_value = T(expression);                                                          \
    return old;                                                                                \
  }
MSL_FETCH(add, old + by)
MSL_FETCH(sub, old - by)
MSL_FETCH(max, old < by ? by : old)
MSL_FETCH(min, by < old ? by : old)
MSL_FETCH(and, old & by)
MSL_FETCH(or, old | by)
MSL_FETCH(xor, old ^ by)

template <class T, class U>
MSL_ATOMIC T atomic_exchange_explicit(volatile atomic<T>* place, U value, memory_order) {
  MSL_TOUCH(place, true, true);
  const T old = place->msl_value;
  place->msl_value = T(value);
  return old;
}
template <class T, class U>
MSL_ATOMIC void atomic_store_explicit(volatile atomic<T>* place, U value, memory_order) {
  MSL_TOUCH(place, false, true);
  place->msl_value = T(value);
}
template <class T>
MSL_ATOMIC T atomic_load_explicit(const volatile atomic<T>* place, memory_order) {
  MSL_TOUCH(place, true, false);
  return place->msl_value;
}
template <class T, class U>
MSL_ATOMIC bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* place, T* expected, U value, memory_order,
                                                      memory_order) {
  MSL_TOUCH(place, true, true);
  T old = place->msl_value;
  if (__builtin_memcmp(&old, expected, sizeof(T)) == 0) {
    place->msl_value = T(value);
    return true;
  }
  *expected = old;
  return false;
}
}  // namespace metal
