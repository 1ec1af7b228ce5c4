// Barriers, and the exchange on which every simdgroup operation stands.
#include <string.h>

#include "state.h"

MslThread* msl_self = nullptr;

namespace msl {
namespace {
uint64_t caller(void* address) { return uint64_t(address) - 1; }

void release_barrier() {
  uint32_t flags = kDevice | kThreadgroup;
  for (uint32_t i = 0; i < run.num_threads; i++) flags &= run.fibers[i].flags;
  if (flags & kThreadgroup) run.epochs.threadgroup++;
  if (flags & kDevice) run.epochs.device++;
  run.num_at_barrier = 0;
  for (uint32_t i = 0; i < run.num_threads; i++) run.fibers[i].state = State::kReady;
}

// All lanes that still run have arrived: let them go on. The last to arrive does not wait at all.
void release_simdgroup(Simdgroup& simd, const Fiber& last, uint64_t code) {
  const uint32_t first = last.self.simdgroup * MSL_LANES;
  for (uint32_t lane = 0; lane < simd.num_lanes; lane++) {
    Fiber& other = run.fibers[first + lane];
    if (other.state == State::kDone) {
      report(code, false, "SIMD DIVERGENCE: operation at line %d after lane %u of simdgroup %u returned", last.line, lane,
             last.self.simdgroup);
      continue;
    }
    if (&other != &last && (other.line != last.line || other.operation != last.operation))
      report(code, true, "SIMD DIVERGENCE: lane %u is at line %d, lane %u at line %d (operations %d and %d)", last.self.lane,
             last.line, lane, other.line, last.operation, other.operation);
    other.state = State::kReady;
  }
  simd.num_waiting = 0;
  simd.parity ^= 1;
  simd.arrived[simd.parity] = 0;
}
}  // namespace
}  // namespace msl

using namespace msl;

extern "C" {
void msl_fail(const char* what, int line) {
  const MslThread& self = run.current->self;
  report(caller(__builtin_return_address(0)), true, "%s (line %d) by thread %u of group %u", what, line, self.index_in_group,
         run.group);
}

void msl_threadgroup_barrier(uint32_t flags, int line) {
  Fiber* fiber = run.current;
  fiber->state = State::kAtBarrier;
  fiber->line = line;
  fiber->flags = flags;
  run.num_at_barrier++;
  if (run.num_at_barrier == run.num_threads) {
    for (uint32_t i = 0; i < run.num_threads; i++)
      if (run.fibers[i].line != line)
        report(caller(__builtin_return_address(0)), true, "BARRIER DIVERGENCE: thread %u waits at line %d, thread %u at line %d",
               fiber->self.index_in_group, line, i, run.fibers[i].line);
    run.launch->barriers++;
    release_barrier();
  }
  suspend();
}

void msl_simdgroup_barrier(uint32_t flags, int line) {
  enum { kArrive = -1, kLeave = -2 };
  uint32_t active;
  const char nothing = 0;
  msl_exchange(kArrive, &nothing, 1, line, &active);
  const MslThread& self = run.current->self;
  if (self.lane == uint32_t(__builtin_ctz(active))) {  // every lane passes here, one counts
    Epochs& epochs = run.simdgroups[self.simdgroup].epochs;
    if (flags & kThreadgroup) epochs.threadgroup++;
    if (flags & kDevice) epochs.device++;
  }
  msl_exchange(kLeave, &nothing, 1, line, &active);
}

const char* msl_exchange(int operation, const void* value, uint32_t bytes, int line, uint32_t* active) {
  Fiber* fiber = run.current;
  Simdgroup& simd = run.simdgroups[fiber->self.simdgroup];
  const uint32_t parity = simd.parity;  // two sets of slots: a fast lane may leave its next value before a slow one reads
  memcpy(simd.slots[parity] + fiber->self.lane * MSL_SLOT, value, bytes);
  simd.arrived[parity] |= 1u << fiber->self.lane;
  fiber->operation = operation;
  fiber->line = line;
  simd.num_waiting++;
  if (simd.num_waiting == simd.num_lanes - simd.num_done) {
    release_simdgroup(simd, *fiber, caller(__builtin_return_address(0)));
    if (operation >= 0) run.launch->collectives++;
  } else {
    fiber->state = State::kInCollective;
    suspend();
  }
  *active = simd.arrived[parity];
  return simd.slots[parity];
}
}
