// The calls that -fsanitize=thread and -fsanitize=undefined put into a kernel arrive here, not in the
// sanitizers' own runtimes: every plain load and store, and every operation that C++ leaves undefined.
#include <string.h>

#include "state.h"

using namespace msl;

#define CODE() (uint64_t(__builtin_return_address(0)) - 1)

// `typed`: the compiler relies on the alignment of the size.
static inline __attribute__((always_inline)) void on_access(const volatile void* place, size_t bytes, bool write, bool typed,
                                                            uint64_t code) {
  if (!run.current) return;
  run.launch->accesses++;
  if (__builtin_expect(run.expired, 0)) report_timeout();
  const char* start = (const char*)place;
  if (size_t(start - run.current_stack) < kStackBytes) return;
  check_access(start, uint32_t(bytes), write, typed, code);
}

extern "C" {
#define READ_WRITE(N)                                                                             \
  void __tsan_read##N(void* p) { on_access(p, N, false, true, CODE()); }                          \
  void __tsan_write##N(void* p) { on_access(p, N, true, true, CODE()); }                          \
  void __tsan_unaligned_read##N(void* p) { on_access(p, N, false, false, CODE()); }               \
  void __tsan_unaligned_write##N(void* p) { on_access(p, N, true, false, CODE()); }               \
  void __tsan_read_write##N(void* p) {                                                            \
    on_access(p, N, false, true, CODE());                                                         \
    on_access(p, N, true, true, CODE());                                                          \
  }                                                                                               \
  void __tsan_unaligned_read_write##N(void* p) {                                                  \
    on_access(p, N, false, false, CODE());                                                        \
    on_access(p, N, true, false, CODE());                                                         \
  }
READ_WRITE(1)
READ_WRITE(2)
READ_WRITE(4)
READ_WRITE(8)
READ_WRITE(16)
void __tsan_read_range(void* p, size_t n) { on_access(p, n, false, false, CODE()); }
void __tsan_write_range(void* p, size_t n) { on_access(p, n, true, false, CODE()); }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
void* __tsan_memcpy(void* to, const void* from, size_t n) {
  on_access(from, n, false, false, CODE());
  on_access(to, n, true, false, CODE());
  return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, size_t n) {
  on_access(from, n, false, false, CODE());
  on_access(to, n, true, false, CODE());
  return memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, size_t n) {
  on_access(to, n, true, false, CODE());
  return memset(to, value, n);
}

struct Place {  // how the data of each check begins
  const char* file;
  uint32_t line, column;
};
#define UNDEFINED(name, says)                                                                                     \
  void __ubsan_handle_##name(Place* place, void*, void*) {                                                        \
    report(CODE(), true, "UNDEFINED BEHAVIOUR: " says " (line %u) by thread %u of group %u", place->line,         \
           run.current ? run.current->self.index_in_group : 0, run.group);                                        \
  }                                                                                                               \
  void __ubsan_handle_##name##_abort(Place* place, void* a, void* b) { __ubsan_handle_##name(place, a, b); }
UNDEFINED(type_mismatch_v1, "misaligned or null pointer")
UNDEFINED(add_overflow, "signed addition overflows")
UNDEFINED(sub_overflow, "signed subtraction overflows")
UNDEFINED(mul_overflow, "signed multiplication overflows")
UNDEFINED(negate_overflow, "negation overflows")
UNDEFINED(divrem_overflow, "integer division by zero or overflow")
UNDEFINED(shift_out_of_bounds, "shift out of range")
UNDEFINED(out_of_bounds, "index out of a fixed array")
UNDEFINED(builtin_unreachable, "unreachable code reached")
UNDEFINED(missing_return, "function ends without a value")
UNDEFINED(float_cast_overflow, "float does not fit the integer")
UNDEFINED(load_invalid_value, "value is not one of its type")
UNDEFINED(pointer_overflow, "pointer arithmetic overflows")
UNDEFINED(vla_bound_not_positive, "array of no length")
}
