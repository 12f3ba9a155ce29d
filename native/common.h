// Types and conversions that every part of the runtime shares.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace qkv {

using u8 = std::uint8_t;
using i8 = std::int8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using i32 = std::int32_t;

constexpr int ROUND_LINE = 64;     // bytes of a cache line
constexpr int PANEL = 32;          // rows of a matrix that are computed together
constexpr int LANES = 16;          // numbers of a vector, on every instruction set
constexpr int GROUP = 32;          // columns under one scale
constexpr int BLOCK_TOKENS = 16;   // tokens of a cache block
constexpr int SPLIT_BLOCKS = 8;    // cache blocks whose softmax is taken together
constexpr int SPLIT = BLOCK_TOKENS * SPLIT_BLOCKS;

constexpr int round_up(int n, int to) { return (n + to - 1) / to * to; }
constexpr int ceil_div(int n, int by) { return (n + by - 1) / by; }

// bfloat16 is the upper half of a float; to it by rounding to nearest, ties to even.
inline float from_bf16(u16 bits) {
  u32 wide = static_cast<u32>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

inline u16 to_bf16(float value) {
  u32 bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<u16>(bits >> 16 | 0x40);  // stays not-a-number
  return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float from_half(u16 half) {
  u32 sign = static_cast<u32>(half & 0x8000) << 16, rest = half & 0x7fff, bits;
  if (rest >= 0x7c00) {
    bits = sign | 0x7f800000u | (rest & 0x3ff) << 13;
  } else if (rest >= 0x400) {
    bits = sign | ((rest << 13) + 0x38000000u);
  } else {  // subnormal: rest * 2^-24 is exact
    float small = static_cast<float>(rest) * 0x1p-24f;
    std::memcpy(&bits, &small, 4);
    bits |= sign;
  }
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline u16 half_at(const u8* at) {
  u16 bits;
  std::memcpy(&bits, at, 2);
  return bits;
}

inline i32 word_at(const void* at) {
  i32 word;
  std::memcpy(&word, at, 4);
  return word;
}

}  // namespace qkv
