// In place of MLX's header of this name, whose overloads by address space C++ cannot tell apart. A type, no arithmetic.
#pragma once
#include <metal_stdlib>
using namespace metal;
template <typename T>
struct complex_t {
  T real, imag;
  constexpr complex_t(T real, T imag) : real(real), imag(imag) {}
  constexpr complex_t() : real(0), imag(0) {}
};
using complex64_t = complex_t<float>;
