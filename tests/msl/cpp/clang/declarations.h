// Declarations alone, for clang to check types and address spaces with: nothing here runs. Stricter than the headers
// of the emulation where Metal is: what Metal has no overload for is not declared.
#pragma once

// ---- scalar types
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef _Float16 float16_t;
typedef __bf16 bfloat;
typedef __bf16 bfloat16_t;

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
#define METAL_FUNC inline
#define MLX_MTL_PRAGMA_UNROLL _Pragma("clang loop unroll(full)")

// ---- address spaces
#define MSL_DEVICE __attribute__((address_space(1)))
#define MSL_CONSTANT __attribute__((address_space(2)))
#define MSL_THREADGROUP __attribute__((address_space(3)))

// ---- vectors; clang_pass.py writes float4(a, b, c, d) as msl_vector<float4>(a, b, c, d)
#define MSL_VECTORS(T)                                  \
  typedef T T##2 __attribute__((ext_vector_type(2)));   \
  typedef T T##3 __attribute__((ext_vector_type(3)));   \
  typedef T T##4 __attribute__((ext_vector_type(4)));
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
MSL_VECTORS(half)
MSL_VECTORS(bfloat)
MSL_VECTORS(float)

template <class To, class From>
To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type between types of different sizes");
  return __builtin_bit_cast(To, from);
}

namespace metal {
// ---- traits
template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;
template <class A, class B>
struct is_same {
  static constexpr bool value = false;
};
template <class A>
struct is_same<A, A> {
  static constexpr bool value = true;
};
template <class A, class B>
constexpr bool is_same_v = is_same<A, B>::value;
template <bool B, class T, class F>
struct conditional {
  typedef T type;
};
template <class T, class F>
struct conditional<false, T, F> {
  typedef F type;
};
template <bool B, class T, class F>
using conditional_t = typename conditional<B, T, F>::type;
template <class T>
struct msl_itself {
  typedef T type;
};

template <class T, int N>
struct msl_vec {
  typedef T type __attribute__((ext_vector_type(N)));
};
template <class T, int N>
using vec = typename msl_vec<T, N>::type;

template <class T>
struct numeric_limits {
  static constexpr T infinity() { return T(); }
  static constexpr T quiet_NaN() { return T(); }
  static constexpr T epsilon() { return T(); }
  static constexpr T max() { return T(); }
  static constexpr T min() { return T(); }
  static constexpr T lowest() { return T(); }
};

// ---- math: float and half; MLX's prelude adds bfloat
#define MSL_UNARY(name) \
  float name(float);    \
  half name(half);      \
  bfloat name(bfloat);  \
  float2 name(float2);  \
  float4 name(float4);
#define MSL_BINARY(name)       \
  float name(float, float);    \
  half name(half, half);       \
  bfloat name(bfloat, bfloat); \
  float2 name(float2, float2); \
  float4 name(float4, float4);
#define MSL_TRANSCENDENTAL \
  MSL_UNARY(exp)           \
  MSL_UNARY(exp2)          \
  MSL_UNARY(exp10)         \
  MSL_UNARY(log)           \
  MSL_UNARY(log2)          \
  MSL_UNARY(log10)         \
  MSL_UNARY(sqrt)          \
  MSL_UNARY(rsqrt)         \
  MSL_UNARY(sin)           \
  MSL_UNARY(cos)           \
  MSL_UNARY(tan)           \
  MSL_UNARY(tanh)          \
  MSL_BINARY(pow)          \
  MSL_BINARY(atan2)        \
  MSL_BINARY(fmod)         \
  MSL_BINARY(divide)
MSL_TRANSCENDENTAL
namespace fast {
MSL_TRANSCENDENTAL
}
namespace precise {
MSL_TRANSCENDENTAL
}
MSL_UNARY(fabs)
MSL_UNARY(abs)
MSL_UNARY(floor)
MSL_UNARY(ceil)
MSL_UNARY(trunc)
MSL_UNARY(rint)
MSL_UNARY(round)
MSL_UNARY(sign)
MSL_BINARY(copysign)
MSL_BINARY(fmin)
MSL_BINARY(fmax)
MSL_BINARY(min)
MSL_BINARY(max)
float fma(float, float, float);
half fma(half, half, half);
float ldexp(float, int);
float clamp(float, float, float);
half clamp(half, half, half);
#define MSL_INTEGER(T) \
  T min(T, T);         \
  T max(T, T);         \
  T clamp(T, T, T);    \
  T abs(T);            \
  T popcount(T);       \
  T ctz(T);            \
  T clz(T);
MSL_INTEGER(int)
MSL_INTEGER(uint)
MSL_INTEGER(short)
MSL_INTEGER(ushort)
MSL_INTEGER(long)
MSL_INTEGER(ulong)
template <class T>
T select(T, T, bool);
float dot(float2, float2);
float dot(float3, float3);
float dot(float4, float4);
#define MSL_TEST(name) \
  bool name(float);    \
  bool name(half);     \
  bool name(bfloat);
MSL_TEST(isnan)
MSL_TEST(isinf)
MSL_TEST(isfinite)
MSL_TEST(signbit)

// ---- barriers and simdgroups: no bool, no 64 bits, no structures
enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

template <class T>
struct msl_lane_type {
  static constexpr bool value = false;
};
#define MSL_LANE_TYPE(T)                \
  template <>                           \
  struct msl_lane_type<T> {             \
    static constexpr bool value = true; \
  };
MSL_LANE_TYPE(float)
MSL_LANE_TYPE(half)
MSL_LANE_TYPE(bfloat)
MSL_LANE_TYPE(int)
MSL_LANE_TYPE(uint)
MSL_LANE_TYPE(short)
MSL_LANE_TYPE(ushort)
MSL_LANE_TYPE(signed char)
MSL_LANE_TYPE(char)
MSL_LANE_TYPE(uchar)
MSL_LANE_TYPE(float2)
MSL_LANE_TYPE(float4)
MSL_LANE_TYPE(half2)
MSL_LANE_TYPE(half4)
MSL_LANE_TYPE(int2)
MSL_LANE_TYPE(uint2)
template <class T>
using msl_lane = enable_if_t<msl_lane_type<T>::value, T>;

#define MSL_REDUCTION(name) \
  template <class T>        \
  msl_lane<T> name(T);
MSL_REDUCTION(simd_sum)
MSL_REDUCTION(simd_product)
MSL_REDUCTION(simd_max)
MSL_REDUCTION(simd_min)
MSL_REDUCTION(simd_and)
MSL_REDUCTION(simd_or)
MSL_REDUCTION(simd_xor)
MSL_REDUCTION(simd_broadcast_first)
MSL_REDUCTION(simd_prefix_inclusive_sum)
MSL_REDUCTION(simd_prefix_exclusive_sum)
MSL_REDUCTION(quad_sum)
#define MSL_SHUFFLE(name) \
  template <class T>      \
  msl_lane<T> name(T, ushort);
MSL_SHUFFLE(simd_shuffle)
MSL_SHUFFLE(simd_shuffle_xor)
MSL_SHUFFLE(simd_shuffle_up)
MSL_SHUFFLE(simd_shuffle_down)
MSL_SHUFFLE(simd_shuffle_rotate_up)
MSL_SHUFFLE(simd_shuffle_rotate_down)
MSL_SHUFFLE(simd_broadcast)
MSL_SHUFFLE(quad_shuffle_xor)
template <class T>
msl_lane<T> simd_shuffle_and_fill_up(T, T, ushort);
template <class T>
msl_lane<T> simd_shuffle_and_fill_down(T, T, ushort);
bool simd_all(bool);
bool simd_any(bool);
struct simd_vote {
  ulong bits;
  explicit operator ulong() const;
  bool all() const;
  bool any() const;
};
simd_vote simd_ballot(bool);

// ---- matrices
template <class T, int Rows = 8, int Columns = 8>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "Metal has 8x8 matrices only");
  static_assert(is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>, "Metal has matrices of floats only");
  simdgroup_matrix();
  explicit simdgroup_matrix(T);
  vec<T, 2>& thread_elements();
  const vec<T, 2>& thread_elements() const;
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int Rows, int Columns>
simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T);
#define MSL_MATRIX_MEMORY(SPACE)                                                                          \
  template <class T>                                                                                      \
  void simdgroup_load(simdgroup_matrix<T, 8, 8>&, const SPACE typename msl_itself<T>::type*, ulong = 8,   \
                      ulong2 = 0, bool = false);                                                          \
  template <class T>                                                                                      \
  void simdgroup_store(simdgroup_matrix<T, 8, 8>, SPACE typename msl_itself<T>::type*, ulong = 8,         \
                       ulong2 = 0, bool = false);
MSL_MATRIX_MEMORY(MSL_DEVICE)
MSL_MATRIX_MEMORY(MSL_THREADGROUP)
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>, simdgroup_matrix<B, 8, 8>,
                                   simdgroup_matrix<C, 8, 8>);
template <class D, class A, class B>
void simdgroup_multiply(simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>, simdgroup_matrix<B, 8, 8>);

// ---- atomics: float ones in device memory only, and without minimum, maximum or bits
enum memory_order { memory_order_relaxed };
template <class T>
struct atomic {
  T msl_value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
#define MSL_ATOMIC_FETCH(T, SPACE, name) T atomic_##name##_explicit(volatile SPACE atomic<T>*, T, memory_order);
#define MSL_ATOMIC_BASIC(T, SPACE)                                                                              \
  MSL_ATOMIC_FETCH(T, SPACE, fetch_add)                                                                         \
  MSL_ATOMIC_FETCH(T, SPACE, fetch_sub)                                                                         \
  MSL_ATOMIC_FETCH(T, SPACE, exchange)                                                                          \
  void atomic_store_explicit(volatile SPACE atomic<T>*, T, memory_order);                                       \
  T atomic_load_explicit(const volatile SPACE atomic<T>*, memory_order);                                        \
  bool atomic_compare_exchange_weak_explicit(volatile SPACE atomic<T>*, T*, T, memory_order, memory_order);
#define MSL_ATOMIC_INTEGER(T, SPACE)   \
  MSL_ATOMIC_BASIC(T, SPACE)           \
  MSL_ATOMIC_FETCH(T, SPACE, fetch_max) \
  MSL_ATOMIC_FETCH(T, SPACE, fetch_min) \
  MSL_ATOMIC_FETCH(T, SPACE, fetch_and) \
  MSL_ATOMIC_FETCH(T, SPACE, fetch_or)  \
  MSL_ATOMIC_FETCH(T, SPACE, fetch_xor)
MSL_ATOMIC_INTEGER(int, MSL_DEVICE)
MSL_ATOMIC_INTEGER(uint, MSL_DEVICE)
MSL_ATOMIC_INTEGER(int, MSL_THREADGROUP)
MSL_ATOMIC_INTEGER(uint, MSL_THREADGROUP)
MSL_ATOMIC_BASIC(float, MSL_DEVICE)
}  // namespace metal
using namespace metal;

template <class V, class... Parts>
V msl_vector(Parts...);

// ---- of MLX's prelude
template <typename T>
struct Limits {
  static constexpr MSL_CONSTANT T max = T();
  static constexpr MSL_CONSTANT T min = T();
  static constexpr MSL_CONSTANT T finite_max = T();
  static constexpr MSL_CONSTANT T finite_min = T();
};
template <typename T, typename U>
T ceildiv(T N, U M);

#define device MSL_DEVICE
#define constant MSL_CONSTANT
#define threadgroup MSL_THREADGROUP
#define thread
#define kernel
