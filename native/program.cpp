#include "program.h"

#include <utility>

namespace qkv {

Program::Program(std::vector<int> widths, int output)
    : widths_(std::move(widths)), output_(output), buffers_(widths_.size()) {}

void Program::add(std::unique_ptr<RowOperation> operation) {
  if (open_ == nullptr) {
    auto phase = std::make_unique<RowPhase>(false);
    open_ = phase.get();
    phases_.push_back(std::move(phase));
  }
  open_->append(std::move(operation));
}

void Program::add(std::unique_ptr<Phase> phase) {
  open_ = nullptr;
  phases_.push_back(std::move(phase));
}

void Program::pick(const std::vector<std::pair<Span, Span>>& spans) {
  auto phase = std::make_unique<RowPhase>(true);
  open_ = phase.get();
  phases_.push_back(std::move(phase));
  for (const auto& [out, x] : spans) open_->append(std::make_unique<Pick>(out, x));
}

void Program::prepare(Step& step, float* answers) {
  step.count = step.rows.count;
  const int rows = std::max(step.rows.count, step.rows.wanted);
  step.buffers.resize(widths_.size());
  step.strides.resize(widths_.size());
  for (std::size_t b = 0; b < widths_.size(); b++) {
    const bool bound = answers != nullptr && static_cast<int>(b) == output_;
    step.strides[b] = bound ? widths_[b] : round_up(widths_[b], LANES);
    if (!bound) buffers_[b].reserve(step.strides[b] * rows * sizeof(float));
    step.buffers[b] = bound ? answers : buffers_[b].as<float>();
  }
  for (auto& phase : phases_) phase->reserve(step, rows);
}

// The next phase that is worth sharing; those that are not are done at once.
int Program::next(int thread) {
  Step& step = *step_;
  while (following_ < phases_.size()) {
    current_ = phases_[following_++].get();
    const int items = current_->begin(step);
    if (items > 1 && !current_->alone(step)) return items;
    for (int i = 0; i < items; i++) current_->item(step, i, scratch_[thread]);
  }
  return 0;
}

void Program::item(int number, int thread) { current_->item(*step_, number, scratch_[thread]); }

Stretch Program::ahead(int thread) {
  for (auto f = following_; f < phases_.size(); f++)
    if (const Stretch found = phases_[f]->ahead(*step_, thread); found.bytes > 0) return found;
  return {};
}

void Program::run(const Rows& rows, const std::vector<Table>& tables, Cache& cache, Workers& workers,
                  const Kernels& kernels, float* answers) {
  if (step_ == nullptr || &step_->cache != &cache || &step_->kernels != &kernels)
    step_ = std::unique_ptr<Step>(new Step{kernels, cache, workers.count(), rows, tables, 0, {}, {}, {}, {}, {}, {}, {}});
  Step& step = *step_;
  step.threads = workers.count(), step.rows = rows, step.tables = tables;
  if (static_cast<int>(scratch_.size()) < workers.count()) scratch_.resize(workers.count());
  prepare(step, answers);
  following_ = 0;
  workers.run(*this);
}

namespace {

// A single stage: the rows.
class Summaries final : public Stages {
 public:
  Summaries(const Kernels& kernels, const float* x, int rows, int width, Summary* out)
      : kernels_(kernels), x_(x), rows_(rows), width_(width), out_(out) {}
  int next(int) override { return std::exchange(rows_, 0); }
  void item(int row, int) override { out_[row] = kernels_.summary(x_ + std::size_t(row) * width_, width_); }

 private:
  const Kernels& kernels_;
  const float* x_;
  int rows_, width_;
  Summary* out_;
};

}  // namespace

void Program::summarise(const float* answers, int rows, Workers& workers, const Kernels& kernels, Summary* out) const {
  Summaries stages(kernels, answers, rows, widths_[output_], out);
  workers.run(stages);
}

}  // namespace qkv
