// One step of a program: the rows it is given, the buffers its operations share, and its phases.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "cache.h"
#include "kernels.h"
#include "memory.h"
#include "workers.h"

namespace qkv {

struct Span {
  int buffer = 0, start = 0, width = 0;
};

// Tokens of one or more sequences. A sequence's rows follow each other, in order.
struct Rows {
  int count = 0;
  const i32 *tokens = nullptr, *sequences = nullptr, *positions = nullptr;
  const i32* types = nullptr;  // null: all 0
  int wanted = 0;
  const i32* wanted_rows = nullptr;
};

// The blocks of each sequence in a group of slots, and how many tokens it holds once the rows are stored.
struct Table {
  const i32* blocks = nullptr;
  std::size_t stride = 0;
  const i32* lengths = nullptr;
  const i32* of(int sequence) const { return blocks + sequence * stride; }
};

// The experts of each row and what they weigh.
struct Picks {
  int top_k = 0;
  std::vector<int> chosen;
  std::vector<float> weights;
};

struct Step {
  const Kernels& kernels;
  Cache& cache;
  int threads;
  Rows rows;
  std::vector<Table> tables;

  int count = 0;  // rows now: all, or after the pick those that are wanted
  std::vector<float*> buffers;
  std::vector<std::size_t> strides;
  Memory tiles[READINGS];  // rows as kernels read them, by Reading
  std::vector<Picks> picks;
  std::vector<Memory> angles;  // of each set of frequencies: cosines, then sines, of each row
  Memory partials;             // of attention over splits of the cache that are items of their own
  std::vector<i32> picked;     // what `rows` says, of the wanted ones

  // From here on only the wanted rows.
  void pick() {
    count = rows.wanted;
    picked.resize(std::size_t(count) * 4);
    i32* to = picked.data();
    for (const i32** each : {&rows.tokens, &rows.sequences, &rows.positions, &rows.types}) {
      if (*each == nullptr) continue;
      for (int i = 0; i < count; i++) to[i] = (*each)[rows.wanted_rows[i]];
      *each = to, to += count;
    }
  }

  float* at(const Span& span, int row) const { return buffers[span.buffer] + row * strides[span.buffer] + span.start; }
};

inline int rows_of_tile(int count, int tile, int number) { return std::min(tile, count - tile * number); }

// What a thread works in.
struct Scratch {
  alignas(64) float products[MOST_ROWS * PANEL];
  Queries queries;
  // whose queries they are: of which phase, in which of its runs, which ones
  struct Loaded {
    const void* by = nullptr;
    unsigned run = 0;
    int unit = 0;
    bool operator==(const Loaded&) const = default;
  } loaded;
  std::vector<float> partial;
  Loaded merging;  // whose parts it puts together: of which phase, in which of its runs, the next one
  Memory tile;
};

// A part of a step whose items can run in any order, on any thread.
class Phase {
 public:
  virtual ~Phase() = default;
  // Before a step of so many rows: the only place to take memory.
  virtual void reserve(Step&, int /*rows*/) {}
  // Plans, once what came before is done; how many items there are.
  virtual int begin(Step&) = 0;
  virtual void item(Step&, int number, Scratch&) = 0;
  // What a thread reads first of it, if that is known before it begins.
  virtual Stretch ahead(const Step&, int /*thread*/) const { return {}; }
  // So little that the last thread to arrive does it, while the others wait.
  virtual bool alone(const Step&) const { return false; }
};

// What is done to one row by itself.
class RowOperation {
 public:
  virtual ~RowOperation() = default;
  virtual void reserve(Step&, int /*rows*/) {}
  virtual void run(Step&, int row) = 0;
};

// Operations on rows that follow each other: each row passes through all of them at once.
class RowPhase final : public Phase {
 public:
  explicit RowPhase(bool picks) : picks_(picks) {}
  void append(std::unique_ptr<RowOperation> operation) { operations_.push_back(std::move(operation)); }
  void reserve(Step& step, int rows) override {
    for (auto& each : operations_) each->reserve(step, rows);
  }
  int begin(Step& step) override {
    if (picks_) step.pick();
    grain_ = std::max(1, step.count / (step.threads * 8));
    return ceil_div(step.count, grain_);
  }
  void item(Step& step, int number, Scratch&) override {
    const int end = std::min(step.count, (number + 1) * grain_);
    for (int row = number * grain_; row < end; row++)
      for (auto& each : operations_) each->run(step, row);
  }
  bool alone(const Step& step) const override { return step.count < 4; }

 private:
  std::vector<std::unique_ptr<RowOperation>> operations_;
  bool picks_;
  int grain_ = 1;
};

}  // namespace qkv
