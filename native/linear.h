// Rows times matrices: the operations that take most of the time.
#pragma once

#include "step.h"

namespace qkv {

// A matrix and where its rows go in `out`. `bias` has a number for each row of its panels, or none.
struct Weights {
  std::shared_ptr<const Matrix> matrix;
  int column = 0;
  std::vector<float> bias;
};

// A row of x into its place in the tiles that a matrix product reads.
class Read final : public RowOperation {
 public:
  Read(Span x, Reading reading, int padded) : x_(x), reading_(reading), padded_(padded) {}
  void reserve(Step&, int rows) override;
  void run(Step&, int row) override;

 private:
  Span x_;
  Reading reading_;
  int padded_;
};

// out = x times each matrix, side by side; or gated, where a matrix holds pairs of rows.
class Linear final : public Phase {
 public:
  Linear(Span out, std::vector<Weights> weights, Finish finish);
  void reserve(Step&, int rows) override;
  int begin(Step&) override;
  void item(Step&, int number, Scratch&) override;
  Stretch ahead(const Step&, int thread) const override;

 private:
  struct Run {
    int weights, first, last;  // panels
  };
  // Rows of x as a kernel reads them, so many at a time.
  struct Tiles {
    const u8* at;
    std::size_t bytes;
    int rows;
  };
  Pass ahead(int number, int panel, int times) const;
  void panel(Step&, const Weights&, int number, const Tiles&, int tile, const Pass&, Scratch&);

  Span out_;
  std::vector<Weights> weights_;
  Finish finish_;
  std::pair<int, bool> planned_{0, false};  // for how many threads, and whether for few rows
  std::vector<Run> runs_;
  int parts_ = 1;  // of the rows
};

// The same for rows that go to experts: out has a part for each pick. x is shared by a row's picks, or
// has a part for each as well.
class ExpertRead final : public RowOperation {
 public:
  ExpertRead(Span x, Reading reading, int columns, int padded, int parts)
      : x_(x), reading_(reading), columns_(columns), padded_(padded), parts_(parts) {}
  void reserve(Step&, int rows) override;
  void run(Step&, int row) override;

 private:
  Span x_;
  Reading reading_;
  int columns_, padded_, parts_;
};

class ExpertLinear final : public Phase {
 public:
  ExpertLinear(Span out, int picks, std::vector<Weights> experts, Finish finish, bool from_picks);
  int begin(Step&) override;
  void item(Step&, int number, Scratch&) override;

 private:
  struct Run {
    int expert, first, last;  // panels
  };
  Span out_;
  int picks_;
  std::vector<Weights> experts_;
  Finish finish_;
  bool from_picks_;
  std::vector<std::vector<int>> takers_;  // by expert: picks
  std::vector<Run> runs_;
};

}  // namespace qkv
