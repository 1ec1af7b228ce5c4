// Barriers, and <metal_simdgroup>: every operation leaves a value, waits for the simdgroup, and reads the slots.
// All lanes that the simdgroup has must take part: Metal would also take the active ones of a branch, which is
// more than a kernel should rely on.
#pragma once
#include "traits.h"

namespace metal {
enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
inline constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
MSL_UNCHECKED inline void threadgroup_barrier(mem_flags flags, MSL_LINE) { msl_threadgroup_barrier(uint(flags), line); }
MSL_UNCHECKED inline void simdgroup_barrier(mem_flags flags, MSL_LINE) { msl_simdgroup_barrier(uint(flags), line); }

// What a lane does, so that two lanes that do different things on one line are told apart.
enum {
  MSL_SUM = 1, MSL_PRODUCT, MSL_MAX, MSL_MIN, MSL_AND, MSL_OR, MSL_XOR, MSL_ALL, MSL_ANY, MSL_BALLOT, MSL_SHUFFLE,
  MSL_SHUFFLE_XOR, MSL_SHUFFLE_UP, MSL_SHUFFLE_DOWN, MSL_ROTATE_UP, MSL_ROTATE_DOWN, MSL_BROADCAST, MSL_FIRST, MSL_PREFIX,
  MSL_QUAD, MSL_MULTIPLY, MSL_LOAD, MSL_STORE
};

template <class T>
struct msl_slots {
  const char* start;
  uint active;  // a bit a lane
  MSL_UNCHECKED bool has(uint lane) const { return active >> lane & 1; }
  MSL_UNCHECKED T of(uint lane) const {
    T value;
    __builtin_memcpy(&value, start + lane * MSL_SLOT, sizeof(T));
    return value;
  }
};
template <class T>
MSL_UNCHECKED inline msl_slots<T> msl_share(int operation, T value, int line) {
  static_assert(sizeof(T) <= MSL_SLOT, "a simdgroup operation on something so large");
  msl_slots<T> slots;
  slots.start = msl_exchange(operation, &value, sizeof value, line, &slots.active);
  return slots;
}

// ---- reductions, in the order of a tree
template <class T, class F>
MSL_UNCHECKED inline T msl_reduce(int operation, T value, F combine, int line) {
  const msl_slots<T> slots = msl_share(operation, value, line);
  T kept[MSL_LANES];
  int count = 0;
  for (uint lane = 0; lane < MSL_LANES; lane++)
    if (slots.has(lane)) kept[count++] = slots.of(lane);
  for (int width = 1; width < count; width *= 2)
    for (int i = 0; i + width < count; i += 2 * width) kept[i] = combine(kept[i], kept[i + width]);
  return kept[0];
}
#define MSL_REDUCTION(name, operation, expression)                                                       \
  template <class T>                                                                                     \
  MSL_UNCHECKED inline T name(T value, MSL_LINE) {                                                       \
    return msl_reduce<T>(operation, value, [](T a, T b) MSL_UNCHECKED -> T { return expression; }, line); \
  }
MSL_REDUCTION(simd_sum, MSL_SUM, T(a + b))
MSL_REDUCTION(simd_product, MSL_PRODUCT, T(a * b))
MSL_REDUCTION(simd_max, MSL_MAX, a < b ? b : a)
MSL_REDUCTION(simd_min, MSL_MIN, b < a ? b : a)
MSL_REDUCTION(simd_and, MSL_AND, T(a & b))
MSL_REDUCTION(simd_or, MSL_OR, T(a | b))
MSL_REDUCTION(simd_xor, MSL_XOR, T(a ^ b))

MSL_UNCHECKED inline bool simd_all(bool value, MSL_LINE) {
  return msl_reduce<int>(MSL_ALL, value, [](int a, int b) MSL_UNCHECKED { return a & b; }, line);
}
MSL_UNCHECKED inline bool simd_any(bool value, MSL_LINE) {
  return msl_reduce<int>(MSL_ANY, value, [](int a, int b) MSL_UNCHECKED { return a | b; }, line);
}
struct simd_vote {
  ulong bits;
  explicit operator ulong() const { return bits; }
  bool all() const { return uint(bits) == ~0u; }
  bool any() const { return bits != 0; }
};
MSL_UNCHECKED inline simd_vote simd_ballot(bool value, MSL_LINE) {
  const uint mine = value ? 1u << msl_self->lane : 0u;
  return {ulong(msl_reduce<uint>(MSL_BALLOT, mine, [](uint a, uint b) MSL_UNCHECKED { return a | b; }, line))};
}

// ---- one lane's value
// A source beyond the simdgroup is the lane itself where the operation shifts, else a fault.
template <class T>
MSL_UNCHECKED inline T msl_pick(int operation, T value, int source, bool shifts, int line) {
  const msl_slots<T> slots = msl_share(operation, value, line);
  if (source < 0 || source >= MSL_LANES) {
    if (shifts) return value;
    msl_fail("SIMD SHUFFLE from a lane outside 0..31", line);
  }
  if (!slots.has(uint(source))) msl_fail("SIMD SHUFFLE from an inactive lane", line);
  return slots.of(uint(source));
}
MSL_UNCHECKED inline int msl_lane() { return int(msl_self->lane); }
template <class T>
MSL_UNCHECKED inline T simd_shuffle(T value, ushort lane, MSL_LINE) {
  return msl_pick(MSL_SHUFFLE, value, lane, false, line);
}
template <class T>
MSL_UNCHECKED inline T simd_shuffle_xor(T value, ushort mask, MSL_LINE) {
  return msl_pick(MSL_SHUFFLE_XOR, value, msl_lane() ^ mask, false, line);
}
template <class T>
MSL_UNCHECKED inline T simd_shuffle_down(T value, ushort by, MSL_LINE) {
  return msl_pick(MSL_SHUFFLE_DOWN, value, msl_lane() + by, true, line);
}
template <class T>
MSL_UNCHECKED inline T simd_shuffle_up(T value, ushort by, MSL_LINE) {
  return msl_pick(MSL_SHUFFLE_UP, value, msl_lane() - by, true, line);
}
template <class T>
MSL_UNCHECKED inline T simd_shuffle_rotate_down(T value, ushort by, MSL_LINE) {
  return msl_pick(MSL_ROTATE_DOWN, value, (msl_lane() + by) % MSL_LANES, false, line);
}
template <class T>
MSL_UNCHECKED inline T simd_shuffle_rotate_up(T value, ushort by, MSL_LINE) {
  return msl_pick(MSL_ROTATE_UP, value, (msl_lane() + MSL_LANES - by % MSL_LANES) % MSL_LANES, false, line);
}
template <class T>
MSL_UNCHECKED inline T simd_shuffle_and_fill_up(T value, T fill, ushort by, MSL_LINE) {
  const T got = msl_pick(MSL_SHUFFLE_UP, value, msl_lane() - by, true, line);
  return msl_lane() < by ? fill : got;
}
template <class T>
MSL_UNCHECKED inline T simd_shuffle_and_fill_down(T value, T fill, ushort by, MSL_LINE) {
  const T got = msl_pick(MSL_SHUFFLE_DOWN, value, msl_lane() + by, true, line);
  return msl_lane() + by >= MSL_LANES ? fill : got;
}
template <class T>
MSL_UNCHECKED inline T simd_broadcast(T value, ushort lane, MSL_LINE) {
  return msl_pick(MSL_BROADCAST, value, lane, false, line);
}
template <class T>
MSL_UNCHECKED inline T simd_broadcast_first(T value, MSL_LINE) {
  const msl_slots<T> slots = msl_share(MSL_FIRST, value, line);
  return slots.of(uint(__builtin_ctz(slots.active)));
}

// ---- prefixes and quads
template <class T>
MSL_UNCHECKED inline T msl_prefix(T value, uint end, int line) {
  const msl_slots<T> slots = msl_share(MSL_PREFIX, value, line);
  T sum = T(0);
  for (uint lane = 0; lane < end; lane++)
    if (slots.has(lane)) sum = T(sum + slots.of(lane));
  return sum;
}
template <class T>
MSL_UNCHECKED inline T simd_prefix_inclusive_sum(T value, MSL_LINE) {
  return msl_prefix(value, msl_self->lane + 1, line);
}
template <class T>
MSL_UNCHECKED inline T simd_prefix_exclusive_sum(T value, MSL_LINE) {
  return msl_prefix(value, msl_self->lane, line);
}
template <class T>
MSL_UNCHECKED inline T quad_sum(T value, MSL_LINE) {
  const msl_slots<T> slots = msl_share(MSL_QUAD, value, line);
  const uint quad = msl_self->lane & ~3u;
  return T(T(slots.of(quad) + slots.of(quad + 1)) + T(slots.of(quad + 2) + slots.of(quad + 3)));
}
template <class T>
MSL_UNCHECKED inline T quad_shuffle_xor(T value, ushort mask, MSL_LINE) {
  const uint lane = msl_self->lane;
  return msl_pick(MSL_QUAD, value, int((lane & ~3u) | ((lane ^ mask) & 3u)), false, line);
}
}  // namespace metal
