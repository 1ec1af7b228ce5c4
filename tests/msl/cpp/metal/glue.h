// What the translated text and its entry function use; a kernel's author never sees these names.
#pragma once
#include "traits.h"
#include "vectors.h"

namespace msl {
// The storage of a threadgroup variable: one for each place in the text where it is declared.
template <class Variable>
MSL_UNCHECKED inline Variable& group_variable(int site, const char* name) {
  using Item = typename metal::msl_item<Variable>::type;
  return *static_cast<Variable*>(msl_group_variable(site, name, sizeof(Variable), sizeof(Item)));
}

// A buffer as whatever pointer or reference the kernel's parameter is.
struct Pointer {
  void* place;
  template <class T>
  operator T*() const {
    return static_cast<T*>(place);
  }
};
struct Reference {
  void* place;
  template <class T>
  operator T&() const {
    return *static_cast<T*>(place);
  }
};

// A position as whatever integer or vector the kernel's parameter is.
struct Position {
  const uint32_t* of;
  operator uint() const { return of[0]; }
  operator uint2() const { return uint2(of[0], of[1]); }
  operator uint3() const { return uint3(of[0], of[1], of[2]); }
  operator ushort() const { return ushort(of[0]); }
  operator ushort2() const { return ushort2(ushort(of[0]), ushort(of[1])); }
  operator ushort3() const { return ushort3(ushort(of[0]), ushort(of[1]), ushort(of[2])); }
};
}  // namespace msl
