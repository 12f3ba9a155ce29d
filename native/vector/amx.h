// AVX-512's vectors, and the tile registers of AMX for products of many numbers at once: 16 rows of x with 16
// of a matrix. kernels/tiles.h is what uses them.
#pragma once

#include <initializer_list>

#include "zmm.h"

#define QKV_TILES

namespace qkv::QKV_ISA {

constexpr int NEAR = 4096;  // bytes that weights are asked for ahead: the last cache of such servers answers late

// What a tile register holds: so many rows of so many bytes.
struct Shape {
  int rows, bytes;
};

// The shapes of the registers, from 0 on, as long as it lives: asked for anew by whoever uses them, as other
// libraries of the process may have them otherwise. It takes as long as a dozen products.
class Shapes {
 public:
  Shapes(std::initializer_list<Shape> shapes) {
    int at = 0;
    for (const auto& [rows, bytes] : shapes) {
      if (rows > 0) rows_[at] = static_cast<u8>(rows), bytes_[at] = static_cast<u16>(bytes);
      at++;
    }
    asm volatile("" : : "r"(this) : "memory");  // all that tiles are loaded from is written, this as well
    _tile_loadconfig(this);
  }
  Shapes(const Shapes&) = delete;
  ~Shapes() { _tile_release(); }

 private:
  u8 palette_ = 1, start_ = 0, reserved_[14] = {};
  u16 bytes_[16] = {};
  u8 rows_[16] = {};
};

}  // namespace qkv::QKV_ISA
