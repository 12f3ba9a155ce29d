// Rows of x times a panel of 32 rows of a matrix. See formats.h for how a panel lies in memory.
#pragma once

#include "../kernels.h"
#include "ahead.h"

namespace qkv::QKV_ISA {

// Sums stay in registers only where the loops over them are gone; the compiler does not see that by itself.
#define QKV_UNROLL_ROWS _Pragma("GCC unroll 16")
#define QKV_UNROLL_BLOCKS _Pragma("GCC unroll 4")

// Asks for what comes next: of the panel itself where it comes from memory; and each time it is gone through for
// a part of what the thread reads afterwards, which memory has nothing else to do for.
class Fetch {
 public:
  Fetch() = default;
  Fetch(const Pass& pass, int steps) : near_(pass.before == 0) {
    if (pass.after == nullptr) return;
    const int lines = ceil_div(static_cast<int>(pass.bytes / ROUND_LINE), pass.times);
    each_ = ceil_div(lines, steps) * ROUND_LINE;
    later_ = Ahead(pass.after + std::size_t(lines) * ROUND_LINE * pass.before, std::size_t(lines) * ROUND_LINE);
  }
  // before each step, which reads so many bytes
  void operator()(const u8* at, int bytes) {
    for (int i = 0; near_ && i < bytes; i += ROUND_LINE) prefetch(at + NEAR + i);
    later_.fetch(each_);
  }

 private:
  bool near_ = false;
  int each_ = 0;
  Ahead later_;
};

// The codes of 16 rows x 4 columns: step `s` of the 8 of a record.
template <int BITS>
inline B codes(const u8* record, int s, int block) {
  if constexpr (BITS == 8) return load_bytes(record + (s * 2 + block) * 64);
  const B low = field(load_bytes(record + (s / 2 * 2 + block) * 64), s % 2 * 4, 4, 0);
  if constexpr (BITS == 5) return either(low, field(load_bytes(record + 512 + block * 64), s, 1, 4));
  if constexpr (BITS == 6)
    return either(low, field(load_bytes(record + 512 + (s / 4 * 2 + block) * 64), s % 4 * 2, 2, 4));
  return low;
}

// The records of a tile of T rows of x.
template <int T>
struct Records {
  const u8* at;
  i32 word(int row, int step) const { return word_at(at + row * GROUP + step * 4); }
  float scale(int row) const { return number(0, row); }
  float weighted(int row) const { return number(1, row); }  // scale * sum
  i32 sum(int row) const { return word_at(at + T * (GROUP + 8) + row * 4); }
  i32 first_sum(int row) const { return word_at(at + T * (GROUP + 12) + row * 4); }
  void next() { at += T * 48; }

 private:
  float number(int which, int row) const {
    float value;
    std::memcpy(&value, at + T * (GROUP + 4 * which) + row * 4, 4);
    return value;
  }
};

template <int BITS, int ZERO, Scaling SCALING>
struct Coded {
  static constexpr int zero = BITS == 8 && SIGNED_CODES ? 0 : ZERO;
  static constexpr int bits = BITS, code_bytes = BITS * 128;
  static constexpr bool nested = SCALING == Scaling::Nested || SCALING == Scaling::NestedBySixteen;
  static constexpr bool minimum = SCALING == Scaling::ScaleAndMinimum || SCALING == Scaling::Nested;
  static constexpr int halves = SCALING == Scaling::NestedBySixteen ? 2 : 1;  // runs of one scale in a record
  static constexpr int record = code_bytes + (SCALING == Scaling::ScaleAndMinimum ? 128 : 64);
  static constexpr int header = SCALING == Scaling::Nested ? 128 : SCALING == Scaling::NestedBySixteen ? 64 : 0;

  // Scales (and minima) of the 16 rows of a block for one run of columns.
  static F scale(const u8* scales, int run, int block, F d) {
    if constexpr (SCALING == Scaling::NestedBySixteen)
      return mul(d, bytes(reinterpret_cast<const i8*>(scales) + run * PANEL + block * LANES));
    if constexpr (SCALING == Scaling::Nested) return mul(d, bytes(scales + block * LANES));
    return halves_at(scales, block);
  }
  static F least(const u8* scales, int block, F m) {
    if constexpr (SCALING == Scaling::Nested) return sub(set(0.0f), mul(m, bytes(scales + PANEL + block * LANES)));
    return halves_at(scales + 64, block);
  }
  static F halves_at(const u8* at, int block) { return qkv::QKV_ISA::halves(at + block * LANES * 2); }

  template <int T>
  static void panel(const u8* at, const u8* rows, int groups, Fetch fetch, int block0, float* out) {
    F total[T][BLOCKS];
    QKV_UNROLL_ROWS
    for (int t = 0; t < T; t++)
      QKV_UNROLL_BLOCKS
      for (int b = 0; b < BLOCKS; b++) total[t][b] = set(0.0f);
    F d[BLOCKS] = {}, m[BLOCKS] = {};
    Records<T> x{rows};
    for (int g = 0; g < groups; g++, at += record, x.next()) {
      if constexpr (nested) {
        if (g % 8 == 0) {
          QKV_UNROLL_BLOCKS
          for (int b = 0; b < BLOCKS; b++) {
            d[b] = halves_at(at, block0 + b);
            if constexpr (minimum) m[b] = halves_at(at + 64, block0 + b);
          }
          at += header;
        }
      }
      fetch(at, record);
      const u8* scales = at + code_bytes;
      for (int run = 0; run < halves; run++) {
        I products[T][BLOCKS];
        QKV_UNROLL_ROWS
        for (int t = 0; t < T; t++) {
          I start = set(i32{0});
          if constexpr (zero != 0) {
            const i32 sum = halves == 1 ? x.sum(t) : run == 0 ? x.first_sum(t) : x.sum(t) - x.first_sum(t);
            start = set(-zero * sum);
          }
          QKV_UNROLL_BLOCKS
          for (int b = 0; b < BLOCKS; b++) products[t][b] = start;
        }
#pragma GCC unroll 8
        for (int s = run * 8 / halves; s < (run + 1) * 8 / halves; s++) {
          B w[BLOCKS];
          QKV_UNROLL_BLOCKS
          for (int b = 0; b < BLOCKS; b++) w[b] = codes<BITS>(at, s, block0 + b);
          QKV_UNROLL_ROWS
          for (int t = 0; t < T; t++) {
            const i32 word = x.word(t, s);
            QKV_UNROLL_BLOCKS
            for (int b = 0; b < BLOCKS; b++) products[t][b] = dot4<BITS>(products[t][b], w[b], word);
          }
        }
        QKV_UNROLL_BLOCKS
        for (int b = 0; b < BLOCKS; b++) {
          const F by = scale(scales, run, block0 + b, d[b]);
          QKV_UNROLL_ROWS
          for (int t = 0; t < T; t++)
            total[t][b] = fma(to_float(products[t][b]), mul(by, set(x.scale(t))), total[t][b]);
        }
      }
      if constexpr (minimum) {
        QKV_UNROLL_BLOCKS
        for (int b = 0; b < BLOCKS; b++) {
          const F low = least(scales, block0 + b, m[b]);
          QKV_UNROLL_ROWS
          for (int t = 0; t < T; t++) total[t][b] = fma(low, set(x.weighted(t)), total[t][b]);
        }
      }
    }
    QKV_UNROLL_ROWS
    for (int t = 0; t < T; t++)
      QKV_UNROLL_BLOCKS
      for (int b = 0; b < BLOCKS; b++) store(out + t * PANEL + (block0 + b) * LANES, total[t][b]);
  }
};

struct Bf16 {
  template <int T>
  static void panel(const u8* at, const u8* rows, int columns, Fetch fetch, int block0, float* out) {
    F total[T][BLOCKS];
    QKV_UNROLL_ROWS
    for (int t = 0; t < T; t++)
      QKV_UNROLL_BLOCKS
      for (int b = 0; b < BLOCKS; b++) total[t][b] = set(0.0f);
    for (int c = 0; c < columns; c += 2, at += 128, rows += T * 4) {
      fetch(at, 128);
      QKV_UNROLL_ROWS
      for (int t = 0; t < T; t++) {
        const i32 pair = word_at(rows + t * 4);
        QKV_UNROLL_BLOCKS
        for (int b = 0; b < BLOCKS; b++)
          total[t][b] = dot2(total[t][b], reinterpret_cast<const u16*>(at) + (block0 + b) * PANEL, pair);
      }
    }
    QKV_UNROLL_ROWS
    for (int t = 0; t < T; t++)
      QKV_UNROLL_BLOCKS
      for (int b = 0; b < BLOCKS; b++) store(out + t * PANEL + (block0 + b) * LANES, total[t][b]);
  }
};

template <bool HALF>
struct Plain {
  template <int T>
  static void panel(const u8* at, const u8* rows, int columns, Fetch fetch, int block0, float* out) {
    constexpr int bytes = HALF ? 64 : 128;
    F total[T][BLOCKS];
    QKV_UNROLL_ROWS
    for (int t = 0; t < T; t++)
      QKV_UNROLL_BLOCKS
      for (int b = 0; b < BLOCKS; b++) total[t][b] = set(0.0f);
    for (int c = 0; c < columns; c++, at += bytes, rows += T * 4) {
      fetch(at, bytes);
      F w[BLOCKS];
      QKV_UNROLL_BLOCKS
      for (int b = 0; b < BLOCKS; b++) {
        if constexpr (HALF) w[b] = halves(at + (block0 + b) * LANES * 2);
        else w[b] = load(reinterpret_cast<const float*>(at) + (block0 + b) * LANES);
      }
      QKV_UNROLL_ROWS
      for (int t = 0; t < T; t++) {
        float x;
        std::memcpy(&x, rows + t * 4, 4);
        QKV_UNROLL_BLOCKS
        for (int b = 0; b < BLOCKS; b++) total[t][b] = fma(w[b], set(x), total[t][b]);
      }
    }
    QKV_UNROLL_ROWS
    for (int t = 0; t < T; t++)
      QKV_UNROLL_BLOCKS
      for (int b = 0; b < BLOCKS; b++) store(out + t * PANEL + (block0 + b) * LANES, total[t][b]);
  }
};

// The kernel for a tile of so many rows, of those from MOST down.
template <class Kind, int MOST>
void tiled(const Matrix& matrix, int number, const u8* rows, int tile, const Pass& pass, float* out) {
  if constexpr (MOST > 1) {
    if (tile < MOST) return tiled<Kind, MOST - 1>(matrix, number, rows, tile, pass, out);
  }
  const int length = matrix.kind().quantised() ? matrix.padded() / GROUP : matrix.padded();
  for (int block = 0; block < PANEL / LANES; block += BLOCKS)
    Kind::template panel<MOST>(matrix.panel(number), rows, length, block == 0 ? Fetch(pass, length) : Fetch(), block, out);
}

// Calls `run` for the kind of codes that a format has.
template <class Run>
void as_codes(Format format, Run run) {
  switch (format) {
    case Format::Q4_0: return run.template operator()<Coded<4, 8, Scaling::Scale>>();
    case Format::Q4_1: return run.template operator()<Coded<4, 0, Scaling::ScaleAndMinimum>>();
    case Format::Q5_0: return run.template operator()<Coded<5, 16, Scaling::Scale>>();
    case Format::Q5_1: return run.template operator()<Coded<5, 0, Scaling::ScaleAndMinimum>>();
    case Format::Q8_0: return run.template operator()<Coded<8, 128, Scaling::Scale>>();
    case Format::Q4_K: return run.template operator()<Coded<4, 0, Scaling::Nested>>();
    case Format::Q5_K: return run.template operator()<Coded<5, 0, Scaling::Nested>>();
    case Format::Q6_K: return run.template operator()<Coded<6, 32, Scaling::NestedBySixteen>>();
    default: return;
  }
}

inline void linear(const Matrix& matrix, int number, const u8* rows, int tile, const Pass& pass, float* out) {
  switch (matrix.format()) {
    case Format::F32: return tiled<Plain<false>, PLAIN_TILE>(matrix, number, rows, tile, pass, out);
    case Format::F16: return tiled<Plain<true>, PLAIN_TILE>(matrix, number, rows, tile, pass, out);
    case Format::BF16: return tiled<Bf16, PLAIN_TILE>(matrix, number, rows, tile, pass, out);
    default:
      as_codes(matrix.format(), [&]<class Kind>() { tiled<Kind, CODE_TILE>(matrix, number, rows, tile, pass, out); });
  }
}

// One row of x into its place in a tile. Columns past the last are zeros.
inline void read_codes(const float* x, int columns, u8* to, int tile, int place) {
  for (int c = 0; c < columns; c += GROUP, to += tile * 48) {
    const F a = load(x + c), b = load(x + c + LANES);
    const float most = largest(max(magnitude(a), magnitude(b)));
    // codes have no place for what is no number or infinite: the scale carries it on
    const float sound = sum(mul(add(a, b), set(0.0f)));
    const float scale = most / 127 + sound, inverse = most > 0 ? 127 / most : 0;
    const I low = to_int(mul(a, set(inverse))), high = to_int(mul(b, set(inverse)));
    i8* codes = reinterpret_cast<i8*>(to + place * GROUP);
    store_bytes(codes, low);
    store_bytes(codes + LANES, high);
    const i32 first = sum(low), both = first + sum(high);
    const float numbers[2] = {scale, scale * static_cast<float>(both)};
    const i32 sums[2] = {both, first};
    for (int i = 0; i < 2; i++) {
      std::memcpy(to + tile * (GROUP + 4 * i) + place * 4, &numbers[i], 4);
      std::memcpy(to + tile * (GROUP + 8 + 4 * i) + place * 4, &sums[i], 4);
    }
  }
}

inline void read(Reading reading, const float* x, int columns, int padded, u8* to, int tile, int place) {
  if (reading == Reading::Codes) return read_codes(x, columns, to, tile, place);
  alignas(64) u16 rounded[LANES];
  if (reading == Reading::Rows) {
    to += place * GROUP * 2;
    for (int c = 0; c < padded; c += GROUP, to += tile * GROUP * 2)
      for (int i = 0; i < GROUP; i += LANES) {
        const int left = columns - c - i, there = left < 0 ? 0 : left < LANES ? left : LANES;
        store_bf16(rounded, there == LANES ? load(x + c + i) : load(x + c + i, there));
        std::memcpy(to + i * 2, rounded, sizeof rounded);
      }
    return;
  }
  const std::size_t stride = std::size_t(tile) * 4;
  to += place * 4;
  for (int c = 0; c < padded; c += LANES) {
    const int count = padded - c < LANES ? padded - c : LANES;
    const int there = columns - c < LANES ? columns - c : LANES;
    if (reading == Reading::Pairs) {
      store_bf16(rounded, there == LANES ? load(x + c) : load(x + c, there));
      for (int i = 0; i < count; i += 2, to += stride) std::memcpy(to, rounded + i, 4);
    } else {
      for (int i = 0; i < count; i++, to += stride) std::memcpy(to, x + c + i, 4);
    }
  }
}

}  // namespace qkv::QKV_ISA

#undef QKV_UNROLL_ROWS
#undef QKV_UNROLL_BLOCKS
