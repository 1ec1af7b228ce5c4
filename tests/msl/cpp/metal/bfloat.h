// The upper half of a float.
#pragma once
#include "traits.h"

// Rounds to nearest even; a NaN stays a NaN. As in Metal, it widens to float by itself; an integer becomes a bfloat by
// itself, a float or a half does not.
struct bfloat {
  uint16_t bits;
  bfloat() = default;
  explicit constexpr bfloat(float value) : bits(rounded(value)) {}
  explicit constexpr bfloat(half value) : bits(rounded(float(value))) {}
  template <class I, class = metal::enable_if_t<metal::is_integral_v<I>>>
  constexpr bfloat(I value) : bits(rounded(float(value))) {}
  constexpr operator float() const { return __builtin_bit_cast(float, uint32_t(bits) << 16); }
  bfloat& operator+=(float other) { return *this = bfloat(float(*this) + other); }
  bfloat& operator-=(float other) { return *this = bfloat(float(*this) - other); }
  bfloat& operator*=(float other) { return *this = bfloat(float(*this) * other); }
  bfloat& operator/=(float other) { return *this = bfloat(float(*this) / other); }

 private:
  MSL_UNCHECKED static constexpr uint16_t rounded(float value) {
    const uint32_t all = __builtin_bit_cast(uint32_t, value);
    if ((all & 0x7fffffffu) > 0x7f800000u) return uint16_t((all >> 16) | 0x40);
    return uint16_t((all + 0x7fffu + ((all >> 16) & 1)) >> 16);
  }
};
constexpr inline bfloat operator-(bfloat a) { return bfloat(-float(a)); }
// Of two bfloats, or of one and an integer; with a float, C++ widens the bfloat.
#define MSL_BFLOAT_OPERATOR(op)                                                                            \
  constexpr inline bfloat operator op(bfloat a, bfloat b) { return bfloat(float(a) op float(b)); }         \
  template <class I, class = metal::enable_if_t<metal::is_integral_v<I>>>                                  \
  constexpr inline bfloat operator op(bfloat a, I b) {                                                     \
    return a op bfloat(b);                                                                                 \
  }                                                                                                        \
  template <class I, class = metal::enable_if_t<metal::is_integral_v<I>>>                                  \
  constexpr inline bfloat operator op(I a, bfloat b) {                                                     \
    return bfloat(a) op b;                                                                                 \
  }
MSL_BFLOAT_OPERATOR(+)
MSL_BFLOAT_OPERATOR(-)
MSL_BFLOAT_OPERATOR(*)
MSL_BFLOAT_OPERATOR(/)
