#include "workers.h"

#include <algorithm>
#include <chrono>

namespace qkv {

namespace {

// About what a step's own pauses take: sampling between two steps, a straggler within one.
constexpr auto SPIN = std::chrono::microseconds(200);
// Threads that find nothing left take one each all the same, far fewer than these.
constexpr std::uint32_t NONE = 1u << 24;

constexpr std::size_t LINE = 64, WHILE_WAITING = 4 * LINE;
constexpr std::size_t BEFORE_OPENING = 48 * LINE;  // with 16 a step of one row is a twenty-fifth slower, with 384 as well

// Asks for the next bytes of a stretch, into the second level of the cache.
inline void fetch(Stretch& ahead, std::size_t bytes) {
  const std::size_t now = std::min(bytes, ahead.bytes);
  for (std::size_t i = 0; i < now; i += LINE) __builtin_prefetch(ahead.at + i, 0, 2);
  ahead = {ahead.at + now, ahead.bytes - now};
}

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
    Stretch ahead;
    const auto epoch = work(0, ahead);
    if (epoch == stage_.load(std::memory_order_acquire) && epoch == last_.load(std::memory_order_relaxed)) return;
    wait(epoch, ahead);
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

// Takes items while there are any; the number of the stage that had no more, and what to fetch until the next.
std::uint32_t Workers::work(int thread, Stretch& ahead) {
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
    ahead = stages_->ahead(thread);
    if (done_.fetch_add(mine, std::memory_order_acq_rel) + mine == items + 1) {
      fetch(ahead, BEFORE_OPENING);
      open(thread);
    }
  }
}

void Workers::serve(int thread) {
  while (!ending_.load()) {
    Stretch ahead;
    const auto epoch = work(thread, ahead);
    wait(epoch, ahead);
  }
}

// Until another stage than this one is open.
void Workers::wait(std::uint32_t epoch, Stretch ahead) {
  const auto end = std::chrono::steady_clock::now() + SPIN;
  for (int spins = 1; stage_.load(std::memory_order_acquire) == epoch && !ending_.load(std::memory_order_relaxed); spins++) {
    if (ahead.bytes > 0) fetch(ahead, WHILE_WAITING);
    else pause();
    if (spins % 64 == 0 && std::chrono::steady_clock::now() > end) {
      asleep_.fetch_add(1, std::memory_order_seq_cst);
      stage_.wait(epoch, std::memory_order_seq_cst);
      asleep_.fetch_sub(1, std::memory_order_relaxed);
    }
  }
}

}  // namespace qkv
