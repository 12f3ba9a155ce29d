// Vectors of 16 numbers as pairs of AVX2's 8, with FMA and F16C.
#pragma once

#include <immintrin.h>

#include "../common.h"

namespace qkv::QKV_ISA {

constexpr int BLOCKS = 1;
constexpr int CODE_TILE = 2;
constexpr int PLAIN_TILE = 4;
constexpr int QUERY_TILE = 3;
constexpr int NEAR = 1024;  // bytes that weights are asked for ahead
constexpr bool SIGNED_CODES = true;  // the product of bytes saturates for unsigned ones of 8 bits

struct F { __m256 a, b; };
struct I { __m256i a, b; };
struct B { __m256i a, b; };

inline const __m256i* whole(const void* at) { return static_cast<const __m256i*>(at); }
// lanes of the first and the second eight that are below n
inline __m256i below(int n, int first) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n - first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline F set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F load(const float* at) { return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)}; }
inline F load(const float* at, int n) {
  return {_mm256_maskload_ps(at, below(n, 0)), _mm256_maskload_ps(at + 8, below(n, 8))};
}
inline void store(float* at, F x) { _mm256_storeu_ps(at, x.a), _mm256_storeu_ps(at + 8, x.b); }
inline void store(float* at, F x, int n) {
  _mm256_maskstore_ps(at, below(n, 0), x.a), _mm256_maskstore_ps(at + 8, below(n, 8), x.b);
}
inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F magnitude(F x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline F nearest(F x) {
  constexpr int how = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, how), _mm256_round_ps(x.b, how)};
}
inline __m256 by_power(__m256 x, __m256i power) {
  // in two factors, so that each is a normal number also where the product is not
  const __m256i half = _mm256_srai_epi32(power, 1), rest = _mm256_sub_epi32(power, half), one = _mm256_set1_epi32(127);
  const __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, one), 23));
  const __m256 second = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, one), 23));
  return _mm256_mul_ps(_mm256_mul_ps(x, first), second);
}
inline F by_power(F x, F power) {
  return {by_power(x.a, _mm256_cvtps_epi32(power.a)), by_power(x.b, _mm256_cvtps_epi32(power.b))};
}
inline float sum(F x) {
  const __m256 eight = _mm256_add_ps(x.a, x.b);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline float largest(F x) {
  const __m256 eight = _mm256_max_ps(x.a, x.b);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
inline F within(F x, int from, int to, float otherwise) {
  const auto kept = [&](int first) { return _mm256_castsi256_ps(_mm256_andnot_si256(below(from, first), below(to, first))); };
  const __m256 other = _mm256_set1_ps(otherwise);
  return {_mm256_blendv_ps(other, x.a, kept(0)), _mm256_blendv_ps(other, x.b, kept(8))};
}
inline F where_positive(F x, F y, F z) {
  const __m256 zero = _mm256_setzero_ps();
  return {_mm256_blendv_ps(z.a, y.a, _mm256_cmp_ps(x.a, zero, _CMP_NLE_UQ)),
          _mm256_blendv_ps(z.b, y.b, _mm256_cmp_ps(x.b, zero, _CMP_NLE_UQ))};
}

inline F halves(const u8* at) {
  const __m128i* from = reinterpret_cast<const __m128i*>(at);
  return {_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from + 1))};
}
inline __m128i eight_bytes(const void* at) { return _mm_loadl_epi64(static_cast<const __m128i*>(at)); }
inline F bytes(const u8* at) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight_bytes(at))), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight_bytes(at + 8)))};
}
inline F bytes(const i8* at) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight_bytes(at))), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight_bytes(at + 8)))};
}
// the upper halves of eight floats, rounded to nearest even; what is no number stays so
inline __m256i rounded(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 none = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  return _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, _mm256_castps_si256(none)), 16);
}
inline void store_bf16(u16* at, F x) {
  const __m256i packed = _mm256_packus_epi32(rounded(x.a), rounded(x.b));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm256_permute4x64_epi64(packed, 0xd8));
}

inline I set(i32 x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I add(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline i32 sum(I x) {
  const __m256i eight = _mm256_add_epi32(x.a, x.b);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
inline void store_bytes(i8* at, I x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  const __m128i packed = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(at), packed);
}

inline B load_bytes(const u8* at) { return {_mm256_loadu_si256(whole(at)), _mm256_loadu_si256(whole(at + 32))}; }
inline B field(B x, int from, int width, int to) {
  const __m256i mask = _mm256_set1_epi8(static_cast<char>(((1 << width) - 1) << to));
  const auto moved = [&](__m256i v) {
    typedef u16 Words __attribute__((vector_size(32)));
    return (__m256i)(to > from ? (Words)v << (to - from) : (Words)v >> (from - to));
  };
  return {_mm256_and_si256(moved(x.a), mask), _mm256_and_si256(moved(x.b), mask)};
}
inline B either(B x, B y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }

template <int BITS>
inline __m256i dot4(__m256i to, __m256i codes, __m256i x) {
  if constexpr (BITS == 8) {
    codes = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
    x = _mm256_sign_epi8(x, codes);
    codes = _mm256_abs_epi8(codes);
  }
  return _mm256_add_epi32(to, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1)));
}
template <int BITS>
inline I dot4(I to, B codes, i32 x) {
  const __m256i all = _mm256_set1_epi32(x);
  return {dot4<BITS>(to.a, codes.a, all), dot4<BITS>(to.b, codes.b, all)};
}
inline F dot2(F to, const u16* pairs, i32 x) {
  const __m256 low = _mm256_castsi256_ps(_mm256_set1_epi32(x << 16));
  const __m256i upper = _mm256_set1_epi32(static_cast<i32>(0xffff0000u));
  const __m256 high = _mm256_castsi256_ps(_mm256_and_si256(_mm256_set1_epi32(x), upper));
  const auto eight = [&](__m256 sum, __m256i v) {
    sum = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(v, upper)), high, sum);
    return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(v, 16)), low, sum);
  };
  return {eight(to.a, _mm256_loadu_si256(whole(pairs))), eight(to.b, _mm256_loadu_si256(whole(pairs + 16)))};
}

inline void prefetch(const u8* at) { _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T1); }  // to the second level

}  // namespace qkv::QKV_ISA
