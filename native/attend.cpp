#include "attend.h"

#include <cmath>

namespace qkv {

namespace {
constexpr int MOST_APART = 1024;  // parts that are held apart at once
}

// Whether keys between the first ones and its window are out of a row's sight.
bool Attend::parted(const Step& step, int row) const {
  return a_.first > 0 && step.rows.positions[row] >= a_.first + *a_.before;
}

// Tokens that a row's query sees: from, and before to.
void Attend::seen(const Step& step, int row, int& from, int& to) const {
  const int position = step.rows.positions[row];
  from = 0;
  to = step.tables[step.cache.slot(a_.slot).group].lengths[step.rows.sequences[row]];
  if (a_.before && (a_.first == 0 || parted(step, row))) from = std::max(from, position - *a_.before + 1);
  if (a_.after) to = std::min(to, position + *a_.after + 1);
  if (a_.chunk) {
    const int start = position / *a_.chunk * *a_.chunk;
    from = std::max(from, start), to = std::min(to, start + *a_.chunk);
  }
  to = std::max(from, to);
}

void Attend::reserve(Step& step, int) {
  most_ = step.kernels.queries(step.cache.shape(a_.slot));
  step.partials.reserve(partial_size(step.cache.shape(a_.slot).value_dim) * sizeof(float) * MOST_APART);
}

void Attend::plan(Step& step) {
  tiles_.clear();
  const int most = most_;
  for (int row = 0; row < step.count;) {
    int end = row;
    while (end < step.count && step.rows.sequences[end] == step.rows.sequences[row]) end++;
    const int pairs = (end - row) * group();
    for (int first = 0; first < pairs; first += most) {
      Tile tile{first, std::min(most, pairs - first), pairs <= most, row, step.rows.sequences[row], INT32_MAX, 0, 0, 0, 0, 0};
      for (int r = row + first / group(); r <= row + (first + tile.count - 1) / group(); r++) {
        int from, to;
        seen(step, r, from, to);
        if (from < to) tile.from = std::min(tile.from, from), tile.to = std::max(tile.to, to);
        if (parted(step, r)) tile.far = 1;
      }
      tile.split = tile.from / SPLIT, tile.end = tile.from < tile.to ? ceil_div(tile.to, SPLIT) : tile.split;
      tiles_.push_back(tile);
    }
    row = end;
  }
}

int Attend::begin(Step& step) {
  run_++;
  plan(step);
  int parts = 0;
  for (const auto& tile : tiles_) parts += tile.parts();
  const int units = static_cast<int>(tiles_.size()) * a_.kv_heads;
  apart_ = units < step.threads * 4 && parts > static_cast<int>(tiles_.size()) && parts * a_.kv_heads <= MOST_APART;
  if (!apart_) return units;
  items_.clear();
  merged_.assign(units, {});
  for (int t = 0; t < static_cast<int>(tiles_.size()); t++) {
    tiles_[t].partial = static_cast<int>(items_.size());
    items_.insert(items_.end(), tiles_[t].parts(), t);
  }
  return parts * a_.kv_heads;
}

void Attend::load(Step& step, const Place& at, Scratch& scratch) const {
  // parts that follow each other mostly have the same queries
  const Scratch::Loaded wanted{this, run_, 2 * unit(at) + at.far()};
  if (scratch.loaded == wanted) return;
  scratch.loaded = wanted;
  Queries& q = scratch.queries;
  q.count = at.tile->count, q.once = at.tile->once, q.reach = a_.reach, q.cap = a_.cap;
  for (int i = 0; i < q.count; i++) pack(step, at, i, q);
}

void Attend::pack(Step& step, const Place& at, int pair, Queries& q) const {
  const int number = at.tile->first + pair;
  const int row = at.tile->row + number / group(), head = at.kv_head * group() + number % group();
  const int key_dim = step.cache.slot(a_.slot).key_dim;
  q.position[pair] = step.rows.positions[row];
  if (at.far()) {
    q.position[pair] = std::min(q.position[pair], a_.first + *a_.before - 1);
    q.from[pair] = 0, q.to[pair] = parted(step, row) ? a_.first : 0;
  } else {
    seen(step, row, q.from[pair], q.to[pair]);
  }
  q.slope[pair] = a_.slopes.empty() ? 0 : a_.slopes[head];
  q.bias[pair] = a_.bias.empty() ? nullptr : a_.bias.data() + std::size_t(head) * (2 * a_.reach + 1);
  const float* query = step.at(at.far() ? a_.far : a_.query, row) + head * key_dim;
  step.kernels.pack(step.cache.shape(a_.slot), q, pair, query, key_dim, a_.scale);
}

void Attend::find(const Step& step, const Place& at, Block* blocks) const {
  const i32* table = step.tables[step.cache.slot(a_.slot).group].of(at.tile->sequence);
  const int from = at.far() ? 0 : at.tile->from, to = at.far() ? a_.first : at.tile->to;
  for (int b = 0; b < SPLIT_BLOCKS; b++) {
    const int start = at.start() + b * BLOCK_TOKENS;
    if (start < to && start + BLOCK_TOKENS > from)
      blocks[b] = step.cache.block(a_.slot, table[start / BLOCK_TOKENS], at.kv_head);
  }
}

void Attend::split(Step& step, const Place& at, const Queries& q, Partial out) const {
  Block blocks[SPLIT_BLOCKS], next[SPLIT_BLOCKS];
  find(step, at, blocks);
  const bool more = at.part + 1 < at.tile->parts();
  if (more) find(step, {at.tile, at.kv_head, at.part + 1}, next);
  step.kernels.attend(step.cache.shape(a_.slot), q, blocks, more ? next : nullptr, at.start(), out);
}

void Attend::merge(const Step& step, const Tile& tile, Partial so_far, Partial later) const {
  step.kernels.merge(so_far, later, tile.count, step.cache.shape(a_.slot).value_dim);
}

void Attend::finish(Step& step, const Tile& tile, int kv_head, Partial from) const {
  const auto& shape = step.cache.shape(a_.slot);
  const int value_dim = step.cache.slot(a_.slot).value_dim;
  for (int i = 0; i < tile.count; i++) {
    const int row = tile.row + (tile.first + i) / group(), head = kv_head * group() + (tile.first + i) % group();
    float* to = step.at(a_.out, row) + head * value_dim;
    float total = from.total[i], by = 1;
    if (!a_.sinks.empty() && total != 0) {  // a sink takes weight and gives nothing
      const float most = std::max(from.top[i], a_.sinks[head]);
      by = std::exp(from.top[i] - most);
      total = total * by + std::exp(a_.sinks[head] - most);
    }
    const float* mixed = from.mixed + std::size_t(i) * shape.value_dim;
    const float part = by / total;
    for (int d = 0; d < value_dim; d++) to[d] = total == 0 ? 0 : mixed[d] * part;
  }
}

// Items that are parts go from head to head, and along each in order.
Attend::Place Attend::place(int number) const {
  const int parts = static_cast<int>(items_.size());
  const Tile& tile = tiles_[items_[number % parts]];
  return {&tile, number / parts, number % parts - tile.partial};
}

// A part that is an item of its own: merged with those before it where this thread has put them together.
void Attend::part(Step& step, int number, Scratch& scratch) {
  const Place at = place(number);
  load(step, at, scratch);
  if (at.part > 0 && scratch.merging != Scratch::Loaded{this, run_, number}) return split(step, at, scratch.queries, slot(step, number));
  const Partial so_far = slot(step, number - at.part), later = partial(scratch.partial.data());
  if (at.part == 0) std::fill(so_far.total, so_far.total + at.tile->count, 0.0f);
  split(step, at, scratch.queries, later);
  merge(step, *at.tile, so_far, later);
  merged_[unit(at)].parts = at.part + 1;
  scratch.merging = {this, run_, number + 1};
  if (at.part + 1 == at.tile->parts()) finish(step, *at.tile, at.kv_head, so_far);
}

void Attend::item(Step& step, int number, Scratch& scratch) {
  const std::size_t size = partial_size(step.cache.shape(a_.slot).value_dim);
  if (scratch.partial.size() < 2 * size) scratch.partial.resize(2 * size);
  if (apart_) return part(step, number, scratch);
  const Tile& tile = tiles_[number / a_.kv_heads];
  Partial so_far = partial(scratch.partial.data()), later = partial(scratch.partial.data() + size);
  Place at{&tile, number % a_.kv_heads, 0};
  std::fill(so_far.total, so_far.total + tile.count, 0.0f);
  for (; at.part < tile.parts(); at.part++) {
    load(step, at, scratch);
    split(step, at, scratch.queries, later);
    merge(step, tile, so_far, later);
  }
  finish(step, tile, at.kv_head, so_far);
}

void AttendEnd::item(Step& step, int number, Scratch&) {
  const int kv_head = number % attend_.a_.kv_heads;
  const auto& tile = attend_.tiles_[number / attend_.a_.kv_heads];
  const int merged = attend_.merged_[number].parts;
  if (merged == tile.parts() && merged > 0) return;
  const std::size_t first = kv_head * attend_.items_.size() + tile.partial;
  const Partial so_far = attend_.slot(step, first);
  if (merged == 0) std::fill(so_far.total, so_far.total + tile.count, 0.0f);  // it sees nothing: it has no parts
  for (int part = merged; part < tile.parts(); part++) attend_.merge(step, tile, so_far, attend_.slot(step, first + part));
  attend_.finish(step, tile, kv_head, so_far);
}

}  // namespace qkv
