// Crashes and endless loops become findings.
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "state.h"

#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif

namespace msl {
namespace {
constexpr int kCrashes[4] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
struct sigaction old_crash[4], old_alarm;
stack_t old_stack;
timer_t timer;
char* signal_stack = nullptr;
constexpr size_t kSignalStack = 65536;

// The first tick raises a flag at which every load and store looks; a loop without any is cut at the next.
void on_alarm(int) {
  if (!run.current) return;
  if (!run.expired)
    run.expired = 1;
  else if (!run.busy)
    report_timeout();
}

void on_crash(int signal_number, siginfo_t* info, void*) {
  if (!run.current) {  // not ours
    signal(signal_number, SIG_DFL);
    return;
  }
  const uint32_t thread = run.current->self.index_in_group;
  uint32_t owner;
  bool guard;
  if (stack_owner(static_cast<char*>(info->si_addr), &owner, &guard) && guard)
    report(0, true, "THREAD STACK overflow in thread %u of group %u (%zu bytes)", thread, run.group, kStackBytes);
  report(0, true, "CRASH: %s at address %p in thread %u of group %u", strsignal(signal_number), info->si_addr, thread,
         run.group);
}
}  // namespace

void report_timeout() {
  report(0, true, "TIMEOUT: thread %u of group %u still runs after %u ms", run.current->self.index_in_group, run.group,
         run.launch->timeout_ms);
}

Guards::Guards() {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_handler = on_alarm;
  action.sa_flags = SA_ONSTACK | SA_NODEFER | SA_RESTART;  // the handler may leave for another stack: the signal stays open
  sigaction(SIGVTALRM, &action, &old_alarm);
  if (!signal_stack) signal_stack = static_cast<char*>(malloc(kSignalStack));
  stack_t stack = {};
  stack.ss_sp = signal_stack;
  stack.ss_size = kSignalStack;
  sigaltstack(&stack, &old_stack);
  memset(&action, 0, sizeof action);
  action.sa_sigaction = on_crash;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < 4; i++) sigaction(kCrashes[i], &action, &old_crash[i]);

  sigevent event = {};
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = SIGVTALRM;
  event.sigev_notify_thread_id = pid_t(syscall(SYS_gettid));
  timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer);
  itimerspec when = {};
  when.it_value.tv_sec = run.launch->timeout_ms / 1000;
  when.it_value.tv_nsec = long(run.launch->timeout_ms % 1000) * 1000000;
  when.it_interval.tv_nsec = 200000000;
  timer_settime(timer, 0, &when, nullptr);
}

Guards::~Guards() {
  timer_delete(timer);
  sigaction(SIGVTALRM, &old_alarm, nullptr);
  for (int i = 0; i < 4; i++) sigaction(kCrashes[i], &old_crash[i], nullptr);
  if (!old_stack.ss_sp) old_stack.ss_flags = SS_DISABLE;
  sigaltstack(&old_stack, nullptr);
}
}  // namespace msl
