// Threads that stay, and the place where they meet.
#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

namespace qkv {

// `count` threads, the caller's own among them, run a job together. Waiting spins for a bounded time
// and then sleeps: a busy neighbour on the machine costs its share and no more, and idling costs nothing.
class Workers {
 public:
  explicit Workers(int count);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  int count() const { return count_; }

  // Calls job(thread) on every thread and returns when all are done. One job at a time.
  void run(const std::function<void(int)>& job);

  // Within a job: the last thread to come runs `between` alone, then all go on.
  template <class Between>
  void meet(Between&& between) {
    const unsigned turn = turn_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == count_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      between();
      turn_.store(turn + 1, std::memory_order_seq_cst);  // before asking who sleeps
      if (asleep_.load(std::memory_order_seq_cst) != 0) turn_.notify_all();
    } else {
      wait(turn_, turn);
    }
  }

 private:
  void wait(std::atomic<unsigned>& what, unsigned old);
  void serve(int thread);

  const int count_;
  const std::function<void(int)>* job_ = nullptr;
  std::vector<std::thread> threads_;
  alignas(64) std::atomic<unsigned> turn_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> started_{0};
  alignas(64) std::atomic<int> asleep_{0};
  bool ending_ = false;
};

}  // namespace qkv
