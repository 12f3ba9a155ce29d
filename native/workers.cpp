#include "workers.h"

#include <chrono>

namespace qkv {

namespace {

// About what a step's own pauses take: sampling between two steps, a straggler within one.
constexpr auto SPIN = std::chrono::microseconds(200);

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Workers::Workers(int count) : count_(count < 1 ? 1 : count) {
  for (int thread = 1; thread < count_; thread++) threads_.emplace_back([this, thread] { serve(thread); });
}

Workers::~Workers() {
  ending_ = true;
  started_.fetch_add(1, std::memory_order_release);
  started_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Workers::run(const std::function<void(int)>& job) {
  job_ = &job;
  started_.fetch_add(1, std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_seq_cst) != 0) started_.notify_all();
  job(0);
  meet([] {});
}

void Workers::serve(int thread) {
  for (unsigned seen = 0;;) {
    wait(started_, seen);
    seen = started_.load(std::memory_order_acquire);
    if (ending_) return;
    (*job_)(thread);
    meet([] {});
  }
}

void Workers::wait(std::atomic<unsigned>& what, unsigned old) {
  const auto end = std::chrono::steady_clock::now() + SPIN;
  for (int spins = 1; what.load(std::memory_order_acquire) == old; spins++) {
    pause();
    if (spins % 64 == 0 && std::chrono::steady_clock::now() > end) {
      asleep_.fetch_add(1, std::memory_order_seq_cst);
      what.wait(old, std::memory_order_seq_cst);
      asleep_.fetch_sub(1, std::memory_order_relaxed);
    }
  }
}

}  // namespace qkv
