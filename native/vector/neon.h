// Vectors of 16 numbers as four of NEON's 4, with dot products of bytes (ARMv8.2).
#pragma once

#include <arm_neon.h>

#include "../common.h"

namespace qkv::QKV_ISA {

constexpr int BLOCKS = 1;
constexpr int CODE_TILE = 3;
constexpr int PLAIN_TILE = 5;
constexpr int QUERY_TILE = 2;
constexpr int NEAR = 1024;  // bytes that weights are asked for ahead
constexpr bool SIGNED_CODES = true;  // the dot product takes signed bytes only

struct F { float32x4_t v[4]; };
struct I { int32x4_t v[4]; };
struct B { uint8x16_t v[4]; };

template <class V, class Each>
inline V quarters(Each&& each) { return {{each(0), each(1), each(2), each(3)}}; }
// all bits set in the lanes of a quarter that are below n
inline uint32x4_t below(int n, int quarter) {
  const int32_t lane[4] = {0, 1, 2, 3};
  return vcltq_s32(vld1q_s32(lane), vdupq_n_s32(n - 4 * quarter));
}

inline F set(float x) { return quarters<F>([&](int) { return vdupq_n_f32(x); }); }
inline F load(const float* at) { return quarters<F>([&](int i) { return vld1q_f32(at + 4 * i); }); }
inline F load(const float* at, int n) {
  if (n == LANES) return load(at);
  float all[LANES] = {};
  std::memcpy(all, at, n * sizeof(float));
  return load(all);
}
inline void store(float* at, F x) {
  for (int i = 0; i < 4; i++) vst1q_f32(at + 4 * i, x.v[i]);
}
inline void store(float* at, F x, int n) {
  if (n == LANES) return store(at, x);
  float all[LANES];
  store(all, x);
  std::memcpy(at, all, n * sizeof(float));
}
inline F add(F x, F y) { return quarters<F>([&](int i) { return vaddq_f32(x.v[i], y.v[i]); }); }
inline F sub(F x, F y) { return quarters<F>([&](int i) { return vsubq_f32(x.v[i], y.v[i]); }); }
inline F mul(F x, F y) { return quarters<F>([&](int i) { return vmulq_f32(x.v[i], y.v[i]); }); }
inline F div(F x, F y) { return quarters<F>([&](int i) { return vdivq_f32(x.v[i], y.v[i]); }); }
inline F fma(F x, F y, F z) { return quarters<F>([&](int i) { return vfmaq_f32(z.v[i], x.v[i], y.v[i]); }); }
// unlike the other headers', these are no number where either of the two is none
inline F max(F x, F y) { return quarters<F>([&](int i) { return vmaxq_f32(x.v[i], y.v[i]); }); }
inline F min(F x, F y) { return quarters<F>([&](int i) { return vminq_f32(x.v[i], y.v[i]); }); }
inline F magnitude(F x) { return quarters<F>([&](int i) { return vabsq_f32(x.v[i]); }); }
inline F nearest(F x) { return quarters<F>([&](int i) { return vrndnq_f32(x.v[i]); }); }
inline float32x4_t by_power(float32x4_t x, int32x4_t power) {
  // in two factors, so that each is a normal number also where the product is not
  const int32x4_t half = vshrq_n_s32(power, 1), rest = vsubq_s32(power, half), one = vdupq_n_s32(127);
  const float32x4_t first = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(half, one), 23));
  const float32x4_t second = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(rest, one), 23));
  return vmulq_f32(vmulq_f32(x, first), second);
}
inline F by_power(F x, F power) {
  return quarters<F>([&](int i) { return by_power(x.v[i], vcvtq_s32_f32(power.v[i])); });
}
inline float sum(F x) { return vaddvq_f32(vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]))); }
inline float largest(F x) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.v[0], x.v[2]), vmaxq_f32(x.v[1], x.v[3]))); }
inline F within(F x, int from, int to, float otherwise) {
  return quarters<F>([&](int i) {
    return vbslq_f32(vbicq_u32(below(to, i), below(from, i)), x.v[i], vdupq_n_f32(otherwise));
  });
}
inline F where_positive(F x, F y, F z) {
  return quarters<F>([&](int i) { return vbslq_f32(vcleq_f32(x.v[i], vdupq_n_f32(0)), z.v[i], y.v[i]); });
}

inline F halves(const u8* at) {
  return quarters<F>([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(at + 8 * i))); });
}
inline F bytes(const u8* at) {
  const uint8x16_t all = vld1q_u8(at);
  const uint16x8_t low = vmovl_u8(vget_low_u8(all)), high = vmovl_u8(vget_high_u8(all));
  return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(low))),
           vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(high)))}};
}
inline F bytes(const i8* at) {
  const int8x16_t all = vld1q_s8(at);
  const int16x8_t low = vmovl_s8(vget_low_s8(all)), high = vmovl_s8(vget_high_s8(all));
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
           vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
}
// the upper halves of four floats, rounded to nearest even; what is no number stays so
inline uint16x4_t rounded(float32x4_t x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t up = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), up, quiet), 16);
}
inline void store_bf16(u16* at, F x) {
  for (int i = 0; i < 4; i++) vst1_u16(at + 4 * i, rounded(x.v[i]));
}

inline I set(i32 x) { return quarters<I>([&](int) { return vdupq_n_s32(x); }); }
inline I add(I x, I y) { return quarters<I>([&](int i) { return vaddq_s32(x.v[i], y.v[i]); }); }
inline F to_float(I x) { return quarters<F>([&](int i) { return vcvtq_f32_s32(x.v[i]); }); }
// here what is no number becomes 0; no caller tells it by its whole number
inline I to_int(F x) { return quarters<I>([&](int i) { return vcvtnq_s32_f32(x.v[i]); }); }
inline i32 sum(I x) { return vaddvq_s32(vaddq_s32(vaddq_s32(x.v[0], x.v[2]), vaddq_s32(x.v[1], x.v[3]))); }
inline void store_bytes(i8* at, I x) {
  const int16x8_t low = vcombine_s16(vmovn_s32(x.v[0]), vmovn_s32(x.v[1]));
  const int16x8_t high = vcombine_s16(vmovn_s32(x.v[2]), vmovn_s32(x.v[3]));
  vst1q_s8(at, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

inline B load_bytes(const u8* at) { return quarters<B>([&](int i) { return vld1q_u8(at + 16 * i); }); }
inline B field(B x, int from, int width, int to) {
  typedef u8 Bytes __attribute__((vector_size(16)));
  const u8 mask = static_cast<u8>(((1 << width) - 1) << to);
  return quarters<B>([&](int i) {
    const Bytes all = (Bytes)x.v[i], moved = to > from ? all << (to - from) : all >> (from - to);
    return vandq_u8((uint8x16_t)moved, vdupq_n_u8(mask));
  });
}
inline B either(B x, B y) { return quarters<B>([&](int i) { return vorrq_u8(x.v[i], y.v[i]); }); }

template <int BITS>
inline I dot4(I to, B codes, i32 x) {
  const int8x16_t all = vreinterpretq_s8_s32(vdupq_n_s32(x));
  return quarters<I>([&](int i) {
    const uint8x16_t code = BITS == 8 ? veorq_u8(codes.v[i], vdupq_n_u8(128)) : codes.v[i];
    return vdotq_s32(to.v[i], vreinterpretq_s8_u8(code), all);
  });
}
inline F dot2(F to, const u16* pairs, i32 x) {
  const uint32x4_t upper = vdupq_n_u32(0xffff0000u);
  const float32x4_t low = vreinterpretq_f32_s32(vdupq_n_s32(static_cast<i32>(static_cast<u32>(x) << 16)));
  const float32x4_t high = vreinterpretq_f32_u32(vandq_u32(vdupq_n_u32(static_cast<u32>(x)), upper));
  return quarters<F>([&](int i) {
    const uint32x4_t both = vreinterpretq_u32_u16(vld1q_u16(pairs + 8 * i));
    const float32x4_t sum = vfmaq_f32(to.v[i], vreinterpretq_f32_u32(vandq_u32(both, upper)), high);
    return vfmaq_f32(sum, vreinterpretq_f32_u32(vshlq_n_u32(both, 16)), low);
  });
}

inline void prefetch(const u8* at) { __builtin_prefetch(at, 0, 2); }  // to the second level

}  // namespace qkv::QKV_ISA
