// Attention over a cache of bf16 in the tile registers: 16 queries at once, and any smaller number likewise.
#pragma once

#include "attend.h"

namespace qkv::QKV_ISA {

// Keys whose dimensions fill the registers; others are left to vectors.
inline bool in_tiles(const BlockShape& shape) { return shape.kept == Kept::BF16 && shape.key_dim % GROUP == 0; }

inline int queries_of_tiles(const BlockShape& shape) { return in_tiles(shape) ? LANES : queries(shape); }

// A query, scaled, into its place: bf16 [query][dimension].
inline void pack_for_tiles(const BlockShape& shape, Queries& q, int place, const float* query, int key_dim, float scale) {
  if (!in_tiles(shape)) return pack(shape, q, place, query, key_dim, scale);
  u16* to = reinterpret_cast<u16*>(q.packed) + place * shape.key_dim;
  for (int d = 0; d < shape.key_dim; d += LANES)
    store_bf16(to + d, mul(load(query + d, key_dim - d < LANES ? key_dim - d : LANES), set(scale)));
}

// Registers, from 0 on: products, four of them; queries; weights of a block's values; keys; values.
class TileAttention {
 public:
  TileAttention(const BlockShape& shape, const Queries& q, const Block* blocks, const Block* next, int first)
      : shape_(shape), q_(q), blocks_(blocks), next_(next), first_(first) {}

  void run(Partial out) {
    const int n = q_.count;
    const Shapes shapes{{n, 64}, {n, 64}, {n, 64}, {n, 64}, {n, 64}, {n, BLOCK_TOKENS * 2}, {LANES, 64}, {BLOCK_TOKENS / 2, 64}};
    score();
    for (int r = 0; r < n; r++)
      weigh<HeldBf16>(shape_, q_, r, blocks_, first_, scores_ + r * SPLIT, weights_ + r * SPLIT, out);
    asm volatile("" : : "r"(weights_) : "memory");  // they are written before tiles are loaded from them
    for (int column = 0; column < shape_.value_dim; column += 4 * LANES)
      mix(column, (shape_.value_dim - column) / LANES, out.mixed + column);
  }

 private:
  void score() {
    for (int b = 0; b < SPLIT_BLOCKS; b++) {
      if (blocks_[b].key == nullptr) continue;
      // meanwhile the values come from memory, and during the mixing the next split's keys
      Ahead ahead(q_.once ? blocks_[b].value : nullptr, shape_.value_bytes());
      const u8 *key = blocks_[b].key, *x = q_.packed;
      _tile_zero(0);
      for (int d = 0; d < shape_.key_dim; d += GROUP, key += GROUP * LANES * 2, x += GROUP * 2) {
        ahead.fetch(GROUP * LANES * 2);
        _tile_loadd(4, x, shape_.key_dim * 2);
        _tile_loadd(6, key, 64);
        _tile_dpbf16ps(0, 4, 6);
      }
      _tile_stored(0, scores_ + b * LANES, SPLIT * 4);
    }
    for (int r = 0; r < q_.count; r++)
      for (int b = 0; (q_.cap != 0 || q_.slope[r] != 0 || q_.bias[r] != nullptr) && b < SPLIT_BLOCKS; b++) {
        float* at = scores_ + r * SPLIT + b * LANES;
        if (blocks_[b].key != nullptr) store(at, adjusted(q_, r, load(at), first_ + b * LANES));
      }
  }

  // `wide` blocks of 16 columns, four at most.
  void mix(int column, int wide, float* out) {
    const int stride = shape_.value_dim * 4;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int b = 0; b < SPLIT_BLOCKS; b++) {
      if (blocks_[b].key == nullptr) continue;
      Ahead(q_.once && column == 0 && next_ != nullptr ? next_[b].key : nullptr, shape_.key_bytes()).fetch(static_cast<int>(shape_.key_bytes()));
      const u8* value = blocks_[b].value + column * 4;
      _tile_loadd(5, weights_ + b * LANES, SPLIT * 2);
      _tile_loadd(7, value, stride);
      _tile_dpbf16ps(0, 5, 7);
      if (wide < 2) continue;
      _tile_loadd(7, value + LANES * 4, stride);
      _tile_dpbf16ps(1, 5, 7);
      if (wide < 3) continue;
      _tile_loadd(7, value + 2 * LANES * 4, stride);
      _tile_dpbf16ps(2, 5, 7);
      if (wide < 4) continue;
      _tile_loadd(7, value + 3 * LANES * 4, stride);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, stride);
    if (wide < 2) return;
    _tile_stored(1, out + LANES, stride);
    if (wide < 3) return;
    _tile_stored(2, out + 2 * LANES, stride);
    if (wide < 4) return;
    _tile_stored(3, out + 3 * LANES, stride);
  }

  const BlockShape& shape_;
  const Queries& q_;
  const Block *blocks_, *next_;
  int first_;
  alignas(64) float scores_[LANES * SPLIT];
  alignas(64) u16 weights_[LANES * SPLIT];
};

inline void attend_in_tiles(const BlockShape& shape, const Queries& q, const Block* blocks, const Block* next, int first, Partial out) {
  if (!in_tiles(shape)) return attend(shape, q, blocks, next, first, out);
  TileAttention(shape, q, blocks, next, first).run(out);
}

}  // namespace qkv::QKV_ISA
