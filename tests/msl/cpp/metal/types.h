// Scalar types, constants and attributes.
#pragma once
#include "../interface.h"

#define __METAL__ 1
#define __METAL_VERSION__ 310
#define METAL_FUNC inline __attribute__((always_inline))
#define METAL_CONST

// On functions of these headers that touch only their own data: the sanitizers leave them alone.
#define MSL_UNCHECKED __attribute__((no_sanitize("thread", "undefined")))
// A last parameter that takes the line of the call.
#define MSL_LINE int line = __builtin_LINE()

#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define HUGE_VALF (__builtin_inff())
#define MAXFLOAT 3.402823466e+38f
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define M_PI_F 3.14159274101257f
#define M_LN2_F 0.693147182464599f
#define M_LOG2E_F 1.44269502162933f
#define M_E_F 2.71828182845905f

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
struct bfloat;

template <class To, class From>
constexpr inline To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type between types of different sizes");
  return __builtin_bit_cast(To, from);
}
