// <metal_limits>
#pragma once
#include "bfloat.h"

namespace metal {
template <class T>
struct numeric_limits;

#define MSL_INTEGER_LIMITS(T, MOST, LEAST)            \
  template <>                                         \
  struct numeric_limits<T> {                          \
    static constexpr T max() { return MOST; }         \
    static constexpr T min() { return LEAST; }        \
    static constexpr T lowest() { return LEAST; }     \
  };
MSL_INTEGER_LIMITS(int8_t, 127, -128)
MSL_INTEGER_LIMITS(uint8_t, 255, 0)
MSL_INTEGER_LIMITS(int16_t, 32767, -32768)
MSL_INTEGER_LIMITS(uint16_t, 65535, 0)
MSL_INTEGER_LIMITS(int32_t, 2147483647, -2147483647 - 1)
MSL_INTEGER_LIMITS(uint32_t, 4294967295u, 0)
MSL_INTEGER_LIMITS(int64_t, 9223372036854775807l, -9223372036854775807l - 1)
MSL_INTEGER_LIMITS(uint64_t, 18446744073709551615ul, 0)

#define MSL_FLOAT_LIMITS(T, MOST, LEAST, STEP, INFINITE, NOT_A_NUMBER) \
  template <>                                                         \
  struct numeric_limits<T> {                                          \
    static constexpr T max() { return MOST; }                         \
    static constexpr T min() { return LEAST; }                        \
    static constexpr T lowest() { return -MOST; }                     \
    static constexpr T epsilon() { return STEP; }                     \
    static constexpr T infinity() { return INFINITE; }                \
    static constexpr T quiet_NaN() { return NOT_A_NUMBER; }           \
  };
MSL_FLOAT_LIMITS(float, FLT_MAX, FLT_MIN, FLT_EPSILON, INFINITY, NAN)
MSL_FLOAT_LIMITS(half, half(65504.0f), half(6.103515625e-05f), half(9.765625e-04f), half(INFINITY), half(NAN))
MSL_FLOAT_LIMITS(bfloat, as_type<bfloat>(uint16_t(0x7f7f)), as_type<bfloat>(uint16_t(0x0080)),
                 as_type<bfloat>(uint16_t(0x3c00)), as_type<bfloat>(uint16_t(0x7f80)), as_type<bfloat>(uint16_t(0x7fc0)))
}  // namespace metal
