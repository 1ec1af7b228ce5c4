// Runs a launch: its groups one after the other, the threads of a group in turns, in one of three orders.
#include <link.h>
#include <stdarg.h>
#include <stdio.h>
#include <xmmintrin.h>

#include <utility>

#include "state.h"

namespace msl {
Run run;

namespace {
enum Order : uint32_t { kForward, kReverse, kShuffled };

struct Random {  // xorshift
  uint64_t state;
  uint32_t below(uint64_t limit) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return uint32_t((state >> 16) % limit);
  }
  template <class T>
  void shuffle(std::vector<T>& items) {
    for (size_t i = items.size(); i > 1; i--) std::swap(items[i - 1], items[below(i)]);
  }
};

template <class T>
std::vector<T> positions(uint64_t count, uint32_t order) {
  std::vector<T> result(count);
  for (uint64_t i = 0; i < count; i++) result[i] = T(order == kReverse ? count - 1 - i : i);
  return result;
}

// Finds where the kernel's library lies in memory.
int find_library(dl_phdr_info* info, size_t, void* code) {
  uint64_t lowest = ~0ull, highest = 0;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type != PT_LOAD) continue;
    const uint64_t start = info->dlpi_addr + header.p_vaddr, end = start + header.p_memsz;
    if (start < lowest) lowest = start;
    if (end > highest) highest = end;
  }
  if (uint64_t(code) < lowest || uint64_t(code) >= highest) return 0;
  run.library_start = lowest;
  run.library_end = highest;
  return 1;
}

struct Groups {
  uint32_t count[3];
  uint64_t total() const { return uint64_t(count[0]) * count[1] * count[2]; }
};

void lay_out_group(const Groups& groups, uint64_t which) {
  const MslLaunch& launch = *run.launch;
  run.group = uint32_t(which);
  const uint32_t at[3] = {uint32_t(which % groups.count[0]), uint32_t(which / groups.count[0] % groups.count[1]),
                          uint32_t(which / groups.count[0] / groups.count[1])};
  uint32_t size[3];
  for (int k = 0; k < 3; k++) {
    const uint32_t left = launch.grid[k] - at[k] * launch.group[k];
    size[k] = left < launch.group[k] ? left : launch.group[k];
  }
  run.num_threads = size[0] * size[1] * size[2];
  const uint32_t num_simdgroups = (run.num_threads + MSL_LANES - 1) / MSL_LANES;
  run.simdgroups.assign(num_simdgroups, Simdgroup());
  for (uint32_t i = 0; i < run.num_threads; i++) {
    Fiber& fiber = run.fibers[i];
    MslThread& self = fiber.self;
    const uint32_t inside[3] = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
    for (int k = 0; k < 3; k++) {
      self.position_in_group[k] = inside[k];
      self.group_position[k] = at[k];
      self.position_in_grid[k] = at[k] * launch.group[k] + inside[k];
      self.group_size[k] = size[k];
      self.dispatched_group_size[k] = launch.group[k];
      self.grid_size[k] = launch.grid[k];
      self.num_groups[k] = groups.count[k];
    }
    self.index_in_group = i;
    self.lane = i % MSL_LANES;
    self.simdgroup = i / MSL_LANES;
    self.num_simdgroups = num_simdgroups;
    self.dispatched_simdgroups = (launch.group[0] * launch.group[1] * launch.group[2] + MSL_LANES - 1) / MSL_LANES;
    run.simdgroups[self.simdgroup].num_lanes++;
    prepare(fiber, i);
  }
  run.num_at_barrier = run.num_done = 0;
  run.epochs.device++;
  run.epochs.threadgroup++;
  start_group_memory();
}

const char* doing(const Fiber& fiber) {
  switch (fiber.state) {
    case State::kInCollective: return "waits in a simdgroup operation";
    case State::kAtBarrier: return "waits at threadgroup_barrier";
    case State::kDone: return "returned";
    default: return "is ready";
  }
}

// Nobody can go on: name a thread that waits, and one that it waits for.
void report_deadlock() {
  uint32_t waiting = 0;
  while (waiting + 1 < run.num_threads && run.fibers[waiting].state == State::kDone) waiting++;
  const Fiber& one = run.fibers[waiting];
  uint32_t other = waiting;
  for (uint32_t i = 0; i < run.num_threads; i++)
    if (run.fibers[i].state != one.state || run.fibers[i].line != one.line) other = i;
  report(0, true, "DIVERGENCE in group %u: thread %u %s (line %d), thread %u %s (line %d); %u of %u threads returned",
         run.group, waiting, doing(one), one.line, other, doing(run.fibers[other]), run.fibers[other].line, run.num_done,
         run.num_threads);
}

void run_group(Random& random) {
  std::vector<uint32_t> order = positions<uint32_t>(run.num_threads, run.launch->order);
  while (run.num_done < run.num_threads && !run.launch->stopped) {
    if (run.launch->order == kShuffled) random.shuffle(order);
    bool moved = false;
    for (uint32_t thread : order) {
      if (run.fibers[thread].state != State::kReady) continue;
      moved = true;
      resume(run.fibers[thread]);
      if (run.launch->stopped) return;
    }
    if (!moved) return report_deadlock();
  }
}

void run_groups() {
  const MslLaunch& launch = *run.launch;
  Groups groups;
  for (int k = 0; k < 3; k++) groups.count[k] = (launch.grid[k] + launch.group[k] - 1) / launch.group[k];
  Random random{0x9E3779B97F4A7C15ull ^ (uint64_t(launch.seed) * 0xD1342543DE82EF95ull) ^ 1};
  std::vector<uint64_t> order = positions<uint64_t>(launch.chosen ? launch.num_chosen : groups.total(), launch.order);
  if (launch.order == kShuffled) random.shuffle(order);
  for (uint64_t i : order) {
    lay_out_group(groups, launch.chosen ? launch.chosen[i] : i);
    run_group(random);
    if (launch.stopped) return;
  }
}
}  // namespace

void report(uint64_t code, bool fatal, const char* format, ...) {
  MslLaunch& launch = *run.launch;
  static const char* formats[MSL_MAX_FINDINGS];
  static uint64_t codes[MSL_MAX_FINDINGS];
  for (uint32_t i = 0; i < launch.num_findings && !fatal; i++)
    if (codes[i] == code && formats[i] == format) {
      launch.findings[i].repeats++;
      return;
    }
  if (launch.num_findings < MSL_MAX_FINDINGS) {
    codes[launch.num_findings] = code;
    formats[launch.num_findings] = format;
    MslFinding& finding = launch.findings[launch.num_findings++];
    va_list values;
    va_start(values, format);
    vsnprintf(finding.text, sizeof finding.text, format, values);
    va_end(values);
    finding.address = code >= run.library_start && code < run.library_end ? code - run.library_start : 0;
  }
  if (!fatal && launch.num_findings < MSL_MAX_FINDINGS) return;
  launch.stopped = 1;
  if (run.current) abandon();
}
}  // namespace msl

extern "C" int msl_run(MslLaunch* launch, void (*entry)(void**, MslThread*)) {
  using namespace msl;
  run = Run();
  run.launch = launch;
  run.entry = entry;
  for (uint32_t i = 0; i < launch->num_buffers; i++) run.arguments.push_back(launch->buffers[i].base);
  dl_iterate_phdr(find_library, (void*)entry);
  reset_memory();
  run.fibers.assign(launch->group[0] * launch->group[1] * launch->group[2], Fiber());
  constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  const unsigned control = _mm_getcsr();
  {
    Guards guards;
    if (launch->flush) _mm_setcsr(control | kFlushToZero | kDenormalsAreZero);
    run_groups();
    _mm_setcsr(control);
  }
  finish_memory();
  return int(launch->num_findings);
}
