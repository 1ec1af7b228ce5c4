// The state of the launch that runs. One launch at a time in a process: Python holds a lock.
#pragma once
#include <vector>

#include "../interface.h"

namespace msl {
constexpr uint32_t kMaxThreads = 1024;
constexpr size_t kStackBytes = 96 * 1024;
constexpr size_t kGuardBytes = 4096;  // never readable: a stack that overflows ends here

enum MemFlags : uint32_t { kDevice = 1, kThreadgroup = 2 };
enum class State : uint8_t { kReady, kInCollective, kAtBarrier, kDone };

struct Fiber {  // one GPU thread
  MslThread self;
  void* stack_pointer;
  char* stack;
  State state;
  int operation, line;  // where it waits
  uint32_t flags;
};

// Counts the barriers that order device or threadgroup memory. Two accesses of equal epochs are unordered.
struct Epochs {
  uint32_t device = 1, threadgroup = 1;
};

struct Simdgroup {
  char slots[2][MSL_LANES * MSL_SLOT];
  uint32_t parity = 0, arrived[2] = {0, 0};
  uint32_t num_lanes = 0, num_done = 0, num_waiting = 0;
  Epochs epochs;
};

struct Run {
  MslLaunch* launch = nullptr;
  void (*entry)(void**, MslThread*) = nullptr;
  std::vector<void*> arguments;
  Fiber* current = nullptr;
  char* current_stack = nullptr;
  void* main_stack_pointer = nullptr;
  std::vector<Fiber> fibers;
  std::vector<Simdgroup> simdgroups;
  uint32_t num_threads = 0, num_at_barrier = 0, num_done = 0;
  uint32_t group = 0;  // linear position
  Epochs epochs;
  uint32_t generation = 1;  // of threadgroup memory: one more for each group
  volatile int expired = 0;
  volatile int busy = 0;  // the runtime holds something that a signal must not cut
  uint64_t library_start = 0, library_end = 0;
};
extern Run run;

// Notes a finding at the code address `code` (0: unknown). A fatal one ends the launch and does not return.
void report(uint64_t code, bool fatal, const char* format, ...) __attribute__((format(printf, 3, 4)));
void report_timeout();

// fibers.cpp
char* stack_of(uint32_t thread);
bool stack_owner(const char* place, uint32_t* thread, bool* guard);
void prepare(Fiber& fiber, uint32_t thread);
void resume(Fiber& fiber);
void suspend();
[[noreturn]] void abandon();

// memory.cpp
void reset_memory();
void start_group_memory();
void finish_memory();
void check_access(const char* place, uint32_t bytes, bool write, bool typed, uint64_t code);

// signals.cpp
struct Guards {  // crash handlers and the timer, while it lives
  Guards();
  ~Guards();
};
}  // namespace msl
