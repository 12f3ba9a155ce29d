// What the tile registers compute of bf16, in vectors: the same sums in the same order, to the bit. A tile that
// multiplies sums even columns and odd ones apart, 32 columns at a time, and adds both to what it was; each product
// is exact in a float, and numbers too small to be normal are zeros. For few rows it is memory that takes the time,
// and a processor that uses its tile registers runs all else at a lower clock: a step of one row by a tenth.
#pragma once

#include "attend.h"
#include "linear.h"

namespace qkv::QKV_ISA {

constexpr int FEW_ROWS = 4;     // that are multiplied in vectors
constexpr int FEW_QUERIES = 8;  // likewise

// As long as it lives, numbers too small to be normal are zeros. All that is computed meanwhile comes from memory
// and goes to memory.
class FlushSmall {
 public:
  FlushSmall() : before_(_mm_getcsr()) { set(before_ | 0x8040); }
  FlushSmall(const FlushSmall&) = delete;
  ~FlushSmall() { set(before_); }

 private:
  static void set(unsigned to) { asm volatile("ldmxcsr %0" : : "m"(to) : "memory"); }
  unsigned before_;
};

// Of 16 pairs of bf16 the first of each, and the second.
struct Apart {
  F even, odd;
  explicit Apart(const u8* pairs) {
    const __m512i both = _mm512_loadu_si512(pairs);
    even.v = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    odd.v = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<i32>(0xffff0000))));
  }
};

// 32 numbers of bf16 as floats: those of even place, then those of odd.
inline void part_pairs(const u8* from, float* to) {
  const Apart x(from);
  store(to, x.even);
  store(to + LANES, x.odd);
}

// Sums of even and of odd columns, of R rows with N vectors of weights.
template <int R, int N>
struct ApartSums {
  F even[R][N], odd[R][N];
  ApartSums() {
    for (int r = 0; r < R; r++)
      for (int n = 0; n < N; n++) even[r][n] = odd[r][n] = qkv::QKV_ISA::set(0.0f);
  }
  // weights: where each vector's pairs of columns are; x: where a row's even number is, odd ones being 16 numbers
  // on, rows `stride`
  void add(const u8* const (&weights)[N], const float* x, int stride) {
    for (int n = 0; n < N; n++) {
      const Apart w(weights[n]);
      for (int r = 0; r < R; r++) {
        even[r][n] = fma(w.even, qkv::QKV_ISA::set(x[r * stride]), even[r][n]);
        odd[r][n] = fma(w.odd, qkv::QKV_ISA::set(x[r * stride + LANES]), odd[r][n]);
      }
    }
  }
  F on(F total, int r, int n) const { return qkv::QKV_ISA::add(total, qkv::QKV_ISA::add(even[r][n], odd[r][n])); }
};

// A panel of bf16 with R rows of x.
template <int R>
void few_rows(const Matrix& matrix, int number, const u8* x, Fetch fetch, float* out) {
  const FlushSmall flushed;
  alignas(64) float apart[R * GROUP];
  F total[R][2];
  for (int r = 0; r < R; r++) total[r][0] = total[r][1] = set(0.0f);
  const u8* weights = matrix.panel(number);
  for (int column = 0; column < matrix.padded(); column += GROUP, x += R * GROUP * 2) {
    for (int r = 0; r < R; r++) part_pairs(x + r * GROUP * 2, apart + r * GROUP);
    ApartSums<R, 2> sums;
    const int pairs = matrix.padded() - column < GROUP ? (matrix.padded() - column) / 2 : GROUP / 2;
    for (int p = 0; p < pairs; p++, weights += 128) {
      fetch(weights, 128);
      sums.add({weights, weights + 64}, apart + p, GROUP);
    }
    for (int r = 0; r < R; r++)
      for (int b = 0; b < 2; b++) total[r][b] = sums.on(total[r][b], r, b);
  }
  for (int r = 0; r < R; r++)
    for (int b = 0; b < 2; b++) store(out + r * PANEL + b * LANES, total[r][b]);
}

// R queries over a split of a cache of bf16.
template <int R>
class FewQueries {
 public:
  FewQueries(const BlockShape& shape, const Queries& q, const Block* blocks, const Block* next, int first)
      : shape_(shape), q_(q), blocks_(blocks), next_(next), first_(first) {}

  void run(Partial out) {
    alignas(64) u16 rounded[R * SPLIT];
    score();
    for (int r = 0; r < R; r++) {
      for (int b = 0; b < SPLIT_BLOCKS; b++)
        if (float* at = scores_ + r * SPLIT + b * LANES; blocks_[b].key != nullptr)
          store(at, adjusted(q_, r, load(at), first_ + b * LANES));
      weigh<HeldBf16>(shape_, q_, r, blocks_, first_, scores_ + r * SPLIT, rounded + r * SPLIT, out);
    }
    for (int i = 0; i < R * SPLIT; i += GROUP) part_pairs(reinterpret_cast<const u8*>(rounded + i), weights_ + i);
    const FlushSmall flushed;
    int column = 0;
    constexpr int WIDE = R > 4 ? 1 : 2;
    for (; column + WIDE * LANES <= shape_.value_dim; column += WIDE * LANES) mix<WIDE>(column, out.mixed + column);
    for (; column < shape_.value_dim; column += LANES) mix<1>(column, out.mixed + column);
  }

 private:
  void score() {
    const FlushSmall flushed;
    for (int d = 0; d < R * shape_.key_dim; d += GROUP) part_pairs(q_.packed + d * 2, queries_ + d);
    for (int b = 0; b < SPLIT_BLOCKS; b += 2) score_two(b);
  }

  // Two blocks share what is read of the queries; where one of them is seen by none, the other is taken twice.
  void score_two(int b) {
    const u8 *first = blocks_[b].key, *second = blocks_[b + 1].key;
    if (first == nullptr && second == nullptr) return;
    // meanwhile the values come from memory, and during the mixing the next split's keys
    Ahead values(q_.once ? blocks_[b].value : nullptr, shape_.value_bytes());
    Ahead more(q_.once ? blocks_[b + 1].value : nullptr, shape_.value_bytes());
    const u8* keys[2] = {first == nullptr ? second : first, second == nullptr ? first : second};
    F total[R][2];
    for (int r = 0; r < R; r++) total[r][0] = total[r][1] = set(0.0f);
    for (int d = 0; d < shape_.key_dim; d += GROUP) {
      ApartSums<R, 2> sums;
      for (int p = 0; p < GROUP / 2; p++, keys[0] += 64, keys[1] += 64) {
        values.fetch(64), more.fetch(64);
        sums.add({keys[0], keys[1]}, queries_ + d + p, shape_.key_dim);
      }
      for (int r = 0; r < R; r++)
        for (int n = 0; n < 2; n++) total[r][n] = sums.on(total[r][n], r, n);
    }
    for (int r = 0; r < R; r++)
      for (int n = 0; n < 2; n++) store(scores_ + r * SPLIT + (b + n) * LANES, total[r][n]);
  }

  // N blocks of 16 columns.
  template <int N>
  void mix(int column, float* out) {
    F total[R][N];
    for (int r = 0; r < R; r++)
      for (int n = 0; n < N; n++) total[r][n] = set(0.0f);
    for (int b = 0; b < SPLIT_BLOCKS; b++) {
      if (blocks_[b].key == nullptr) continue;
      // of the next split's keys as large a part as these are of the columns
      const std::size_t part = shape_.key_bytes() * N * LANES / shape_.value_dim;
      const u8* next = q_.once && next_ != nullptr ? next_[b].key : nullptr;
      Ahead ahead(next == nullptr ? nullptr : next + part * (column / (N * LANES)), part);
      ApartSums<R, N> sums;
      // two blocks' weights lie together: pairs of the second begin in the middle
      const float* weights = weights_ + b / 2 * GROUP + b % 2 * (LANES / 2);
      const u8* value = blocks_[b].value + column * 4;
      for (int p = 0; p < BLOCK_TOKENS / 2; p++, value += shape_.value_dim * 4) {
        ahead.fetch(static_cast<int>(part) / (BLOCK_TOKENS / 2));
        const u8* columns[N];
        for (int n = 0; n < N; n++) columns[n] = value + n * 64;
        sums.add(columns, weights + p, SPLIT);
      }
      for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) total[r][n] = sums.on(total[r][n], r, n);
    }
    for (int r = 0; r < R; r++)
      for (int n = 0; n < N; n++) store(out + r * shape_.value_dim + n * LANES, total[r][n]);
  }

  const BlockShape& shape_;
  const Queries& q_;
  const Block *blocks_, *next_;
  int first_;
  alignas(64) float queries_[R * MOST_DIMENSIONS];  // by 32 dimensions: even ones, then odd ones
  alignas(64) float scores_[R * SPLIT];
  alignas(64) float weights_[R * SPLIT];  // likewise, of tokens
};

// Calls `run` for a number from 1 to MOST that is known when this is compiled.
template <int MOST, class Run>
void for_count(int count, Run run) {
  if constexpr (MOST > 1) {
    if (count < MOST) return for_count<MOST - 1>(count, run);
  }
  run.template operator()<MOST>();
}

}  // namespace qkv::QKV_ISA
