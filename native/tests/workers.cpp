// Threads that share out stages: each item runs once, and after all of the stage before.
#include "workers.h"

#include <chrono>
#include <memory>

#include "check.h"

namespace qkv::tests {

namespace {

class Counted final : public Stages {
 public:
  Counted(std::vector<int> items, int threads) : items_(std::move(items)), threads_(threads) {
    last_.resize(threads, -1);
    for (int count : items_) runs_.push_back(std::make_unique<std::atomic<int>[]>(count));
  }

  int next(int thread) override {
    check_thread(thread);
    // what a stage leaves without any lock is there for the next one
    if (stage_ >= 0 && plain_ != stage_) out_of_order_ = true;
    if (stage_ >= 0 && done_ != items_[stage_]) out_of_order_ = true;
    done_ = 0;
    plain_ = ++stage_;
    return stage_ < static_cast<int>(items_.size()) ? items_[stage_] : 0;
  }
  void item(int number, int thread) override {
    check_thread(thread);
    if (plain_ != stage_ || number < 0 || number >= items_[stage_]) {
      out_of_order_ = true;
      return;
    }
    // some items take far longer than others
    if (number % 17 == 3) std::this_thread::yield();
    last_[thread] = stage_;
    runs_[stage_][number]++;
    done_++;
  }
  Stretch ahead(int thread) override {
    check_thread(thread);
    // asked while its own stage is still on, which cannot end meanwhile
    if (last_[thread] % 17 == 3) std::this_thread::sleep_for(std::chrono::microseconds(50));
    if (last_[thread] != stage_) out_of_order_ = true;
    return {reinterpret_cast<const unsigned char*>(last_.data()), last_.size() * sizeof(int)};
  }

  // All items of all stages have run once since the last time.
  bool right() {
    bool right = !out_of_order_ && stage_ == static_cast<int>(items_.size());
    for (std::size_t s = 0; s < items_.size(); s++)
      for (int i = 0; i < items_[s]; i++) right &= runs_[s][i].exchange(0) == 1;
    stage_ = -1, done_ = 0;
    return right;
  }

 private:
  void check_thread(int thread) {
    if (thread < 0 || thread >= threads_) out_of_order_ = true;
  }

  std::vector<int> items_;
  std::vector<int> last_;  // of each thread: the stage of the item it did last
  int threads_, stage_ = -1, plain_ = -1;
  std::vector<std::unique_ptr<std::atomic<int>[]>> runs_;
  std::atomic<int> done_{0};
  std::atomic<bool> out_of_order_{false};
};

}  // namespace

void check_workers(const Kernels&, Record& record) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  for (int threads : {0, 1, 2, 3, 2 * cores + 1}) {
    { const Workers unused(threads); }  // ends without having run
    Workers workers(threads);
    record.near(workers.count(), std::max(threads, 1), 0, "threads");
    const auto run = [&](const std::vector<int>& items, int times, const char* what) {
      Counted stages(items, workers.count());
      for (int i = 0; i < times; i++) {
        workers.run(stages);
        record.that(stages.right(), what, {threads, i});
      }
    };
    run({}, 3, "no stage: threads, run");
    run({1}, 20, "one item: threads, run");
    run({1, 2, 1, 3, 1, 1, 2}, 50, "few items: threads, run");
    // over before the others have noticed, and begun again
    run({2}, 20000, "one after another: threads, run");
    run(std::vector<int>(300, 5), 5, "many stages: threads, run");
    run({20000, 1, 777}, 3, "many items: threads, run");
    for (int i = 0; i < 5; i++) {  // long enough for the threads to have gone to sleep
      std::this_thread::sleep_for(std::chrono::milliseconds(3));
      run({4, 40, 4}, 1, "after a pause: threads, run");
    }
  }
}

}  // namespace qkv::tests
