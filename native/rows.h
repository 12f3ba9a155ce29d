// The operations on single rows, as the program of a description names them.
#pragma once

#include "step.h"

namespace qkv {

// out = scale * table[token], position + offset or type; added to out with `add`.
struct TakeRows final : RowOperation {
  enum By { Token, Position, Type };
  TakeRows(Span out, std::shared_ptr<const Matrix> table, By by, float scale, int offset, bool add)
      : out(out), table(std::move(table)), by(by), scale(scale), offset(offset), add(add) {}
  void run(Step&, int row) override;
  Span out;
  std::shared_ptr<const Matrix> table;
  By by;
  float scale;
  int offset;
  bool add;
};

// Sines and cosines of position * frequency added to out, in turn or in halves.
struct Sinusoids final : RowOperation {
  Sinusoids(Span out, double base, bool halves) : out(out), base(base), halves(halves) {}
  void run(Step&, int row) override;
  Span out;
  double base;
  bool halves;
};

// factor * cosine and sine of position * frequency, once for all rotations by these frequencies. No
// position is above `most`.
struct Angles final : RowOperation {
  Angles(int set, std::vector<float> frequencies, float factor, int most)
      : set(set), frequencies(std::move(frequencies)), factor(factor), most(most) {}
  void reserve(Step&, int rows) override;
  void run(Step&, int row) override;
  int set;
  std::vector<float> frequencies;
  float factor;
  int most;
};

// out = x turned; x may be out.
struct Rotate final : RowOperation {
  Rotate(Span out, Span x, int heads, int set, int pairs, bool interleaved)
      : out(out), x(x), heads(heads), set(set), pairs(pairs), interleaved(interleaved) {}
  void run(Step&, int row) override;
  Span out, x;
  int heads, set, pairs;
  bool interleaved;
};

// out's row i = the i-th wanted row of x.
struct Pick final : RowOperation {
  Pick(Span out, Span x) : out(out), x(x) {}
  void run(Step&, int row) override;
  Span out, x;
};

// out = x normalised in equal parts; scale and bias for one part, or for all.
struct Norm final : RowOperation {
  Norm(Span out, Span x, bool centred, float eps, std::vector<float> scale, std::vector<float> bias, int groups)
      : out(out), x(x), centred(centred), eps(eps), scale(std::move(scale)), bias(std::move(bias)), groups(groups) {}
  void run(Step&, int row) override;
  Span out, x;
  bool centred;
  float eps;
  std::vector<float> scale, bias;
  int groups;
};

struct Clamp final : RowOperation {
  Clamp(Span out, float bound) : out(out), bound(bound) {}
  void run(Step&, int row) override;
  Span out;
  float bound;
};

// The row's key and value into a slot of the cache.
struct Store final : RowOperation {
  Store(int slot, Span key, Span value) : slot(slot), key(key), value(value) {}
  void run(Step&, int row) override;
  int slot;
  Span key, value;
};

struct Activate final : RowOperation {
  Activate(Span out, Activation how) : out(out), how(how) {}
  void run(Step&, int row) override;
  Span out;
  Activation how;
};

// out = out * x, of as many columns or of one.
struct Multiply final : RowOperation {
  Multiply(Span out, Span x) : out(out), x(x) {}
  void run(Step&, int row) override;
  Span out, x;
};

// out = skip * out + scale * x.
struct Add final : RowOperation {
  Add(Span out, Span x, float scale, float skip) : out(out), x(x), scale(scale), skip(skip) {}
  void run(Step&, int row) override;
  Span out, x;
  float scale, skip;
};

// out = scale * out, then cap * tanh(out / cap) unless cap is 0.
struct ScaleCap final : RowOperation {
  ScaleCap(Span out, float scale, float cap) : out(out), scale(scale), cap(cap) {}
  void run(Step&, int row) override;
  Span out;
  float scale, cap;
};

// From a router's logits to the experts of a row and what they weigh.
struct Route final : RowOperation {
  struct Router {
    bool softmax, normalise;
    float scale;
    int groups, top_groups, group_best;
  };
  Route(int picks, Span logits, Router router, int top_k, std::vector<float> balance)
      : picks(picks), logits(logits), router(router), top_k(top_k), balance(std::move(balance)) {}
  void reserve(Step&, int rows) override;
  void run(Step&, int row) override;
  int picks;
  Span logits;
  Router router;
  int top_k;
  std::vector<float> balance;
};

// out = the sum of the picks' parts of x by their weights; out + scale times that with `add`.
struct Combine final : RowOperation {
  Combine(Span out, Span x, int picks, bool add, float scale) : out(out), x(x), picks(picks), add(add), scale(scale) {}
  void run(Step&, int row) override;
  Span out, x;
  int picks;
  bool add;
  float scale;
};

}  // namespace qkv
