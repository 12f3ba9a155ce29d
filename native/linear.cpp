#include "linear.h"

namespace qkv {

namespace {

constexpr std::size_t NEAR_CACHE = std::size_t{512} << 10;  // bytes that stay close to a core
constexpr std::size_t SHORTEST_RUN = std::size_t{16} << 10;
constexpr std::size_t WAITED_FOR = std::size_t{64} << 10;   // bytes that are fetched while a thread waits
constexpr int MANY_RUNS = 16;                               // for each thread, of many rows
constexpr int FEW = 8;                                      // rows from which on they are many

const float* bias_of(const Weights& weights, int panel) {
  return weights.bias.empty() ? nullptr : weights.bias.data() + panel * PANEL;
}

// How many columns of out a panel fills, and from which on.
struct Columns {
  int from, wide;
};

Columns columns_of(const Weights& weights, int panel, bool gated, int width) {
  const int each = gated ? LANES : PANEL, from = weights.column + panel * each;
  const int end = gated ? width : weights.column + weights.matrix->rows();
  return {from, std::min(each, end - from)};
}

// Rows read one by one, put together as the tile of a kernel.
void collect(Reading reading, const std::vector<int>& rows, int from, int tile, const u8* all, int padded, u8* to) {
  const std::size_t each = tile_bytes(reading, padded, 1);
  for (int t = 0; t < tile; t++) {
    const u8* row = all + rows[from + t] * each;
    if (reading == Reading::Codes) {
      for (int g = 0; g < padded / GROUP; g++) {
        u8* record = to + std::size_t(g) * 48 * tile;
        std::memcpy(record + t * GROUP, row + g * 48, GROUP);
        for (int i = 0; i < 4; i++) std::memcpy(record + tile * (GROUP + 4 * i) + t * 4, row + g * 48 + GROUP + 4 * i, 4);
      }
    } else if (reading == Reading::Rows) {
      for (int c = 0; c < padded; c += GROUP) std::memcpy(to + (std::size_t(c) * tile + t * GROUP) * 2, row + c * 2, GROUP * 2);
    } else {
      const int words = reading == Reading::Pairs ? padded / 2 : padded;
      for (int w = 0; w < words; w++) std::memcpy(to + (std::size_t(w) * tile + t) * 4, row + w * 4, 4);
    }
  }
}

}  // namespace

void Read::reserve(Step& step, int rows) {
  const int most = step.kernels.most_rows(reading_, MOST_ROWS);
  step.tiles[static_cast<int>(reading_)].reserve(tile_bytes(reading_, padded_, round_up(rows, most) + most));
}

void Read::run(Step& step, int row) {
  const int tile = step.kernels.tile_rows(reading_, step.count), number = row / tile;
  u8* to = step.tiles[static_cast<int>(reading_)].as<u8>() + number * tile_bytes(reading_, padded_, tile);
  step.kernels.read(reading_, step.at(x_, row), x_.width, padded_, to, rows_of_tile(step.count, tile, number), row % tile);
}

Linear::Linear(Span out, std::vector<Weights> weights, Finish finish)
    : out_(out), weights_(std::move(weights)), finish_(finish) {}

// The runs are the same for any step of few rows, or of many.
void Linear::reserve(Step& step, int rows) {
  const std::pair wanted{step.threads, rows < FEW};
  if (planned_ == wanted) return;
  planned_ = wanted;
  runs_.clear();
  std::size_t all = 0, planned = 0;
  for (const auto& each : weights_) all += each.matrix->bytes();
  for (int w = 0; w < static_cast<int>(weights_.size()); w++) {
    const auto& matrix = *weights_[w].matrix;
    for (int first = 0, last; first < matrix.panels(); first = last) {
      // of few rows half of what is left of a thread's share, so that all end together and few runs begin cold
      const std::size_t share = planned * step.threads / all + 1, left = all * share / step.threads - planned;
      const std::size_t wanted = rows < FEW ? left / 2 : all / (step.threads * MANY_RUNS);
      const auto bytes = std::clamp(wanted, SHORTEST_RUN, NEAR_CACHE);
      last = std::min(matrix.panels(), first + std::max(1, static_cast<int>(bytes / matrix.panel_bytes())));
      runs_.push_back({w, first, last});
      planned += (last - first) * matrix.panel_bytes();
    }
  }
}

Stretch Linear::ahead(const Step& step, int thread) const {
  const Run& run = runs_[runs_.size() * thread / step.threads];
  const auto& matrix = *weights_[run.weights].matrix;
  return {matrix.panel(run.first), std::min<std::size_t>(matrix.panel_bytes() * (run.last - run.first), WAITED_FOR)};
}

int Linear::begin(Step& step) {
  if (step.count == 0) return 0;
  // many threads and few panels: the rows are shared out as well
  const int runs = static_cast<int>(runs_.size());
  parts_ = std::clamp(step.threads * 4 / runs, 1, std::max(1, step.count / 32));
  return runs * parts_;
}

void Linear::item(Step& step, int number, Scratch& scratch) {
  const Run run = runs_[number / parts_];
  const auto& weights = weights_[run.weights];
  const auto kind = step.kernels.reading(weights.matrix->kind());
  const int rows = step.kernels.tile_rows(kind, step.count), tiles = ceil_div(step.count, rows);
  const Tiles x{step.tiles[static_cast<int>(kind)].as<u8>(), tile_bytes(kind, weights.matrix->padded(), rows), rows};
  const int part = number % parts_, first = tiles * part / parts_, last = tiles * (part + 1) / parts_;
  if ((last - first) * x.bytes <= NEAR_CACHE) {
    for (int p = run.first; p < run.last; p++) {
      Pass pass = ahead(number, p, last - first);
      for (int t = first; t < last; t++, pass.before++) panel(step, weights, p, x, t, pass, scratch);
    }
  } else {
    for (int t = first; t < last; t++)
      for (int p = run.first; p < run.last; p++) panel(step, weights, p, x, t, {t - first}, scratch);
  }
}

// A panel that is gone through so many times: meanwhile the panel after it may come from memory, of this run or
// of the next, which is mostly the same thread's. Where it is gone through once, memory is busy with it.
Pass Linear::ahead(int number, int panel, int times) const {
  Pass pass{0, times};
  const Run& run = runs_[number / parts_];
  const bool within = panel + 1 < run.last;
  if (times == 1 || parts_ > 1 || (!within && number + 1 == static_cast<int>(runs_.size()))) return pass;
  const Run& next = within ? run : runs_[number + 1];
  const auto& matrix = *weights_[next.weights].matrix;
  pass.after = matrix.panel(within ? panel + 1 : next.first), pass.bytes = matrix.panel_bytes();
  return pass;
}

void Linear::panel(Step& step, const Weights& weights, int number, const Tiles& x, int t, const Pass& pass, Scratch& scratch) {
  const int count = rows_of_tile(step.count, x.rows, t);
  step.kernels.linear(*weights.matrix, number, x.at + t * x.bytes, count, pass, scratch.products);
  Finish finish = finish_;
  finish.bias = bias_of(weights, number);
  const auto to = columns_of(weights, number, finish_.gated, out_.width);
  step.kernels.finish(finish, scratch.products, count, step.at(out_, t * x.rows) + to.from, step.strides[out_.buffer], to.wide);
}

void ExpertRead::reserve(Step& step, int rows) {
  step.tiles[static_cast<int>(reading_)].reserve(tile_bytes(reading_, padded_, 1) * rows * parts_);
}

void ExpertRead::run(Step& step, int row) {
  const std::size_t each = tile_bytes(reading_, padded_, 1);
  for (int part = 0; part < parts_; part++)
    step.kernels.read(reading_, step.at(x_, row) + part * columns_, columns_, padded_,
                      step.tiles[static_cast<int>(reading_)].as<u8>() + (row * parts_ + part) * each, 1, 0);
}

ExpertLinear::ExpertLinear(Span out, int picks, std::vector<Weights> experts, Finish finish, bool from_picks)
    : out_(out), picks_(picks), experts_(std::move(experts)), finish_(finish), from_picks_(from_picks),
      takers_(experts_.size()) {}

int ExpertLinear::begin(Step& step) {
  const auto& picks = step.picks[picks_];
  for (auto& takers : takers_) takers.clear();
  for (int pick = 0; pick < step.count * picks.top_k; pick++) takers_[picks.chosen[pick]].push_back(pick);
  runs_.clear();
  for (int e = 0; e < static_cast<int>(experts_.size()); e++) {
    const int panels = experts_[e].matrix->panels(), long_ = std::max(1, panels / (step.threads * 2));
    for (int first = 0; first < panels && !takers_[e].empty(); first += long_)
      runs_.push_back({e, first, std::min(panels, first + long_)});
  }
  return static_cast<int>(runs_.size());
}

void ExpertLinear::item(Step& step, int number, Scratch& scratch) {
  const Run run = runs_[number];
  const auto& weights = experts_[run.expert];
  const auto& matrix = *weights.matrix;
  const auto kind = step.kernels.reading(matrix.kind());
  const int top_k = step.picks[picks_].top_k, width = out_.width / top_k;
  const auto& takers = takers_[run.expert];
  std::vector<int> rows(takers);
  if (!from_picks_)
    for (auto& row : rows) row /= top_k;
  const int taken = static_cast<int>(rows.size()), most = step.kernels.tile_rows(kind, taken);
  scratch.tile.reserve(tile_bytes(kind, matrix.padded(), most));
  for (int at = 0; at < taken; at += most) {
    const int tile = rows_of_tile(taken, most, at / most);
    collect(kind, rows, at, tile, step.tiles[static_cast<int>(kind)].as<u8>(), matrix.padded(), scratch.tile.as<u8>());
    for (int p = run.first; p < run.last; p++) {
      step.kernels.linear(matrix, p, scratch.tile.as<u8>(), tile, {at / most}, scratch.products);
      Finish finish = finish_;
      finish.bias = bias_of(weights, p);
      const auto to = columns_of(weights, p, finish_.gated, width);
      for (int t = 0; t < tile; t++) {
        const int pick = takers[at + t];
        step.kernels.finish(finish, scratch.products + t * PANEL, 1,
                            step.at(out_, pick / top_k) + pick % top_k * width + to.from, 0, to.wide);
      }
    }
  }
}

}  // namespace qkv
