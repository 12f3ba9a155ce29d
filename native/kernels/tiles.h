// Products with a panel in the tile registers: for bf16 always, for codes where there are many rows. The sums
// of codes are whole numbers, and what follows them is done as for few rows, so that results are the same bits.
#pragma once

#include "linear.h"

namespace qkv::QKV_ISA {

constexpr int fewer(int a, int b) { return a < b ? a : b; }

// A panel of bf16 and a tile of rows of x. Each product is the sum over 32 columns added to what it was, from the
// first on, whoever else is there. Registers, from 0 on: products of 16 rows and of the 16 after them, with both
// blocks of the panel; rows of x; the panel.
class Bf16Tiles {
 public:
  Bf16Tiles(const Matrix& matrix, int number, const u8* x, int tile, float* out)
      : panel_(matrix.panel(number)), records_(ceil_div(matrix.padded(), GROUP)), x_(x), tile_(tile), out_(out) {
    const int rest = matrix.padded() % GROUP;
    last_ = panel_ + std::size_t(records_ - 1) * RECORD;
    if (rest == 0) return;
    std::memcpy(filled_, last_, rest * 64);  // columns that are no whole record, and zeros
    std::memset(filled_ + rest * 64, 0, RECORD - rest * 64);
    last_ = filled_;
  }

  void run(const Pass& pass) const {
    const Fetch fetch(pass, records_);
    const int whole = tile_ / (2 * LANES) * 2 * LANES, first = fewer(tile_ - whole, LANES), second = tile_ - whole - first;
    if (whole > 0) {
      const Shapes shapes{{LANES, 64}, {LANES, 64}, {LANES, 64}, {LANES, 64}, {LANES, 64}, {LANES, 64}, {LANES, 64}, {LANES, 64}};
      for (int row = 0; row < whole; row += 2 * LANES) rows(row, true, row == 0 ? fetch : Fetch());
    }
    if (first > 0) {
      const Shapes shapes{{first, 64}, {first, 64}, {second, 64}, {second, 64}, {first, 64}, {second, 64}, {LANES, 64}, {LANES, 64}};
      rows(whole, second > 0, whole == 0 ? fetch : Fetch());
    }
  }

 private:
  static constexpr int RECORD = GROUP * 64;  // bytes of 32 columns of the panel
  static constexpr int BLOCK = 64, PAIRS = 128, ROW = GROUP * 2, OUT = PANEL * 4;

  void rows(int row, bool second, Fetch fetch) const {
    _tile_zero(0);
    _tile_zero(1);
    if (second) {
      _tile_zero(2);
      _tile_zero(3);
    }
    const u8* x = x_ + row * ROW;
    for (int g = 0; g < records_; g++, x += std::size_t(tile_) * ROW) {
      const u8* weights = g + 1 < records_ ? panel_ + std::size_t(g) * RECORD : last_;
      fetch(weights, RECORD);
      _tile_loadd(6, weights, PAIRS);
      _tile_loadd(7, weights + BLOCK, PAIRS);
      _tile_loadd(4, x, ROW);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (second) {
        _tile_loadd(5, x + LANES * ROW, ROW);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    float* out = out_ + row * PANEL;
    _tile_stored(0, out, OUT);
    _tile_stored(1, out + LANES, OUT);
    if (second) {
      _tile_stored(2, out + LANES * PANEL, OUT);
      _tile_stored(3, out + LANES * PANEL + LANES, OUT);
    }
  }

  const u8* panel_;
  int records_;
  const u8* x_;
  int tile_;
  float* out_;
  const u8* last_;
  alignas(64) u8 filled_[RECORD];
};

// Rows `row` and those after it of a tile of x, as a record has them.
class CodedRows {
 public:
  CodedRows(const u8* rows, int tile, int row, int record) : at_(rows + std::size_t(record) * tile * 48), tile_(tile), row_(row) {}
  const u8* codes() const { return at_ + row_ * GROUP; }
  const float* scales() const { return numbers(0); }
  const float* weighted() const { return numbers(1); }

 private:
  const float* numbers(int which) const {
    return reinterpret_cast<const float*>(at_ + tile_ * (GROUP + 4 * which)) + row_;
  }
  const u8* at_;
  int tile_, row_;
};

// A panel of codes: those of a block, so many records at once, are laid out as signed bytes for the registers.
template <class Kind>
struct CodeTiles {
  static constexpr int SEGMENT = 32;               // records; a whole number of what shares a header
  static constexpr int RUN = GROUP / Kind::halves;  // columns that are summed as codes
  static constexpr int AHEAD = 2;                   // products that are on their way while others are scaled

  static const u8* record(const u8* panel, int g) {
    return panel + std::size_t(g) * Kind::record + std::size_t(Kind::nested ? g / 8 + 1 : 0) * Kind::header;
  }

  static void lay_out(const u8* panel, int from, int to, int block, i8* codes) {
    const __m512i zero = _mm512_set1_epi8(static_cast<char>(Kind::zero));
    for (int g = from; g < to; g++)
      for (int s = 0; s < 8; s++, codes += 64)
        _mm512_store_si512(codes, _mm512_sub_epi8(qkv::QKV_ISA::codes<Kind::bits>(record(panel, g), s, block).v, zero));
  }

  // Registers: products of 16 rows in 0 and 1, of fewer in 2; rows of x likewise in 3 and 4, and 5; weights in 6 and 7.
  static void product(int registers, const u8* x, const i8* codes, i32* out) {
    if (registers == 0) {
      _tile_loadd(6, codes, 64);
      _tile_loadd(3, x, GROUP);
      _tile_zero(0);
      _tile_dpbssd(0, 3, 6);
      _tile_stored(0, out, 64);
    } else if (registers == 1) {
      _tile_loadd(7, codes, 64);
      _tile_loadd(4, x, GROUP);
      _tile_zero(1);
      _tile_dpbssd(1, 4, 7);
      _tile_stored(1, out, 64);
    } else {
      _tile_loadd(6, codes, 64);
      _tile_loadd(5, x, GROUP);
      _tile_zero(2);
      _tile_dpbssd(2, 5, 6);
      _tile_stored(2, out, 64);
    }
  }

  // Those of `count` rows. What lies behind them may be numbers so small that multiplying them takes very long.
  static const float* numbers(const float* of, int count, float* kept) {
    if (count == LANES) return of;
    _mm512_store_ps(kept, _mm512_maskz_loadu_ps((1u << count) - 1, of));
    return kept;
  }

  // `count` rows, MOST or fewer, with a block's records `from` to before `to`, on top of what is in out unless
  // these are the first.
  template <int MOST>
  static void rows(const u8* panel, const i8* codes, int block, int from, int to, const u8* x, int tile, int row, int count,
                   float* out) {
    alignas(64) i32 products[4][MOST * LANES];
    alignas(64) float scaled[LANES], weighted[LANES];
    const auto start = [&](int step) {
      const int g = from + step / Kind::halves, run = step % Kind::halves;
      product(count < LANES ? 2 : step % 2, CodedRows(x, tile, row, g).codes() + run * RUN, codes + std::size_t(step) * RUN * LANES,
              products[step % 4]);
    };
    F total[MOST];
#pragma GCC unroll 16
    for (int t = 0; t < MOST; t++) total[t] = from == 0 || t >= count ? set(0.0f) : load(out + t * PANEL);
    const int steps = (to - from) * Kind::halves;
    for (int step = 0; step < fewer(AHEAD, steps); step++) start(step);
    F d = {}, m = {};
    for (int step = 0; step < steps; step++) {
      if (step + AHEAD < steps) start(step + AHEAD);
      const int g = from + step / Kind::halves, run = step % Kind::halves;
      const u8* at = record(panel, g);
      if constexpr (Kind::nested) {
        if (g % 8 == 0) {
          d = Kind::halves_at(at - Kind::header, block);
          if constexpr (Kind::minimum) m = Kind::halves_at(at - Kind::header + 64, block);
        }
      }
      const CodedRows given(x, tile, row, g);
      const u8* scales = at + Kind::code_bytes;
      const F by = Kind::scale(scales, run, block, d);
      const float* of_rows = numbers(given.scales(), count, scaled);
#pragma GCC unroll 16
      for (int t = 0; t < MOST; t++) {
        const I sum{_mm512_load_si512(products[step % 4] + t * LANES)};
        total[t] = fma(to_float(sum), mul(by, set(of_rows[t])), total[t]);
      }
      if constexpr (Kind::minimum) {
        const F low = Kind::least(scales, block, m);
        const float* of_least = numbers(given.weighted(), count, weighted);
#pragma GCC unroll 16
        for (int t = 0; t < MOST; t++) total[t] = fma(low, set(of_least[t]), total[t]);
      }
    }
#pragma GCC unroll 16
    for (int t = 0; t < MOST; t++)
      if (t < count) store(out + t * PANEL, total[t]);
  }

  static void panel(const Matrix& matrix, int number, const u8* x, int tile, const Pass& pass, float* out) {
    const u8* panel = matrix.panel(number);
    const int records = matrix.padded() / GROUP, rest = tile % LANES;
    alignas(64) i8 codes[SEGMENT * GROUP * LANES];
    const Shapes shapes{{LANES, 64}, {LANES, 64}, {rest, 64}, {LANES, RUN}, {LANES, RUN}, {rest, RUN}, {RUN / 4, 64}, {RUN / 4, 64}};
    Fetch fetch(pass, records);
    for (int from = 0; from < records; from += SEGMENT) {
      const int to = fewer(records, from + SEGMENT);
      for (int block = 0; block < PANEL / LANES; block++) {
        for (int g = from; block == 0 && g < to; g++) fetch(record(panel, g), Kind::record);
        lay_out(panel, from, to, block, codes);
        asm volatile("" : : "r"(codes) : "memory");  // it is written before tiles are loaded from it
        for (int row = 0; row < tile; row += LANES) {
          const int count = fewer(LANES, tile - row);
          float* to_rows = out + row * PANEL + block * LANES;
          if (count > LANES / 2) rows<LANES>(panel, codes, block, from, to, x, tile, row, count, to_rows);
          else rows<LANES / 2>(panel, codes, block, from, to, x, tile, row, count, to_rows);
        }
      }
    }
  }
};

inline void linear_in_tiles(const Matrix& matrix, int number, const u8* rows, int tile, const Pass& pass, float* out) {
  if (matrix.format() == Format::BF16) return Bf16Tiles(matrix, number, rows, tile, out).run(pass);
  if (!matrix.kind().quantised() || tile <= CODE_TILE) return linear(matrix, number, rows, tile, pass, out);
  as_codes(matrix.format(), [&]<class Kind>() { CodeTiles<Kind>::panel(matrix, number, rows, tile, pass, out); });
}

}  // namespace qkv::QKV_ISA
