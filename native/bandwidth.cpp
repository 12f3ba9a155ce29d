#include "bandwidth.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "common.h"
#include "memory.h"
#include "workers.h"

namespace qkv {

namespace {

constexpr std::size_t ITEM = std::size_t{2} << 20;  // what a thread takes at a time: a huge page
// Passes: a processor's cache takes some until it holds what is read over and over.
constexpr std::size_t ALL = std::size_t{2} << 30;
constexpr int PASSES = 8;
// Independent sums, so that many loads are in flight. More do not fit the registers of the oldest
// processor that this is compiled for, and the loop then waits for them instead of for memory.
constexpr std::size_t LANES = 16;
constexpr std::size_t AHEAD = 4096;  // bytes

std::uint64_t sum(const std::uint64_t* words, std::size_t count) {
  std::uint64_t lanes[LANES] = {};
  for (std::size_t at = 0; at + LANES <= count; at += LANES) {
    // what is fetched ahead is more than the processor does by itself, as the kernels do with weights
    __builtin_prefetch(reinterpret_cast<const unsigned char*>(words + at) + AHEAD);
    __builtin_prefetch(reinterpret_cast<const unsigned char*>(words + at) + AHEAD + 64);
    for (std::size_t lane = 0; lane < LANES; lane++) lanes[lane] += words[at + lane];
  }
  std::uint64_t total = 0;
  for (const auto lane : lanes) total += lane;
  return total;
}

// Each stage is a pass over the buffer; where one ends, the next is timed from.
class Passes : public Stages {
 public:
  explicit Passes(std::size_t bytes)
      : items_(std::max<std::size_t>(bytes / ITEM, 1)), passes_(std::max<int>(PASSES, ALL / (items_ * ITEM))), buffer_(items_ * ITEM) {
    std::memset(buffer_.as(), 1, items_ * ITEM);  // pages that were never written are one and the same
  }

  int next(int) override {
    const auto now = std::chrono::steady_clock::now();
    if (pass_ > 0) best_ = std::max(best_, items_ * ITEM / std::chrono::duration<double>(now - start_).count());
    start_ = now;
    return pass_++ < passes_ ? static_cast<int>(items_) : 0;
  }

  void item(int number, int) override {
    constexpr std::size_t words = ITEM / sizeof(std::uint64_t);
    // what nobody could see would not be computed
    seen_.fetch_add(sum(buffer_.as<std::uint64_t>() + number * words, words), std::memory_order_relaxed);
  }

  double best() const { return best_; }

 private:
  const std::size_t items_;
  const int passes_;
  const Memory buffer_;
  std::atomic<std::uint64_t> seen_{0};
  std::chrono::steady_clock::time_point start_;
  double best_ = 0;
  int pass_ = 0;
};

}  // namespace

double read_bandwidth(int threads, std::size_t bytes) {
  if (threads < 1) throw std::invalid_argument("memory is read by at least one thread");
  Workers workers(threads);
  Passes passes(bytes);
  workers.run(passes);
  return passes.best();
}

}  // namespace qkv
