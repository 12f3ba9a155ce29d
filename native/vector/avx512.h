// AVX-512 without tile registers. The other headers of this folder offer the same.
#pragma once

#include "zmm.h"

namespace qkv::QKV_ISA {

constexpr int NEAR = 1024;  // bytes that weights are asked for ahead, across the ends of pages: measured on Zen 4

// Into the second level of the cache: the first has room for few lines on their way, and a single row reads a
// quarter slower for it.
inline void prefetch(const u8* at) { _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T1); }

}  // namespace qkv::QKV_ISA
