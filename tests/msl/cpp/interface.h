// What a kernel, the runtime and Python share: a thread's own facts, a launch, and the calls a kernel makes.
// tests/msl/run.py mirrors MslBuffer, MslFinding and MslLaunch: change them together.
#pragma once
#include <stddef.h>
#include <stdint.h>

// What one GPU thread can ask about itself.
struct MslThread {
  uint32_t position_in_grid[3], position_in_group[3], group_position[3];
  uint32_t group_size[3];           // threads that this group really has: less at the grid's edge
  uint32_t dispatched_group_size[3];
  uint32_t grid_size[3], num_groups[3];
  uint32_t index_in_group, lane, simdgroup;
  uint32_t num_simdgroups, dispatched_simdgroups;
};

struct MslBuffer {
  void* base;
  uint64_t bytes;
  uint32_t item_size;
  uint32_t writable;  // an output
  const char* name;
  uint64_t read_bytes, written_bytes, unwritten;  // results
};

struct MslFinding {
  uint64_t address;  // of the code, from the start of the kernel's library; 0: unknown
  uint64_t repeats;  // the same again, at other threads or elements
  char text[368];
};

enum { MSL_MAX_FINDINGS = 16 };

struct MslLaunch {
  uint32_t grid[3], group[3];  // threads
  uint32_t order;              // 0 forward, 1 reverse, 2 shuffled
  uint32_t seed;
  uint32_t poison;             // byte that fills threadgroup memory before each group
  uint32_t flush;              // treat float subnormals as zero, as the GPU does
  uint32_t group_memory_limit; // bytes
  uint32_t timeout_ms;         // of CPU time
  uint32_t num_buffers, num_chosen;
  MslBuffer* buffers;          // one for each buffer argument of the kernel, in order
  const uint64_t* chosen;      // linear positions of the groups to run; null: all
  // results
  uint64_t barriers, collectives, accesses, group_memory;
  uint32_t num_findings, stopped;
  MslFinding findings[MSL_MAX_FINDINGS];
};

extern "C" {
extern MslThread* msl_self;
void msl_threadgroup_barrier(uint32_t flags, int line);
void msl_simdgroup_barrier(uint32_t flags, int line);
// Leave `bytes` bytes, wait for the whole simdgroup, and get the 32 slots, MSL_SLOT bytes apart.
const char* msl_exchange(int operation, const void* value, uint32_t bytes, int line, uint32_t* active);
void* msl_group_variable(int site, const char* name, uint32_t bytes, uint32_t item_size);
void msl_atomic(const volatile void* place, uint32_t bytes, bool reads, bool writes, void* code);
void msl_fail(const char* what, int line);
int msl_run(MslLaunch* launch, void (*entry)(void** arguments, MslThread* thread));
}
enum { MSL_SLOT = 64, MSL_LANES = 32 };
