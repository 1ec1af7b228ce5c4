// <metal_simdgroup_matrix>: 8x8 matrices, two elements a lane. Which two is not part of Metal's promise; here it is
// the layout that MLX's own kernels assume, so that those can run. A kernel may use thread_elements() elementwise.
#pragma once
#include "simdgroup.h"
#include "vectors.h"

namespace metal {
struct msl_corner {
  uint row, column;
};
MSL_UNCHECKED inline msl_corner msl_corner_of(uint lane) {
  const uint quad = lane / 4;
  return {(quad & 4) + (lane / 2) % 4, (quad & 2) * 2 + (lane % 2) * 2};
}

template <class T, int Rows = 8, int Columns = 8>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "Metal has 8x8 matrices only");
  vec<T, 2> elements;
  MSL_UNCHECKED simdgroup_matrix() : elements(T(__builtin_nanf(""))) {}  // unset: a GPU's registers may hold NaN
  MSL_UNCHECKED explicit simdgroup_matrix(T diagonal) {
    const msl_corner at = msl_corner_of(msl_self->lane);
    elements.x = at.row == at.column ? diagonal : T(0);
    elements.y = at.row == at.column + 1 ? diagonal : T(0);
  }
  vec<T, 2>& thread_elements() { return elements; }
  const vec<T, 2>& thread_elements() const { return elements; }
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

template <class T, int Rows, int Columns>
inline simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Rows, Columns> matrix;
  matrix.elements = vec<T, 2>(value);
  return matrix;
}

// The offset in memory of an element of this lane, with `origin` = (column, row).
MSL_UNCHECKED inline ulong msl_offset(uint k, ulong per_row, vec<ulong, 2> origin, bool transposed) {
  const msl_corner at = msl_corner_of(msl_self->lane);
  const ulong row = transposed ? at.column + k : at.row, column = transposed ? at.row : at.column + k;
  return (row + origin.y) * per_row + column + origin.x;
}
MSL_UNCHECKED inline void msl_whole(int operation, int line) {
  if (msl_share<char>(operation, 0, line).active != ~0u) msl_fail("SIMDGROUP MATRIX operation with inactive lanes", line);
}
// These two are checked: they touch the kernel's memory.
template <class T>
inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& matrix, const T* source, ulong per_row = 8,
                           vec<ulong, 2> origin = vec<ulong, 2>(0), bool transposed = false, MSL_LINE) {
  msl_whole(MSL_LOAD, line);
  matrix.elements.x = source[msl_offset(0, per_row, origin, transposed)];
  matrix.elements.y = source[msl_offset(1, per_row, origin, transposed)];
}
template <class T>
inline void simdgroup_store(simdgroup_matrix<T, 8, 8> matrix, T* target, ulong per_row = 8,
                            vec<ulong, 2> origin = vec<ulong, 2>(0), bool transposed = false, MSL_LINE) {
  msl_whole(MSL_STORE, line);
  target[msl_offset(0, per_row, origin, transposed)] = matrix.elements.x;
  target[msl_offset(1, per_row, origin, transposed)] = matrix.elements.y;
}

struct msl_factors {
  float a[2], b[2];
};
// Products and sums in float, k upwards, whatever the types.
template <class D, class A, class B, class C>
MSL_UNCHECKED inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                                        simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c, MSL_LINE) {
  const msl_factors mine{{float(a.elements.x), float(a.elements.y)}, {float(b.elements.x), float(b.elements.y)}};
  const msl_slots<msl_factors> slots = msl_share(MSL_MULTIPLY, mine, line);
  if (slots.active != ~0u) msl_fail("SIMDGROUP MATRIX operation with inactive lanes", line);
  float left[8][8], right[8][8];
  for (uint lane = 0; lane < MSL_LANES; lane++) {
    const msl_corner at = msl_corner_of(lane);
    const msl_factors factors = slots.of(lane);
    for (uint k = 0; k < 2; k++) {
      left[at.row][at.column + k] = factors.a[k];
      right[at.row][at.column + k] = factors.b[k];
    }
  }
  const msl_corner at = msl_corner_of(msl_self->lane);
  float x = float(c.elements.x), y = float(c.elements.y);
  for (int k = 0; k < 8; k++) {
    x = __builtin_fmaf(left[at.row][k], right[k][at.column], x);
    y = __builtin_fmaf(left[at.row][k], right[k][at.column + 1], y);
  }
  d.elements.x = D(x);
  d.elements.y = D(y);
}
template <class D, class A, class B>
MSL_UNCHECKED inline void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                             simdgroup_matrix<B, 8, 8> b, MSL_LINE) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)), line);
}
}  // namespace metal
