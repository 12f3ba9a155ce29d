// The inner loops, one table of them for each instruction set; which is chosen when the module loads.
//
// Every kernel computes a row by the same operations in the same order, however many rows it is given:
// results do not depend on batch mates, chunks or threads.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "formats.h"

namespace qkv {

// How a kernel wants the rows of x: in tiles of T rows, each a run of records.
enum class Reading {
  Codes,   // each 32 columns: i8 [T][32], then [T] each of: scale, scale * sum, sum, sum of the first 16
  Pairs,   // bf16 [column / 2][T][2]
  Rows,    // each 32 columns: bf16 [T][32]; past the last column zeros
  Floats,  // [column][T]
};
constexpr int READINGS = 4;

inline std::size_t tile_bytes(Reading reading, int columns, int rows) {
  const int each = reading == Reading::Codes ? 48 : reading == Reading::Floats ? 128 : 64;  // of 32 columns of a row
  return std::size_t(reading == Reading::Rows ? round_up(columns, GROUP) : columns) * rows * each / GROUP;
}

struct Activation {
  enum Kind { Identity, Relu, Relu2, Gelu, GeluTanh, QuickGelu, Silu, Sigmoid, Tanh, ClampedSwish };
  Kind kind = Identity;
  float alpha = 1, limit = 0, offset = 0;  // of a clamped swish
};

// What becomes of a panel's products before they reach a row of `out`.
struct Finish {
  const float* bias = nullptr;  // of the panel's 32 rows
  bool gated = false;           // 16 gates, then 16 that they multiply
  bool add = false;             // out + scale * product
  float scale = 1;
  Activation activation;
};

enum class Kept { F32, BF16, I8 };  // how the cache holds keys and values

// Keys and values of one head in a block of 16 tokens; dimensions rounded up (keys to 4, values to 16).
//   F32   key [dim][16]           value [16][dim]
//   BF16  key [dim / 2][16][2]    value [8][dim][2]
//   I8    key [dim / 4][16][4] with 128 added, scale [16]    value [16][dim], scale [16]
struct BlockShape {
  Kept kept;
  int key_dim, value_dim;

  std::size_t key_bytes() const { return bytes(key_dim); }
  std::size_t value_bytes() const { return bytes(value_dim); }
  std::size_t bytes() const { return key_bytes() + value_bytes(); }

 private:
  std::size_t bytes(int dim) const {
    const std::size_t numbers = std::size_t(dim) * BLOCK_TOKENS;
    return kept == Kept::F32 ? 4 * numbers : kept == Kept::BF16 ? 2 * numbers : numbers + 4 * BLOCK_TOKENS;
  }
};

// Where they lie: keys of one block after another, and values apart from them, so that each is read as a stream.
struct Block {
  u8* key = nullptr;
  u8* value = nullptr;
};

constexpr int MOST_QUERIES = 16;
constexpr int MOST_DIMENSIONS = 512;  // of a head

// Queries that read the same head of the cache, and what each sees of it.
struct Queries {
  int count = 0;
  int position[MOST_QUERIES];
  int from[MOST_QUERIES], to[MOST_QUERIES];  // keys seen: from, and before to
  float slope[MOST_QUERIES];                 // subtracted for each token of distance
  const float* bias[MOST_QUERIES];           // added, by how far the key is ahead; null: none
  bool once = true;                          // no others read the same keys: they come from memory
  int reach = 0;                             // bias[q] spans from -reach to reach
  float cap = 0;                             // 0: none
  float scale[MOST_QUERIES];                 // of i8 queries
  i32 sum[MOST_QUERIES];
  alignas(64) u8 packed[MOST_QUERIES * MOST_DIMENSIONS * 4];  // by dimension, then query, as the cache holds keys; or as kernels like
};

// The softmax over a split of the cache: greatest score, sum and mixed values of each query.
struct Partial {
  float *top, *total, *mixed;  // [count], [count], [count][value_dim]
};

// Of a row of numbers: where the greatest is, the first among equals; it; and ln of the sum of e^x.
// All are no number (and the place is 0) where one of the row is none, or infinite.
struct Summary {
  i32 best = 0;
  float top = 0, log_sum = 0;
};

// How often a panel has been gone through before, and how many times it is, one after another; and what its
// thread reads afterwards: null where that is not known, or is no use.
struct Pass {
  int before = 0, times = 1;
  const u8* after = nullptr;
  std::size_t bytes = 0;
};

constexpr int MOST_ROWS = 128;  // of a tile
constexpr int MANY = 41;        // rows from which on a large tile of codes is the quicker: measured

struct Kernels {
  const char* name;
  Reading pairs;                   // how rows come to a matrix of bf16: in pairs or row by row
  // how many rows of x a tile has at most: of codes, where there are MANY rows or not, of bf16 and of floats
  int code_tile, large_code_tile, pair_tile, plain_tile;

  Reading reading(const Layout& kind) const {
    return kind.quantised() ? Reading::Codes : kind.format == Format::BF16 ? pairs : Reading::Floats;
  }
  int most_rows(Reading reading, int count) const {
    if (reading == Reading::Codes) return count < MANY ? code_tile : large_code_tile;
    return reading == Reading::Floats ? plain_tile : pair_tile;
  }
  // The rows of each tile of `count`, but for the last: as few tiles as can be, of one size.
  int tile_rows(Reading reading, int count) const {
    return count == 0 ? 1 : ceil_div(count, ceil_div(count, most_rows(reading, count)));
  }

  // Row `place` of a tile of `tile` rows is filled from x.
  void (*read)(Reading, const float* x, int columns, int padded, u8* to, int tile, int place);
  // out [tile][32]: the products of a panel with a tile of rows
  void (*linear)(const Matrix&, int panel, const u8* rows, int tile, const Pass&, float* out);
  // `count` of them, each 32 (or 16) wide, into rows of out that are `stride` apart
  void (*finish)(const Finish&, const float* products, int count, float* out, std::size_t stride, int wide);

  void (*norm)(const float* x, int n, bool centred, float eps, const float* scale, const float* bias, float* out);
  void (*rotate)(float* x, int pairs, bool interleaved, const float* cosine, const float* sine);
  void (*activate)(const Activation&, float* x, int n);
  void (*gate)(const Activation&, const float* x, float* out, int n);  // out = activation(x) * out
  void (*multiply)(float* out, const float* x, int n);
  void (*scale)(float* out, float by, int n);
  void (*add)(float* out, float skip, const float* x, float by, int n);  // out = skip * out + by * x
  void (*cap)(float* out, float cap, int n);
  void (*clamp)(float* out, float bound, int n);

  void (*keep)(const BlockShape&, const float* key, int key_dim, const float* value, int value_dim, Block block, int place);
  int (*queries)(const BlockShape&);  // that are read together, at most
  void (*pack)(const BlockShape&, Queries&, int place, const float* query, int key_dim, float scale);
  // blocks[0] holds token `first`; those without keys are seen by no query; `next`: those that are read next, or null
  void (*attend)(const BlockShape&, const Queries&, const Block* blocks, const Block* next, int first, Partial);
  // later is taken into so far, each of so many queries with so many mixed values
  void (*merge)(Partial so_far, Partial later, int count, int value_dim);
  Summary (*summary)(const float* x, int n);
};

// The sets that this build has and this processor runs, best first.
const std::vector<const Kernels*>& kernel_sets();
// The named one, or the best; std::invalid_argument for one that cannot be had.
const Kernels& kernels(std::string_view name = "");

}  // namespace qkv
