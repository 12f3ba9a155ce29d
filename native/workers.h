// Threads that stay, and share out the items of one stage after another.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace qkv {

// Memory that a thread is going to read.
struct Stretch {
  const unsigned char* at = nullptr;
  std::size_t bytes = 0;
};

// Work in stages: the items of one can run in any order, the next begins when all of them are done.
class Stages {
 public:
  virtual ~Stages() = default;
  // Plans the following stage, on whichever thread ended the last; how many items it has, 0 at the end.
  virtual int next(int thread) = 0;
  virtual void item(int number, int thread) = 0;
  // Asked of a thread that has no more items in this stage: what it will read first in a later one. It is fetched
  // while the thread waits.
  virtual Stretch ahead(int /*thread*/) { return {}; }
};

// `count` threads, the caller's own among them. A stage ends with its last item and not with the last
// thread: one that sleeps, or that the system has put aside, is only waited for if it holds an item.
// Waiting spins for a bounded time and then sleeps, so that a busy neighbour on the machine costs its
// share and no more, and idling costs nothing.
class Workers {
 public:
  explicit Workers(int count);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  int count() const { return count_; }

  // Runs all stages; returns after the last. One call at a time.
  void run(Stages& stages);

 private:
  void open(int thread);
  void tell();
  std::uint32_t work(int thread, Stretch& ahead);
  int end(int share) const { return static_cast<int>(std::int64_t{items_} * (share + 1) / count_); }
  void wait(std::uint32_t epoch, Stretch ahead);
  void serve(int thread);

  const int count_;
  Stages* stages_ = nullptr;
  int items_ = 0;
  // The number of the stage that ends a run. A mere flag would be seen before that stage is open, and the
  // next run begin while a thread still opens it.
  std::atomic<std::uint32_t> last_{0};
  std::vector<std::thread> threads_;
  // A thread begins with a run of items of its own, so that it reads memory in order, and then helps the
  // others with theirs. Above 32 bits the number of the stage; below, how many items are left to take, from
  // NONE up. One word, so that no thread takes an item of a stage that it has not seen.
  struct alignas(64) Share {
    std::atomic<std::uint64_t> state;
  };
  std::vector<Share> shares_;
  alignas(64) std::atomic<int> done_{0};
  alignas(64) std::atomic<std::uint32_t> stage_{0};  // the number of the stage, to sleep on
  alignas(64) std::atomic<int> asleep_{0};
  std::atomic<bool> ending_{false};
};

}  // namespace qkv
