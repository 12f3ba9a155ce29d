#include "formats.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <thread>

namespace qkv {

namespace {

constexpr std::size_t WORTH_THREADS = std::size_t{256} << 10;  // bytes

constexpr std::array<Layout, 11> LAYOUTS{{
    {Format::F32, "F32", 32, 0, Scaling::None, 1, 4},
    {Format::F16, "F16", 16, 0, Scaling::None, 1, 2},
    {Format::BF16, "BF16", 16, 0, Scaling::None, 1, 2},
    {Format::Q4_0, "Q4_0", 4, 8, Scaling::Scale, 32, 18},
    {Format::Q4_1, "Q4_1", 4, 0, Scaling::ScaleAndMinimum, 32, 20},
    {Format::Q5_0, "Q5_0", 5, 16, Scaling::Scale, 32, 22},
    {Format::Q5_1, "Q5_1", 5, 0, Scaling::ScaleAndMinimum, 32, 24},
    {Format::Q8_0, "Q8_0", 8, 128, Scaling::Scale, 32, 34},
    {Format::Q4_K, "Q4_K", 4, 0, Scaling::Nested, 256, 144},
    {Format::Q5_K, "Q5_K", 5, 0, Scaling::Nested, 256, 176},
    {Format::Q6_K, "Q6_K", 6, 32, Scaling::NestedBySixteen, 256, 210},
}};

// One block of a file, in its own order: codes of each column, scales of each 32 (or 16) columns.
struct Block {
  u8 codes[256];
  u8 scales[16];
  u8 minima[8];
  u16 d = 0, m = 0;
};

void nibbles(const u8* packed, u8* codes) {
  for (int i = 0; i < 16; i++) codes[i] = packed[i] & 15, codes[i + 16] = packed[i] >> 4;
}

void fifth_bits(const u8* packed, u8* codes) {
  for (int i = 0; i < 32; i++) codes[i] |= (packed[i / 8] >> i % 8 & 1) << 4;
}

// Q4_K and Q5_K: eight 6-bit scales and minima in twelve bytes (llama.cpp's block_q4_K).
void six_bit_scales(const u8* packed, Block& block) {
  for (int i = 0; i < 4; i++) {
    block.scales[i] = packed[i] & 63;
    block.minima[i] = packed[i + 4] & 63;
    block.scales[i + 4] = (packed[i + 8] & 15) | (packed[i] >> 6) << 4;
    block.minima[i + 4] = (packed[i + 8] >> 4) | (packed[i + 4] >> 6) << 4;
  }
}

void read_small(Format format, const u8* at, Block& block) {
  block.d = half_at(at);
  switch (format) {
    case Format::Q4_0: nibbles(at + 2, block.codes); break;
    case Format::Q4_1: block.m = half_at(at + 2), nibbles(at + 4, block.codes); break;
    case Format::Q5_0: nibbles(at + 6, block.codes), fifth_bits(at + 2, block.codes); break;
    case Format::Q5_1:
      block.m = half_at(at + 2), nibbles(at + 8, block.codes), fifth_bits(at + 4, block.codes);
      break;
    default:
      for (int i = 0; i < 32; i++) block.codes[i] = static_cast<u8>(at[i + 2] + 128);
  }
}

void read_nested(Format format, const u8* at, Block& block) {
  if (format == Format::Q6_K) {
    for (int i = 0; i < 256; i++) {
      // each 64 bytes hold the low bits of 128 codes, each 32 bytes the upper pairs of as many
      const int half = i / 128, place = i % 128;
      const u8 low = at[half * 64 + place % 64] >> (place / 64 * 4) & 15;
      const u8 high = at[128 + half * 32 + place % 32] >> (place / 32 * 2) & 3;
      block.codes[i] = low | high << 4;
    }
    std::memcpy(block.scales, at + 192, 16);
    block.d = half_at(at + 208);
    return;
  }
  block.d = half_at(at), block.m = half_at(at + 2);
  six_bit_scales(at + 4, block);
  const u8* low = at + (format == Format::Q5_K ? 48 : 16);
  for (int i = 0; i < 256; i++) {
    block.codes[i] = low[i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
    if (format == Format::Q5_K) block.codes[i] |= (at[16 + i % 32] >> i / 32 & 1) << 4;
  }
}

// Where in a record the code of a row (of a panel) and a column (of 32) stands.
struct CodePlace {
  int byte, shift;       // its low four bits, or all eight
  int upper, upper_shift;  // its other bits
};

CodePlace place(int bits, int row, int column) {
  const int block = row / LANES, step = column / 4, within = row % LANES * 4 + column % 4;
  if (bits == 8) return {(step * 2 + block) * 64 + within, 0, 0, 0};
  CodePlace found{(step / 2 * 2 + block) * 64 + within, step % 2 * 4, 0, 0};
  if (bits == 5) found.upper = 512 + block * 64 + within, found.upper_shift = step;
  if (bits == 6) found.upper = 512 + (step / 4 * 2 + block) * 64 + within, found.upper_shift = step % 4 * 2;
  return found;
}

// The codes of a row and 32 columns into a record, by the same places, four neighbours at a time.
void put_codes(u8* record, int bits, int row, const u8* codes) {
  for (int step = 0; step < GROUP / 4; step++, codes += 4) {
    const auto at = place(bits, row, step * 4);
    u32 four, low, high;
    std::memcpy(&four, codes, 4);
    if (bits == 8) {
      std::memcpy(record + at.byte, &four, 4);
      continue;
    }
    std::memcpy(&low, record + at.byte, 4);
    low |= (four & 0x0f0f0f0fu) << at.shift;
    std::memcpy(record + at.byte, &low, 4);
    if (bits == 4) continue;
    std::memcpy(&high, record + at.upper, 4);
    high |= (four >> 4 & 0x0f0f0f0fu) << at.upper_shift;
    std::memcpy(record + at.upper, &high, 4);
  }
}

u8 get_code(const u8* record, int bits, int row, int column) {
  const auto at = place(bits, row, column);
  if (bits == 8) return record[at.byte];
  const u8 low = record[at.byte] >> at.shift & 15;
  if (bits == 4) return low;
  return low | (record[at.upper] >> at.upper_shift & ((1 << (bits - 4)) - 1)) << 4;
}

void put_half(u8* at, int row, u16 value) { std::memcpy(at + row * 2, &value, 2); }
float get_half(const u8* at, int row) { return from_half(half_at(at + row * 2)); }

}  // namespace

const Layout& layout(Format format) { return LAYOUTS[static_cast<int>(format)]; }

const Layout& layout(std::string_view name) {
  for (const auto& each : LAYOUTS)
    if (each.name == name) return each;
  throw std::invalid_argument("no weight format " + std::string(name));
}

Matrix::Matrix(Arena& arena, Format format, int columns, const std::vector<Part>& parts, bool paired)
    : layout_(&qkv::layout(format)), rows_(0), columns_(columns), padded_(columns) {
  const auto& kind = *layout_;
  if (columns % kind.block != 0) throw std::invalid_argument("columns are no whole blocks of the format");
  if (paired && (parts.size() != 2 || parts[0].rows != parts[1].rows))
    throw std::invalid_argument("a gate needs two matrices of one size");
  if (format == Format::BF16) padded_ = round_up(columns, 2);
  // a gate's panels hold 16 rows of each part: a part that ends within them is followed by zeros
  for (const auto& part : parts) rows_ += paired ? round_up(part.rows, LANES) : part.rows;
  const int records = padded_ / GROUP;
  panel_bytes_ = kind.quantised()
                     ? std::size_t(records) * kind.record_bytes() + std::size_t(ceil_div(records, 8)) * kind.header_bytes()
                     : std::size_t(padded_) * PANEL * kind.bits / 8;
  memory_ = arena.take(bytes());
  const std::size_t row_bytes = std::size_t(columns / kind.block) * kind.block_bytes;
  std::vector<const u8*> sources(std::size_t(panels()) * PANEL, nullptr);
  int first = 0;
  for (const auto& part : parts) {
    for (int row = 0; row < part.rows; row++)
      sources[paired ? row / LANES * PANEL + (&part - parts.data()) * LANES + row % LANES : first + row] =
          part.data + row * row_bytes;
    first += part.rows;
  }
  // panels lie apart, so threads can fill them side by side
  const int threads = bytes() < WORTH_THREADS ? 1 : std::max(1u, std::thread::hardware_concurrency());
  const auto fill = [&](int thread) {
    for (int p = panels() * thread / threads; p < panels() * (thread + 1) / threads; p++)
      for (int r = 0; r < PANEL; r++)
        if (const u8* source = sources[p * PANEL + r]) pack(source, p * PANEL + r);
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; thread++) others.emplace_back(fill, thread);
  fill(0);
  for (auto& other : others) other.join();
}

void Matrix::pack(const u8* source, int row) {
  const auto& kind = *layout_;
  const int r = row % PANEL;
  u8* panel = memory_.get() + row / PANEL * panel_bytes_;
  if (!kind.quantised()) {
    const int size = kind.bits / 8;
    for (int c = 0; c < columns_; c++) {
      const std::size_t at = kind.format == Format::BF16
                                 ? (std::size_t(c / 2 * 2 + r / LANES) * LANES + r % LANES) * 2 + c % 2
                                 : std::size_t(c) * PANEL + r;
      std::memcpy(panel + at * size, source + std::size_t(c) * size, size);
    }
    return;
  }
  Block block;
  u8* record = panel;
  for (int c = 0; c < columns_; c += kind.block, source += kind.block_bytes) {
    if (kind.nested()) {
      read_nested(kind.format, source, block);
      put_half(record, r, block.d);
      if (kind.scaling == Scaling::Nested) put_half(record + 64, r, block.m);
      record += kind.header_bytes();
    } else {
      read_small(kind.format, source, block);
    }
    for (int g = 0; g < kind.block / GROUP; g++, record += kind.record_bytes()) {
      put_codes(record, kind.bits, r, block.codes + g * GROUP);
      u8* scales = record + kind.code_bytes();
      switch (kind.scaling) {
        case Scaling::ScaleAndMinimum: put_half(scales + 64, r, block.m); [[fallthrough]];
        case Scaling::Scale: put_half(scales, r, block.d); break;
        case Scaling::Nested: scales[r] = block.scales[g], scales[PANEL + r] = block.minima[g]; break;
        default: scales[r] = block.scales[2 * g], scales[PANEL + r] = block.scales[2 * g + 1];
      }
    }
  }
}

void Matrix::row(int number, float* out) const {
  const auto& kind = *layout_;
  const int r = number % PANEL;
  const u8* at = panel(number / PANEL);
  if (!kind.quantised()) {
    for (int c = 0; c < columns_; c++) {
      if (kind.format == Format::F32) std::memcpy(&out[c], at + (std::size_t(c) * PANEL + r) * 4, 4);
      if (kind.format == Format::F16) out[c] = from_half(half_at(at + (std::size_t(c) * PANEL + r) * 2));
      if (kind.format == Format::BF16)
        out[c] = from_bf16(half_at(at + ((std::size_t(c / 2 * 2 + r / LANES) * LANES + r % LANES) * 2 + c % 2) * 2));
    }
    return;
  }
  float d = 0, m = 0;
  for (int c = 0; c < columns_; at += kind.record_bytes()) {
    if (kind.nested() && c % 256 == 0) {
      d = get_half(at, r);
      if (kind.scaling == Scaling::Nested) m = get_half(at + 64, r);
      at += kind.header_bytes();
    }
    const u8* scales = at + kind.code_bytes();
    if (!kind.nested()) d = get_half(scales, r);
    if (kind.scaling == Scaling::ScaleAndMinimum) m = get_half(scales + 64, r);
    for (int i = 0; i < GROUP; i++, c++) {
      const float code = static_cast<float>(get_code(at, kind.bits, r, i) - kind.zero);
      switch (kind.scaling) {
        case Scaling::Scale: out[c] = d * code; break;
        case Scaling::ScaleAndMinimum: out[c] = d * code + m; break;
        case Scaling::Nested: out[c] = d * scales[r] * code - m * scales[PANEL + r]; break;
        default: out[c] = d * static_cast<i8>(scales[i / 16 * PANEL + r]) * code;
      }
    }
  }
}

}  // namespace qkv
