// A lowered description, ready to run: phases in order, executed in one call by all threads.
#pragma once

#include "attend.h"
#include "linear.h"
#include "rows.h"
#include "workers.h"

namespace qkv {

class Program final : private Stages {
 public:
  // `widths` of the buffers; `output` is the one that holds the answers.
  Program(std::vector<int> widths, int output);

  // Operations, in order.
  void add(std::unique_ptr<RowOperation> operation);
  void add(std::unique_ptr<Phase> phase);
  // Each out is the wanted rows of its x; the operations after it, of which none turns, work on these alone.
  void pick(const std::vector<std::pair<Span, Span>>& spans);

  // Runs a step. `answers` has room for the output buffer's width for each wanted row; null: not wanted.
  void run(const Rows& rows, const std::vector<Table>& tables, Cache& cache, Workers& workers, const Kernels& kernels,
           float* answers);
  // Of each of `rows` answers.
  void summarise(const float* answers, int rows, Workers& workers, const Kernels& kernels, Summary* out) const;

 private:
  void prepare(Step& step, float* answers);
  int next(int thread) override;
  void item(int number, int thread) override;
  Stretch ahead(int thread) override;

  std::vector<int> widths_;
  int output_;
  std::vector<std::unique_ptr<Phase>> phases_;
  RowPhase* open_ = nullptr;  // where the next operation on rows goes
  std::vector<Memory> buffers_;
  std::vector<Scratch> scratch_;
  std::unique_ptr<Step> step_;  // its memory stays from one to the next

  Phase* current_ = nullptr;
  std::size_t following_ = 0;
};

}  // namespace qkv
