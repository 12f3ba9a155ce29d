// Vectors of 16 numbers for AVX-512 with VNNI and BF16; how far ahead memory is asked for is left to those
// who include it.
#pragma once

#include <immintrin.h>

#include "../common.h"

namespace qkv::QKV_ISA {

constexpr int BLOCKS = 2;        // blocks of 16 rows a kernel holds in registers at once
constexpr int CODE_TILE = 6;     // rows of x a kernel of codes takes at once
constexpr int PLAIN_TILE = 12;   // the same for plain numbers
constexpr int QUERY_TILE = 6;    // queries that share one reading of keys and values
constexpr bool SIGNED_CODES = false;  // whether dot4 takes 8-bit codes less 128

struct F { __m512 v; };    // 16 floats
struct I { __m512i v; };   // 16 whole numbers of 32 bits
struct B { __m512i v; };   // 64 bytes

inline F set(float x) { return {_mm512_set1_ps(x)}; }
inline F load(const float* at) { return {_mm512_loadu_ps(at)}; }
inline F load(const float* at, int n) { return {_mm512_maskz_loadu_ps(_bzhi_u32(0xffff, n), at)}; }
inline void store(float* at, F a) { _mm512_storeu_ps(at, a.v); }
inline void store(float* at, F a, int n) { _mm512_mask_storeu_ps(at, _bzhi_u32(0xffff, n), a.v); }
inline F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F magnitude(F a) { return {_mm512_abs_ps(a.v)}; }
inline F nearest(F a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F by_power(F a, F power) { return {_mm512_scalef_ps(a.v, power.v)}; }  // a * 2^power
inline float sum(F a) { return _mm512_reduce_add_ps(a.v); }
inline float largest(F a) { return _mm512_reduce_max_ps(a.v); }
// the lanes from `from` to before `to` as they are, the others replaced
inline F within(F a, int from, int to, float otherwise) {
  const __mmask16 kept = _bzhi_u32(0xffff, to) & ~_bzhi_u32(0xffff, from);
  return {_mm512_mask_mov_ps(_mm512_set1_ps(otherwise), kept, a.v)};
}
// a where x > 0 or is no number, else b
inline F where_positive(F x, F a, F b) {
  return {_mm512_mask_mov_ps(b.v, _mm512_cmp_ps_mask(x.v, _mm512_setzero_ps(), _CMP_NLE_UQ), a.v)};
}

inline F halves(const u8* at) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)))}; }
inline F bytes(const u8* at) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))))};
}
inline F bytes(const i8* at) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))))};
}
inline void store_bf16(u16* at, F a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), (__m256i)_mm512_cvtneps_pbh(a.v));
}

inline I set(i32 x) { return {_mm512_set1_epi32(x)}; }
inline I add(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I to_int(F a) { return {_mm512_cvtps_epi32(a.v)}; }
inline i32 sum(I a) { return _mm512_reduce_add_epi32(a.v); }
inline void store_bytes(i8* at, I a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtepi32_epi8(a.v)); }

inline B load_bytes(const u8* at) { return {_mm512_loadu_si512(at)}; }
// `width` bits of every byte from bit `from`, moved to bit `to`
inline B field(B a, int from, int width, int to) {
  typedef u16 Words __attribute__((vector_size(64)));
  const auto moved = to > from ? (Words)a.v << (to - from) : (Words)a.v >> (from - to);
  return {_mm512_and_si512((__m512i)moved, _mm512_set1_epi8(static_cast<char>(((1 << width) - 1) << to)))};
}
inline B either(B a, B b) { return {_mm512_or_si512(a.v, b.v)}; }

// Each lane adds the products of its four codes (unsigned) with the four signed bytes of x.
template <int BITS>
inline I dot4(I to, B codes, i32 x) {
  return {_mm512_dpbusd_epi32(to.v, codes.v, _mm512_set1_epi32(x))};
}
// Each lane adds the products of its two bf16 numbers with the two of x.
inline F dot2(F to, const u16* pairs, i32 x) {
  return {_mm512_dpbf16_ps(to.v, (__m512bh)_mm512_loadu_si512(pairs), (__m512bh)_mm512_set1_epi32(x))};
}

// Into the second level: the first has room for few lines on their way. For it a single row is read a quarter slower on
// Zen 4; on a server with AMX a fortieth faster, but eight rows a fourteenth slower.
inline void prefetch(const u8* at) { _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T1); }

}  // namespace qkv::QKV_ISA
