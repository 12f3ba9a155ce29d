// Vectors of 16 numbers in plain C++: what the other headers of this folder mean, lane by lane.
#pragma once

#include <cmath>

#include "../common.h"

namespace qkv::QKV_ISA {

constexpr int BLOCKS = 1;
constexpr int CODE_TILE = 2;
constexpr int PLAIN_TILE = 2;
constexpr int QUERY_TILE = 2;
constexpr int NEAR = 1024;  // bytes that weights are asked for ahead
constexpr bool SIGNED_CODES = false;

struct F { float v[16]; };
struct I { i32 v[16]; };
struct B { u8 v[64]; };

template <class V, class Each>
inline V lanes(Each&& each) {
  V found;
  for (int i = 0; i < LANES; i++) found.v[i] = each(i);
  return found;
}

inline F set(float x) { return lanes<F>([&](int) { return x; }); }
inline F load(const float* at) { return lanes<F>([&](int i) { return at[i]; }); }
inline F load(const float* at, int n) { return lanes<F>([&](int i) { return i < n ? at[i] : 0.0f; }); }
inline void store(float* at, F a, int n = LANES) { for (int i = 0; i < n; i++) at[i] = a.v[i]; }
inline F add(F a, F b) { return lanes<F>([&](int i) { return a.v[i] + b.v[i]; }); }
inline F sub(F a, F b) { return lanes<F>([&](int i) { return a.v[i] - b.v[i]; }); }
inline F mul(F a, F b) { return lanes<F>([&](int i) { return a.v[i] * b.v[i]; }); }
inline F div(F a, F b) { return lanes<F>([&](int i) { return a.v[i] / b.v[i]; }); }
inline F fma(F a, F b, F c) { return lanes<F>([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
inline F max(F a, F b) { return lanes<F>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline F min(F a, F b) { return lanes<F>([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
inline F magnitude(F a) { return lanes<F>([&](int i) { return std::fabs(a.v[i]); }); }
inline F nearest(F a) { return lanes<F>([&](int i) { return std::nearbyint(a.v[i]); }); }
inline F by_power(F a, F power) {
  return lanes<F>([&](int i) { return std::ldexp(a.v[i], static_cast<int>(power.v[i])); });
}
inline float sum(F a) {
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) a.v[i] += a.v[i + half];
  return a.v[0];
}
inline float largest(F a) {
  float found = a.v[0];
  for (float each : a.v) found = each > found ? each : found;
  return found;
}
inline F within(F a, int from, int to, float otherwise) {
  return lanes<F>([&](int i) { return i >= from && i < to ? a.v[i] : otherwise; });
}
inline F where_positive(F x, F a, F b) { return lanes<F>([&](int i) { return x.v[i] <= 0 ? b.v[i] : a.v[i]; }); }

inline F halves(const u8* at) { return lanes<F>([&](int i) { return from_half(half_at(at + 2 * i)); }); }
inline F bytes(const u8* at) { return lanes<F>([&](int i) { return static_cast<float>(at[i]); }); }
inline F bytes(const i8* at) { return lanes<F>([&](int i) { return static_cast<float>(at[i]); }); }
inline void store_bf16(u16* at, F a) { for (int i = 0; i < LANES; i++) at[i] = to_bf16(a.v[i]); }

inline I set(i32 x) { return lanes<I>([&](int) { return x; }); }
inline I add(I a, I b) { return lanes<I>([&](int i) { return a.v[i] + b.v[i]; }); }
inline F to_float(I a) { return lanes<F>([&](int i) { return static_cast<float>(a.v[i]); }); }
// what is no number becomes the least whole number, as the vector instruction has it
inline I to_int(F a) {
  return lanes<I>([&](int i) {
    const float x = a.v[i];
    return x >= -2147483648.0f && x < 2147483648.0f ? static_cast<i32>(std::nearbyint(x)) : INT32_MIN;
  });
}
inline i32 sum(I a) {
  i32 found = 0;
  for (i32 each : a.v) found += each;
  return found;
}
inline void store_bytes(i8* at, I a) { for (int i = 0; i < LANES; i++) at[i] = static_cast<i8>(a.v[i]); }

inline B load_bytes(const u8* at) {
  B found;
  std::memcpy(found.v, at, 64);
  return found;
}
inline B field(B a, int from, int width, int to) {
  for (u8& each : a.v) each = (each >> from & ((1 << width) - 1)) << to;
  return a;
}
inline B either(B a, B b) {
  for (int i = 0; i < 64; i++) a.v[i] |= b.v[i];
  return a;
}

template <int BITS>
inline I dot4(I to, B codes, i32 x) {
  i8 by[4];
  std::memcpy(by, &x, 4);
  for (int i = 0; i < LANES; i++)
    for (int j = 0; j < 4; j++) to.v[i] += codes.v[4 * i + j] * by[j];
  return to;
}
inline F dot2(F to, const u16* pairs, i32 x) {
  const float low = qkv::from_bf16(static_cast<u16>(x)), high = qkv::from_bf16(static_cast<u16>(static_cast<u32>(x) >> 16));
  for (int i = 0; i < LANES; i++) {
    to.v[i] += qkv::from_bf16(pairs[2 * i + 1]) * high;
    to.v[i] += qkv::from_bf16(pairs[2 * i]) * low;
  }
  return to;
}

inline void prefetch(const u8*) {}

}  // namespace qkv::QKV_ISA
