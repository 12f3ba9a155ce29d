// Attention of the rows over the cache.
#pragma once

#include <optional>

#include "step.h"

namespace qkv {

struct Attention {
  Span out, query;
  Span far;  // the queries as the first keys meet them; see `first`
  int slot, heads, kv_heads;
  float scale;
  std::optional<int> before = {}, after = {}, chunk = {};  // which keys a query sees; see Sight in program.py
  int first = 0;  // with `before`: how many first keys it sees as well, at most a split of the cache
  float cap = 0;
  std::vector<float> sinks = {};   // of each head, or none
  std::vector<float> slopes = {};  // of each head, or none
  std::vector<float> bias = {};    // [head][2 reach + 1], by how far the key is ahead, or none
  int reach = 0;
};

// So many queries as kernels read together (pairs of a row and a head) that share a head of keys and values are a tile.
// Its parts are the splits of the cache, after the first keys where a gap parts them from the window.
// Where there are few tiles, each part is an item of its own: a thread that takes the first merges on as long as it
// also takes those that follow, and AttendEnd puts the others to them. Otherwise a tile's parts are taken in turn.
// Both merge the same parts in the same order.
class Attend final : public Phase {
 public:
  explicit Attend(Attention attention) : a_(std::move(attention)) {}
  void reserve(Step&, int rows) override;
  int begin(Step&) override;
  void item(Step&, int number, Scratch&) override;

 private:
  friend class AttendEnd;
  struct Tile {
    int first, count;  // pairs, from the first of the tile's rows
    bool once;         // no other tile reads the same keys
    int row, sequence;
    int from, to;      // tokens that any of them sees
    int split, end;    // of the cache
    int far;           // 1 where first keys are a part of their own, before the splits
    int partial;       // where its parts begin among those of all tiles
    int parts() const { return far + end - split; }
  };
  struct Place {  // what is read at once
    const Tile* tile = nullptr;
    int kv_head = 0, part = 0;
    bool far() const { return part < tile->far; }
    int start() const { return far() ? 0 : (tile->split + part - tile->far) * SPLIT; }
  };
  struct alignas(64) Merged {  // a line of the cache each, as several threads count
    int parts = 0;
  };
  void plan(Step&);
  void part(Step&, int number, Scratch&);
  bool parted(const Step&, int row) const;
  void seen(const Step&, int row, int& from, int& to) const;
  void load(Step&, const Place&, Scratch&) const;
  void pack(Step&, const Place&, int pair, Queries&) const;
  void find(const Step&, const Place&, Block* blocks) const;
  void split(Step&, const Place&, const Queries&, Partial) const;
  void merge(const Step&, const Tile&, Partial so_far, Partial later) const;
  Place place(int number) const;
  int unit(const Place& at) const { return static_cast<int>(at.tile - tiles_.data()) * a_.kv_heads + at.kv_head; }
  void finish(Step&, const Tile&, int kv_head, Partial) const;
  int group() const { return a_.heads / a_.kv_heads; }
  // where the part that is an item of this number is held
  Partial slot(const Step& step, std::size_t number) const {
    return partial(step.partials.as<float>() + number * partial_size(step.cache.shape(a_.slot).value_dim));
  }
  Partial partial(float* at) const { return {at, at + most(), at + 2 * most()}; }
  std::size_t partial_size(int value_dim) const { return std::size_t(most()) * (2 + value_dim); }
  int most() const { return round_up(most_, 8); }  // so that what is mixed begins with a line of the cache

  Attention a_;
  int most_ = 0;  // queries of a tile
  std::vector<Tile> tiles_;
  std::vector<int> items_;       // the tile of each part
  std::vector<Merged> merged_;   // of each tile and head: parts, from the first on, that are put together
  unsigned run_ = 0;        // how often it has begun
  bool apart_ = false;      // every part an item
};

class AttendEnd final : public Phase {
 public:
  explicit AttendEnd(Attend& attend) : attend_(attend) {}
  int begin(Step&) override { return attend_.apart_ ? static_cast<int>(attend_.tiles_.size()) * attend_.a_.kv_heads : 0; }
  void item(Step&, int number, Scratch&) override;
  bool alone(const Step& step) const override { return step.count < 4; }

 private:
  Attend& attend_;
};

}  // namespace qkv
