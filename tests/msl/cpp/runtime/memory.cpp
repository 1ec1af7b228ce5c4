// Knows what each address is: a buffer, a threadgroup variable, a thread's own stack, or nothing; and what
// happened to each element: written or not, by whom, and which barriers lie between.
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "state.h"

namespace msl {
namespace {
constexpr uint32_t kNobody = ~0u;

struct Stamp {  // who touched an element, and when
  uint32_t thread = kNobody, group = 0, epoch = 0, simd_epoch = 0;
};

// The last write, the last atomic access, and two readers: of different simdgroups where there were several,
// so that a writer of either simdgroup meets a stranger.
struct Cell {
  Stamp write, atomic, first_read, other_read;
  uint32_t initialised = 0;
};

struct GroupVariable {
  int site;
  char* base;
  uint32_t bytes, item_size;
  const char* name;
  std::vector<Cell> cells;
};

// Each threadgroup variable lies in the middle of its own slot: a stray index cannot land in another.
constexpr size_t kSlotBytes = 256 * 1024, kSlots = 64, kLargest = 64 * 1024;
char* arena = nullptr;
std::vector<GroupVariable> variables;
std::vector<std::vector<Cell>> buffer_cells;
uint32_t last_buffer = 0;

struct Moment {  // the access that is being judged
  Stamp stamp;
  const char* name;
  bool device;
  uint64_t code;
};

bool same_simdgroup(const Stamp& a, const Stamp& b) {
  return a.group == b.group && a.thread / MSL_LANES == b.thread / MSL_LANES;
}

bool ordered(const Stamp& before, const Stamp& now) {
  if (before.thread == kNobody) return true;
  if (before.group != now.group) return false;
  if (before.thread == now.thread || before.epoch < now.epoch) return true;
  return same_simdgroup(before, now) && before.simd_epoch < now.simd_epoch;
}

bool races(const Stamp& before, const Moment& now, const char* what, uint64_t index) {
  if (ordered(before, now.stamp)) return false;
  if (before.group != now.stamp.group)
    report(now.code, false, "RACE %s on %s[%llu]: thread %u of group %u, and thread %u of group %u; groups have no order",
           what, now.name, (unsigned long long)index, now.stamp.thread, now.stamp.group, before.thread, before.group);
  else
    report(now.code, false, "RACE %s on %s[%llu]: threads %u and %u of group %u, no barrier between", what, now.name,
           (unsigned long long)index, now.stamp.thread, before.thread, run.group);
  return true;
}

void note_read(Cell& cell, const Moment& now, uint64_t index) {
  races(cell.write, now, "read after write", index) || races(cell.atomic, now, "read beside an atomic", index);
  const Stamp& first = cell.first_read;
  if (first.thread == kNobody || first.thread == now.stamp.thread || ordered(first, now.stamp))
    cell.first_read = now.stamp;
  else if (!same_simdgroup(first, now.stamp) || ordered(cell.other_read, now.stamp) ||
           same_simdgroup(first, cell.other_read))
    cell.other_read = now.stamp;
}

void note_write(Cell& cell, const Moment& now, uint64_t index) {
  races(cell.write, now, "write after write", index) || races(cell.first_read, now, "write after read", index) ||
      races(cell.other_read, now, "write after read", index) || races(cell.atomic, now, "write beside an atomic", index);
  cell.write = now.stamp;
}

void note_atomic(Cell& cell, const Moment& now, uint64_t index) {
  races(cell.write, now, "atomic after write", index) || races(cell.first_read, now, "atomic after read", index) ||
      races(cell.other_read, now, "atomic after read", index);
  cell.atomic = now.stamp;
}

struct Access {
  const char* place;
  uint32_t bytes;
  bool reads, writes, atomic, typed;
  uint64_t code;
  const char* verb() const { return writes ? "write" : "read"; }
};

Stamp stamp_now(bool device) {
  const MslThread& self = run.current->self;
  const Epochs& simd = run.simdgroups[self.simdgroup].epochs;
  Stamp stamp;
  stamp.thread = self.index_in_group;
  stamp.group = device ? run.group : 0;
  stamp.epoch = device ? run.epochs.device : run.epochs.threadgroup;
  stamp.simd_epoch = device ? simd.device : simd.threadgroup;
  return stamp;
}

void touch(Cell& cell, const Access& access, const Moment& now, uint64_t index, uint32_t generation) {
  if (access.reads && cell.initialised != generation)
    report(access.code, false, "UNINITIALISED read of %s %s[%llu] by thread %u of group %u",
           now.device ? "output" : "threadgroup", now.name, (unsigned long long)index, now.stamp.thread, run.group);
  if (access.atomic)
    note_atomic(cell, now, index);
  else if (access.writes)
    note_write(cell, now, index);
  else
    note_read(cell, now, index);
  cell.initialised = generation;
}

// The compiler took the address for a multiple of the size.
void check_alignment(const Access& access, const char* base, const char* name) {
  if (access.typed && uint64_t(access.place) % access.bytes)
    report(access.code, false, "MISALIGNED access of %u bytes at %s, byte %lld", access.bytes, name,
           (long long)(access.place - base));
}

void check_group_memory(const Access& access) {
  const size_t slot = size_t(access.place - arena) / kSlotBytes;
  const uint32_t thread = run.current->self.index_in_group;
  if (slot >= variables.size()) {
    report(access.code, true, "OUT OF BOUNDS threadgroup %s of %u bytes, at no variable, by thread %u of group %u",
           access.verb(), access.bytes, thread, run.group);
    return;
  }
  GroupVariable& variable = variables[slot];
  const int64_t start = access.place - variable.base;
  if (start < 0 || start + access.bytes > variable.bytes) {
    report(access.code, true, "OUT OF BOUNDS threadgroup %s of %u bytes at byte %lld of %s (%u bytes) by thread %u of group %u",
           access.verb(), access.bytes, (long long)start, variable.name, variable.bytes, thread, run.group);
    return;
  }
  check_alignment(access, variable.base, variable.name);
  const Moment now{stamp_now(false), variable.name, false, access.code};
  const uint64_t last = (start + access.bytes - 1) / variable.item_size;
  for (uint64_t i = start / variable.item_size; i <= last; i++) touch(variable.cells[i], access, now, i, run.generation);
}

void check_buffer(const Access& access, uint32_t which) {
  MslBuffer& buffer = run.launch->buffers[which];
  const char* base = static_cast<char*>(buffer.base);
  const int64_t start = access.place - base, item = buffer.item_size;
  const int64_t element = start >= 0 ? start / item : -((item - 1 - start) / item);
  const uint32_t thread = run.current->self.index_in_group;
  if (start < 0 || uint64_t(start) + access.bytes > buffer.bytes) {
    report(access.code, true, "OUT OF BOUNDS device %s of %u bytes at %s[%lld] (%llu elements) by thread %u of group %u",
           access.verb(), access.bytes, buffer.name, (long long)element, (unsigned long long)(buffer.bytes / item), thread,
           run.group);
    return;
  }
  check_alignment(access, base, buffer.name);
  if (access.reads) buffer.read_bytes += access.bytes;
  if (access.writes) buffer.written_bytes += access.bytes;
  if (!buffer.writable) {
    if (access.writes)
      report(access.code, true, "WRITE to input %s[%lld] by thread %u of group %u", buffer.name, (long long)element, thread,
             run.group);
    return;
  }
  const Moment now{stamp_now(true), buffer.name, true, access.code};
  const uint64_t last = (start + access.bytes - 1) / item;
  for (uint64_t i = start / item; i <= last; i++) touch(buffer_cells[which][i], access, now, i, 1);
}

bool near_buffer(const char* place, uint32_t which) {
  constexpr int64_t kReach = int64_t(1) << 29;  // half of what Python leaves free between two buffers
  const MslBuffer& buffer = run.launch->buffers[which];
  const char* base = static_cast<char*>(buffer.base);
  return place >= base - kReach && place < base + buffer.bytes + kReach;
}

bool is_runtime_data(const char* place) {
  auto within = [place](const void* from, const void* to) { return place >= from && place < to; };
  return within((void*)run.library_start, (void*)run.library_end) ||  // constants of the kernel
         within(run.simdgroups.data(), run.simdgroups.data() + run.simdgroups.size()) ||
         within(run.fibers.data(), run.fibers.data() + run.fibers.size());
}

void judge(const Access& access) {
  if (access.place >= arena && access.place < arena + kSlots * kSlotBytes) return check_group_memory(access);
  if (last_buffer < run.launch->num_buffers && near_buffer(access.place, last_buffer))
    return check_buffer(access, last_buffer);
  for (uint32_t which = 0; which < run.launch->num_buffers; which++)
    if (near_buffer(access.place, which)) {
      last_buffer = which;
      return check_buffer(access, which);
    }
  uint32_t owner;
  bool guard;
  const uint32_t thread = run.current->self.index_in_group;
  if (stack_owner(access.place, &owner, &guard))
    report(access.code, true, "THREAD MEMORY of thread %u touched by thread %u of group %u", owner, thread, run.group);
  else if (!is_runtime_data(access.place))
    report(access.code, true, "WILD %s of %u bytes at %p by thread %u of group %u", access.verb(), access.bytes,
           (const void*)access.place, thread, run.group);
}
}  // namespace

void reset_memory() {
  if (!arena) {
    void* got = mmap(nullptr, kSlots * kSlotBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) __builtin_trap();
    arena = static_cast<char*>(got);
  }
  variables.clear();
  buffer_cells.assign(run.launch->num_buffers, {});
  for (uint32_t i = 0; i < run.launch->num_buffers; i++) {
    const MslBuffer& buffer = run.launch->buffers[i];
    if (buffer.writable) buffer_cells[i].resize(buffer.bytes / buffer.item_size);
  }
}

void start_group_memory() {
  run.generation++;
  for (GroupVariable& variable : variables) memset(variable.base, int(run.launch->poison), variable.bytes);
}

void finish_memory() {
  for (uint32_t i = 0; i < run.launch->num_buffers; i++) {
    uint64_t unwritten = 0;
    for (const Cell& cell : buffer_cells[i]) unwritten += !cell.initialised;
    run.launch->buffers[i].unwritten = unwritten;
  }
  buffer_cells.clear();
}

void check_access(const char* place, uint32_t bytes, bool write, bool typed, uint64_t code) {
  run.busy = 1;
  judge({place, bytes, !write, write, false, typed, code});
  run.busy = 0;
}
}  // namespace msl

extern "C" void msl_atomic(const volatile void* place, uint32_t bytes, bool reads, bool writes, void* code) {
  using namespace msl;
  run.launch->accesses++;
  if (__builtin_expect(run.expired, 0)) report_timeout();
  run.busy = 1;
  judge({(const char*)place, bytes, reads, writes, true, true, uint64_t(code) - 1});
  run.busy = 0;
}

extern "C" void* msl_group_variable(int site, const char* name, uint32_t bytes, uint32_t item_size) {
  using namespace msl;
  for (const GroupVariable& variable : variables)
    if (variable.site == site) return variable.base;
  run.busy = 1;
  if (bytes > kLargest || variables.size() == kSlots)
    report(0, true, "THREADGROUP MEMORY: %s of %u bytes; the limit is %u", name, bytes, run.launch->group_memory_limit);
  char* base = arena + variables.size() * kSlotBytes + kSlotBytes / 2;
  variables.push_back({site, base, bytes, item_size, name, std::vector<Cell>((bytes + item_size - 1) / item_size)});
  memset(base, int(run.launch->poison), bytes);
  uint64_t total = 0;
  for (const GroupVariable& variable : variables) total += (variable.bytes + 15) & ~15u;
  if (total > run.launch->group_memory) run.launch->group_memory = total;
  if (total > run.launch->group_memory_limit)
    report(0, true, "THREADGROUP MEMORY: %llu bytes with %s; the limit is %u", (unsigned long long)total, name,
           run.launch->group_memory_limit);
  run.busy = 0;
  return base;
}
