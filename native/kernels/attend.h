// Attention over blocks of the cache: a softmax for each split of 128 tokens, and how two are merged.
// Splits begin at fixed tokens, so that a query's result does not depend on how the work was cut
// (Milakov and Gimelshein 2018 for the merging; Dao et al. 2022 for doing it block by block).
#pragma once

#include <cmath>
#include <limits>

#include "ahead.h"
#include "rows.h"

namespace qkv::QKV_ISA {

constexpr float NEVER = -std::numeric_limits<float>::infinity();

struct HeldF32 {
  static constexpr int unit = 1;  // dimensions of a key that stand together
  template <int R>
  static void scores(const BlockShape& shape, const Queries& q, const u8* block, Ahead ahead, F* out) {
    F even[R], odd[R];
    for (int r = 0; r < R; r++) even[r] = odd[r] = set(0.0f);
    const float* key = reinterpret_cast<const float*>(block);
    const float* x = reinterpret_cast<const float*>(q.packed);
    for (int d = 0; d < shape.key_dim; d += 2, key += 2 * LANES, x += 2 * R) {
      ahead.fetch(2 * LANES * sizeof(float));
      const F a = load(key), b = load(key + LANES);
      for (int r = 0; r < R; r++) even[r] = fma(a, set(x[r]), even[r]), odd[r] = fma(b, set(x[R + r]), odd[r]);
    }
    for (int r = 0; r < R; r++) out[r] = add(even[r], odd[r]);
  }
  using Weight = float;
  static void weigh(float* to, F p, const BlockShape&, const u8*) { store(to, p); }
  template <int R, int N>
  static void mix(const BlockShape& shape, const u8* block, Ahead ahead, const float* weights, int column, F (&mixed)[R][N]) {
    const float* value = reinterpret_cast<const float*>(block) + column;
    for (int t = 0; t < BLOCK_TOKENS; t++, value += shape.value_dim) {
      ahead.fetch(N * LANES * sizeof(float));
      for (int n = 0; n < N; n++) {
        const F v = load(value + n * LANES);
        for (int r = 0; r < R; r++) mixed[r][n] = fma(v, set(weights[r * SPLIT + t]), mixed[r][n]);
      }
    }
  }
};

struct HeldBf16 {
  static constexpr int unit = 2;
  template <int R>
  static void scores(const BlockShape& shape, const Queries& q, const u8* block, Ahead ahead, F* out) {
    F even[R], odd[R];
    for (int r = 0; r < R; r++) even[r] = odd[r] = set(0.0f);
    const u16* key = reinterpret_cast<const u16*>(block);
    const u8* x = q.packed;
    for (int d = 0; d < shape.key_dim; d += 4, key += 4 * LANES, x += 8 * R) {
      ahead.fetch(4 * LANES * sizeof(u16));
      for (int r = 0; r < R; r++) {
        even[r] = dot2(even[r], key, word_at(x + 4 * r));
        odd[r] = dot2(odd[r], key + 2 * LANES, word_at(x + 4 * R + 4 * r));
      }
    }
    for (int r = 0; r < R; r++) out[r] = add(even[r], odd[r]);
  }
  using Weight = u16;
  static void weigh(u16* to, F p, const BlockShape&, const u8*) { store_bf16(to, p); }
  template <int R, int N>
  static void mix(const BlockShape& shape, const u8* block, Ahead ahead, const u16* weights, int column, F (&mixed)[R][N]) {
    const u16* value = reinterpret_cast<const u16*>(block) + 2 * column;
    for (int t = 0; t < BLOCK_TOKENS; t += 2, value += 2 * shape.value_dim) {
      ahead.fetch(2 * N * LANES * sizeof(u16));
      for (int r = 0; r < R; r++) {
        const i32 pair = word_at(weights + r * SPLIT + t);
        for (int n = 0; n < N; n++) mixed[r][n] = dot2(mixed[r][n], value + n * 2 * LANES, pair);
      }
    }
  }
};

struct HeldI8 {
  static constexpr int unit = 4;
  template <int R>
  static void scores(const BlockShape& shape, const Queries& q, const u8* block, Ahead ahead, F* out) {
    I products[R];
    for (int r = 0; r < R; r++) products[r] = set(SIGNED_CODES ? 0 : -128 * q.sum[r]);
    const u8* x = q.packed;
    for (int d = 0; d < shape.key_dim; d += 4, block += 64, x += 4 * R) {
      ahead.fetch(64);
      const B key = load_bytes(block);
      for (int r = 0; r < R; r++) products[r] = dot4<8>(products[r], key, word_at(x + 4 * r));
    }
    const F scale = load(reinterpret_cast<const float*>(block));
    for (int r = 0; r < R; r++) out[r] = mul(to_float(products[r]), mul(scale, set(q.scale[r])));
  }
  using Weight = float;
  static void weigh(float* to, F p, const BlockShape& shape, const u8* block) {
    const u8* scales = block + std::size_t(shape.value_dim) * BLOCK_TOKENS;
    // what is hidden has no weight, also where its scale is no number
    store(to, where_positive(p, mul(p, load(reinterpret_cast<const float*>(scales))), p));
  }
  template <int R, int N>
  static void mix(const BlockShape& shape, const u8* block, Ahead ahead, const float* weights, int column, F (&mixed)[R][N]) {
    const i8* value = reinterpret_cast<const i8*>(block) + column;
    for (int t = 0; t < BLOCK_TOKENS; t++, value += shape.value_dim) {
      ahead.fetch(N * LANES);
      for (int n = 0; n < N; n++) {
        const F v = bytes(value + n * LANES);
        for (int r = 0; r < R; r++) mixed[r][n] = fma(v, set(weights[r * SPLIT + t]), mixed[r][n]);
      }
    }
  }
};

inline F adjusted(const Queries& q, int r, F score, int first) {
  if (q.cap != 0) score = mul(set(q.cap), tanh_of(div(score, set(q.cap))));
  if (q.slope[r] == 0 && q.bias[r] == nullptr) return score;
  alignas(64) float added[LANES];
  for (int i = 0; i < LANES; i++) {
    const int ahead = first + i - q.position[r];
    added[i] = -q.slope[r] * static_cast<float>(ahead < 0 ? -ahead : ahead);
    if (q.bias[r] != nullptr) added[i] += q.bias[r][(ahead < -q.reach ? -q.reach : ahead > q.reach ? q.reach : ahead) + q.reach];
  }
  return add(score, load(added));
}

// The softmax of a query's scores over a split: what the values weigh, and what it takes to merge it.
template <class Held>
void weigh(const BlockShape& shape, const Queries& q, int r, const Block* blocks, int first, float* scores,
           typename Held::Weight* weights, Partial out) {
  F top = set(NEVER), total = set(0.0f);
  for (int b = 0; b < SPLIT_BLOCKS; b++) {
    if (blocks[b].key == nullptr) continue;
    const int from = q.from[r] - first - b * LANES, to = q.to[r] - first - b * LANES;
    F s = within(load(scores + b * LANES), from < 0 ? 0 : from > LANES ? LANES : from, to < 0 ? 0 : to > LANES ? LANES : to, NEVER);
    store(scores + b * LANES, s);
    top = max(top, s);
  }
  const float most = largest(top);
  for (int b = 0; b < SPLIT_BLOCKS; b++) {
    if (blocks[b].key == nullptr) continue;
    const F s = load(scores + b * LANES);
    // e^(never) is no exact zero: what is not seen has no weight at all
    const F p = where_positive(sub(s, set(-3.0e38f)), exponential(sub(s, set(most))), set(0.0f));
    total = add(total, p);
    Held::weigh(weights + b * LANES, p, shape, blocks[b].value);
  }
  out.top[r] = most;
  out.total[r] = sum(total);
}

template <class Held, int R>
void attend_tile(const BlockShape& shape, const Queries& q, const Block* blocks, const Block* next, int first, Partial out) {
  using Weight = typename Held::Weight;
  alignas(64) float scores[R * SPLIT];
  alignas(64) Weight weights[R * SPLIT];
  for (int b = 0; b < SPLIT_BLOCKS; b++) {
    if (blocks[b].key == nullptr) continue;
    F found[R];  // meanwhile the values come from memory, and during the mixing the next split's keys
    Held::template scores<R>(shape, q, blocks[b].key, Ahead(q.once ? blocks[b].value : nullptr, shape.value_bytes()), found);
    for (int r = 0; r < R; r++)
      store(scores + r * SPLIT + b * LANES, adjusted(q, r, found[r], first + b * LANES));
  }
  for (int r = 0; r < R; r++) weigh<Held>(shape, q, r, blocks, first, scores + r * SPLIT, weights + r * SPLIT, out);
  constexpr int WIDE = 4;
  int column = 0;
  const auto columns = [&]<int N>() {
    F mixed[R][N];
    for (int r = 0; r < R; r++)
      for (int n = 0; n < N; n++) mixed[r][n] = set(0.0f);
    for (int b = 0; b < SPLIT_BLOCKS; b++)
      if (blocks[b].key != nullptr) {
        const Ahead ahead(q.once && column == 0 && next != nullptr ? next[b].key : nullptr, shape.key_bytes());
        Held::template mix<R, N>(shape, blocks[b].value, ahead, weights + b * LANES, column, mixed);
      }
    for (int r = 0; r < R; r++)
      for (int n = 0; n < N; n++) store(out.mixed + r * shape.value_dim + column + n * LANES, mixed[r][n]);
    column += N * LANES;
  };
  while (column + WIDE * LANES <= shape.value_dim) columns.template operator()<WIDE>();
  while (column < shape.value_dim) columns.template operator()<1>();
}

template <class Held, int MOST>
void attend_held(const BlockShape& shape, const Queries& q, const Block* blocks, const Block* next, int first, Partial out) {
  if constexpr (MOST > 1) {
    if (q.count < MOST) return attend_held<Held, MOST - 1>(shape, q, blocks, next, first, out);
  }
  attend_tile<Held, MOST>(shape, q, blocks, next, first, out);
}

inline void attend(const BlockShape& shape, const Queries& q, const Block* blocks, const Block* next, int first, Partial out) {
  switch (shape.kept) {
    case Kept::F32: return attend_held<HeldF32, QUERY_TILE>(shape, q, blocks, next, first, out);
    case Kept::BF16: return attend_held<HeldBf16, QUERY_TILE>(shape, q, blocks, next, first, out);
    case Kept::I8: return attend_held<HeldI8, QUERY_TILE>(shape, q, blocks, next, first, out);
  }
}

inline int queries(const BlockShape&) { return QUERY_TILE; }

inline void merge(Partial so_far, Partial later, int count, int value_dim) {
  alignas(64) float here[MOST_QUERIES], there[MOST_QUERIES], top[MOST_QUERIES];
  along(count, [&](int i, int n) {
    const F before = load(so_far.top + i, n), after = load(later.top + i, n), most = max(before, after);
    store(here + i, exponential(sub(before, most)));
    store(there + i, exponential(sub(after, most)));
    store(top + i, most);
  });
  for (int i = 0; i < count; i++) {
    if (later.total[i] == 0) continue;
    float* mixed = so_far.mixed + i * value_dim;
    const float* more = later.mixed + i * value_dim;
    if (so_far.total[i] == 0) {
      so_far.top[i] = later.top[i], so_far.total[i] = later.total[i];
      std::memcpy(mixed, more, value_dim * sizeof(float));
      continue;
    }
    so_far.top[i] = top[i], so_far.total[i] = so_far.total[i] * here[i] + later.total[i] * there[i];
    for (int d = 0; d < value_dim; d += LANES)
      store(mixed + d, fma(load(more + d), set(there[i]), mul(load(mixed + d), set(here[i]))));
  }
}

// The greatest magnitude of x over 127, which is the scale of its bytes; 0 for zeros.
inline float byte_scale(const float* x, int n) {
  F most = set(0.0f), sound = set(0.0f);
  along(n, [&](int i, int c) {
    most = max(most, magnitude(load(x + i, c)));
    sound = add(sound, mul(load(x + i, c), set(0.0f)));  // no number where one of x is none, or infinite
  });
  return largest(most) / 127 + sum(sound);
}

inline i8 as_byte(float x, float inverse) {
  const float rounded = std::nearbyint(x * inverse);
  return static_cast<i8>(rounded == rounded ? rounded : 0);
}

// A token's key and value of one head into its place in a block. Dimensions past the last are zeros.
inline void keep(const BlockShape& shape, const float* key, int key_dim, const float* value, int value_dim, Block to, int place) {
  float sound = 0;
  for (int d = 0; d < value_dim; d++) sound += value[d] * 0;
  if (sound != 0) {
    // a hidden value has no weight, but nothing times no number is no number: so the key becomes none
    // instead, which only those meet who see it
    float none[MOST_DIMENSIONS], nothing[MOST_DIMENSIONS];
    for (int d = 0; d < MOST_DIMENSIONS; d++) none[d] = NAN, nothing[d] = 0;
    return keep(shape, none, key_dim, nothing, value_dim, to, place);
  }
  u8 *block = to.key, *values = to.value;
  if (shape.kept == Kept::F32) {
    for (int d = 0; d < key_dim; d++) std::memcpy(block + (d * LANES + place) * 4, key + d, 4);
    std::memcpy(values + std::size_t(place) * shape.value_dim * 4, value, value_dim * 4);
  } else if (shape.kept == Kept::BF16) {
    alignas(64) u16 rounded[MOST_DIMENSIONS];
    along(key_dim, [&](int d, int n) { store_bf16(rounded + d, load(key + d, n)); });
    for (int d = 0; d < shape.key_dim; d += 2) std::memcpy(block + (d / 2 * LANES + place) * 4, rounded + d, 4);
    along(value_dim, [&](int d, int n) { store_bf16(rounded + d, load(value + d, n)); });
    u16* v = reinterpret_cast<u16*>(values) + std::size_t(place / 2) * shape.value_dim * 2 + place % 2;
    for (int d = 0; d < value_dim; d++) v[d * 2] = rounded[d];
  } else {
    const float scales[2] = {byte_scale(key, key_dim), byte_scale(value, value_dim)};
    const float inverse[2] = {scales[0] > 0 ? 1 / scales[0] : 0, scales[1] > 0 ? 1 / scales[1] : 0};
    for (int d = 0; d < shape.key_dim; d++)
      block[(d / 4 * LANES + place) * 4 + d % 4] = static_cast<u8>((d < key_dim ? as_byte(key[d], inverse[0]) : 0) + 128);
    for (int d = 0; d < value_dim; d++)
      values[std::size_t(place) * shape.value_dim + d] = static_cast<u8>(as_byte(value[d], inverse[1]));
    std::memcpy(block + shape.key_dim * LANES + place * 4, &scales[0], 4);
    std::memcpy(values + shape.value_dim * LANES + place * 4, &scales[1], 4);
  }
}

// A query, scaled, into its place among q.count that are read together.
inline void pack(const BlockShape& shape, Queries& q, int place, const float* query, int key_dim, float scale) {
  const int count = q.count;
  if (shape.kept == Kept::I8) {
    const float size = byte_scale(query, key_dim), inverse = size > 0 ? 1 / size : 0;
    i32 total = 0;
    for (int d = 0; d < shape.key_dim; d++) {
      const i8 byte = d < key_dim ? as_byte(query[d], inverse) : 0;
      q.packed[(d / 4 * count + place) * 4 + d % 4] = static_cast<u8>(byte);
      total += byte;
    }
    q.scale[place] = size * scale, q.sum[place] = total;
    return;
  }
  alignas(64) float scaled[LANES];
  alignas(64) u16 rounded[LANES];
  for (int d = 0; d < shape.key_dim; d += LANES) {
    const int there = key_dim - d < LANES ? key_dim - d : LANES;
    const int wide = shape.key_dim - d < LANES ? shape.key_dim - d : LANES;
    const F x = mul(load(query + d, there), set(scale));
    if (shape.kept == Kept::F32) {
      store(scaled, x);
      for (int i = 0; i < wide; i++) std::memcpy(q.packed + ((d + i) * count + place) * 4, scaled + i, 4);
    } else {
      store_bf16(rounded, x);
      for (int i = 0; i < wide; i += 2) std::memcpy(q.packed + ((d + i) / 2 * count + place) * 4, rounded + i, 4);
    }
  }
}

}  // namespace qkv::QKV_ISA
