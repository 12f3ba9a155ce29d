#include "workers.h"

#include <chrono>

namespace qkv {

namespace {

// About what a step's own pauses take: sampling between two steps, a straggler within one.
constexpr auto SPIN = std::chrono::microseconds(200);
// Threads that find nothing left take one each all the same, far fewer than these.
constexpr std::uint32_t NONE = 1u << 24;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Workers::Workers(int count) : count_(count < 1 ? 1 : count), shares_(count_) {
  for (auto& share : shares_) share.state.store(NONE);
  for (int thread = 1; thread < count_; thread++) threads_.emplace_back([this, thread] { serve(thread); });
}

Workers::~Workers() {
  ending_.store(true);
  stage_.fetch_add(1);
  stage_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Workers::run(Stages& stages) {
  stages_ = &stages;
  open(0);
  for (;;) {
    const auto epoch = work(0);
    if (epoch == stage_.load(std::memory_order_acquire) && epoch == last_.load(std::memory_order_relaxed)) return;
    wait(epoch);
  }
}

// Opens the next stage; all items of the one before are done. To have opened it counts as one of its items:
// others may have done the rest before it is told to those who sleep.
void Workers::open(int thread) {
  int items;
  do {
    items = items_ = stages_->next(thread);
    done_.store(0, std::memory_order_relaxed);
    tell();
  } while (items != 0 && done_.fetch_add(1, std::memory_order_acq_rel) == items);
}

void Workers::tell() {
  const std::uint32_t epoch = stage_.load(std::memory_order_relaxed) + 1;
  if (items_ == 0) last_.store(epoch, std::memory_order_relaxed);
  for (int share = 0; share < count_; share++) {
    const auto left = static_cast<std::uint32_t>(end(share) - (share == 0 ? 0 : end(share - 1)));
    shares_[share].state.store(std::uint64_t{epoch} << 32 | (NONE + left), std::memory_order_release);
  }
  stage_.store(epoch, std::memory_order_seq_cst);  // before asking who sleeps
  if (asleep_.load(std::memory_order_seq_cst) != 0) stage_.notify_all();
}

// Takes items while there are any; the number of the stage that had no more.
std::uint32_t Workers::work(int thread) {
  for (;;) {
    const std::uint32_t epoch = stage_.load(std::memory_order_acquire);
    int mine = 0;
    for (int i = 0; i < count_; i++) {
      const int share = (thread + i) % count_;
      for (;;) {
        const auto left = static_cast<std::uint32_t>(shares_[share].state.fetch_sub(1, std::memory_order_acq_rel));
        if (left <= NONE) break;
        // from the first to the last: what is fetched ahead is then what comes next
        stages_->item(end(share) - static_cast<int>(left - NONE), thread);
        mine++;
      }
    }
    if (mine == 0) return epoch;
    // until it has reported, the stage cannot end: these are its own numbers
    const int items = items_;
    if (done_.fetch_add(mine, std::memory_order_acq_rel) + mine == items + 1) open(thread);
  }
}

void Workers::serve(int thread) {
  while (!ending_.load()) wait(work(thread));
}

// Until another stage than this one is open.
void Workers::wait(std::uint32_t epoch) {
  const auto end = std::chrono::steady_clock::now() + SPIN;
  for (int spins = 1; stage_.load(std::memory_order_acquire) == epoch && !ending_.load(std::memory_order_relaxed); spins++) {
    pause();
    if (spins % 64 == 0 && std::chrono::steady_clock::now() > end) {
      asleep_.fetch_add(1, std::memory_order_seq_cst);
      stage_.wait(epoch, std::memory_order_seq_cst);
      asleep_.fetch_sub(1, std::memory_order_relaxed);
    }
  }
}

}  // namespace qkv
