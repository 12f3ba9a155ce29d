// Blocks are read as the descriptions of GGUF's formats have them, one value at a time.
#include "matrices.h"

namespace qkv::tests {

double half(u16 bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double size = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return bits & 0x8000 ? -size : size;
}

float to_pairs(float x) {
  // to a multiple of 2^(exponent - 7): nearbyint takes the even one of two that are equally near
  int exponent;
  std::frexp(x, &exponent);
  return static_cast<float>(std::ldexp(std::nearbyint(std::ldexp(static_cast<double>(x), 8 - exponent)), exponent - 8));
}

namespace {

struct Value {
  double value, size;
};

Value scaled(double d, double code, double m = 0) { return {d * code + m, std::fabs(d * code) + std::fabs(m)}; }

// The `i`-th of 256 numbers of six bits: scales, then minima.
void nested(const u8* packed, int g, double& scale, double& minimum) {
  if (g < 4) {
    scale = packed[g] & 63, minimum = packed[g + 4] & 63;
  } else {
    scale = (packed[g + 4] & 15) | (packed[g - 4] >> 6 << 4);
    minimum = (packed[g + 4] >> 4) | (packed[g] >> 6 << 4);
  }
}

int nibble(const u8* from, int i) { return i < 16 ? from[i] & 15 : from[i - 16] >> 4; }
int fifth(const u8* from, int i) { return (from[i / 8] >> (i % 8) & 1) * 16; }

Value nested_value(Format format, const u8* b, int i) {
  if (format == Format::Q6_K) {
    const int part = i / 128, row = i % 128 / 32, l = i % 32;
    const int low = b[64 * part + 32 * (row % 2) + l] >> (row / 2 * 4) & 15;
    const int high = b[128 + 32 * part + l] >> (2 * row) & 3;
    return scaled(half(half_at(b + 208)) * static_cast<i8>(b[192 + i / 16]), low + 16 * high - 32);
  }
  double scale, minimum;
  nested(b + 4, i / 32, scale, minimum);
  const bool five = format == Format::Q5_K;
  int code = b[(five ? 48 : 16) + i / 64 * 32 + i % 32] >> (i / 32 % 2 ? 4 : 0) & 15;
  if (five) code += (b[16 + i % 32] >> (i / 32) & 1) * 16;
  return scaled(half(half_at(b)) * scale, code, -half(half_at(b + 2)) * minimum);
}

// The `i`-th value of a block.
Value value(Format format, const u8* b, int i) {
  const double d = half(half_at(b)), m = layout(format).scaling == Scaling::ScaleAndMinimum ? half(half_at(b + 2)) : 0;
  switch (format) {
    case Format::F32: {
      float x;
      std::memcpy(&x, b, 4);
      return scaled(x, 1);
    }
    case Format::F16: return scaled(d, 1);
    case Format::BF16: {
      const u8 bytes[4] = {0, 0, b[0], b[1]};
      float x;
      std::memcpy(&x, bytes, 4);
      return scaled(x, 1);
    }
    case Format::Q4_0: return scaled(d, nibble(b + 2, i) - 8);
    case Format::Q4_1: return scaled(d, nibble(b + 4, i), m);
    case Format::Q5_0: return scaled(d, nibble(b + 6, i) + fifth(b + 2, i) - 16);
    case Format::Q5_1: return scaled(d, nibble(b + 8, i) + fifth(b + 4, i), m);
    case Format::Q8_0: return scaled(d, static_cast<i8>(b[2 + i]));
    default: return nested_value(format, b, i);
  }
}

// A float16 between 2^-5 and 2^-3, of either sign.
u16 ordinary(Numbers& numbers) { return static_cast<u16>((numbers.bits() & 0x87ff) + (10 << 10)); }

void put(u8* at, u16 bits) { std::memcpy(at, &bits, 2); }

void fill(Format format, u8* block, Numbers& numbers) {
  const auto& kind = layout(format);
  for (int i = 0; i < kind.block_bytes; i++) block[i] = static_cast<u8>(numbers.bits() >> 7);
  if (format == Format::F32) {
    const float x = numbers.between(-1, 1);
    std::memcpy(block, &x, 4);
  } else if (format == Format::BF16) {
    float x = numbers.between(-1, 1);
    std::memcpy(block, reinterpret_cast<u8*>(&x) + 2, 2);
  } else {
    put(block + (format == Format::Q6_K ? 208 : 0), ordinary(numbers));
    if (kind.scaling == Scaling::ScaleAndMinimum || kind.scaling == Scaling::Nested) put(block + 2, ordinary(numbers));
  }
}

}  // namespace

Given given(Format format, int rows, int columns, Numbers& numbers) {
  const auto& kind = layout(format);
  Given found;
  found.rows = rows, found.columns = columns;
  const int blocks = columns / kind.block;
  found.data.resize(std::size_t(rows) * blocks * kind.block_bytes);
  for (int i = 0; i < rows * blocks; i++) {
    u8* block = found.data.data() + std::size_t(i) * kind.block_bytes;
    fill(format, block, numbers);
    for (int j = 0; j < kind.block; j++) {
      const auto [value_, size] = value(format, block, j);
      found.values.push_back(value_);
      found.sizes.push_back(size);
    }
  }
  return found;
}

}  // namespace qkv::tests
