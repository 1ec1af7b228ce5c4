// One stack a GPU thread, and the switch between them. x86-64 System V only.
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "state.h"

#if !defined(__x86_64__)
#error "the switch between threads is written for x86-64"
#endif

// Saves the callee-saved registers and the stack pointer, loads the other's.
extern "C" void msl_switch(void** saved, void* loaded) __attribute__((visibility("hidden")));
asm(R"(
.text
.p2align 4
.hidden msl_switch
.globl msl_switch
.type msl_switch,@function
msl_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size msl_switch,.-msl_switch
)");

namespace msl {
namespace {
constexpr size_t kStride = kStackBytes + kGuardBytes;
char* stacks = nullptr;
uint32_t num_opened = 0;

void start() {
  run.entry(run.arguments.data(), &run.current->self);
  Fiber* fiber = run.current;
  fiber->state = State::kDone;
  run.num_done++;
  run.simdgroups[fiber->self.simdgroup].num_done++;
  abandon();
}
}  // namespace

char* stack_of(uint32_t thread) {
  if (!stacks) {
    void* got = mmap(nullptr, kStride * kMaxThreads, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) abort();
    stacks = static_cast<char*>(got);
  }
  for (; num_opened <= thread; num_opened++)
    if (mprotect(stacks + num_opened * kStride + kGuardBytes, kStackBytes, PROT_READ | PROT_WRITE)) abort();
  return stacks + thread * kStride + kGuardBytes;
}

bool stack_owner(const char* place, uint32_t* thread, bool* guard) {
  if (!stacks || place < stacks || place >= stacks + kStride * kMaxThreads) return false;
  *thread = uint32_t((place - stacks) / kStride);
  *guard = size_t(place - stacks) % kStride < kGuardBytes;
  return true;
}

void prepare(Fiber& fiber, uint32_t thread) {
  fiber.stack = stack_of(thread);
  uint64_t* top = reinterpret_cast<uint64_t*>(fiber.stack + kStackBytes - 64);
  *--top = 0;  // in place of a return address: keeps the alignment that the ABI asks for
  *--top = reinterpret_cast<uint64_t>(&start);
  top -= 6;
  memset(top, 0, 6 * sizeof *top);
  fiber.stack_pointer = top;
  fiber.state = State::kReady;
}

void resume(Fiber& fiber) {
  run.current = &fiber;
  run.current_stack = fiber.stack;
  msl_self = &fiber.self;
  msl_switch(&run.main_stack_pointer, fiber.stack_pointer);
  run.current = nullptr;
  run.current_stack = nullptr;
}

void suspend() {
  Fiber* fiber = run.current;
  if (__builtin_expect(run.expired, 0)) report_timeout();
  msl_switch(&fiber->stack_pointer, run.main_stack_pointer);
}

void abandon() {
  void* unused;
  run.current->state = State::kDone;
  msl_switch(&unused, run.main_stack_pointer);
  abort();
}
}  // namespace msl
