// AVX-512 without tile registers. The other headers of this folder offer the same.
#pragma once

#include "zmm.h"

namespace qkv::QKV_ISA {

constexpr int NEAR = 1024;  // bytes that weights are asked for ahead, across the ends of pages: measured on Zen 4

}  // namespace qkv::QKV_ISA
