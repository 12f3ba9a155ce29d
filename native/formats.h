// How weights are kept: the values of a file's format unchanged, their order made for the vectors.
//
// A matrix of (rows, columns) is cut into panels of 32 rows, two blocks of 16. A vector then holds one
// column (or four neighbouring ones) of 16 rows, so that no sum is ever taken across a vector. Plain
// formats are
//
//   F32   [column][32]            BF16  [column / 2][block][16][2]            F16  [column][32]
//
// Quantised formats keep a record for each 32 columns of a panel: codes, then scales. Codes of 4 bits
// fill 64 bytes with two vectors of 16 rows x 4 columns, the low halves of the bytes first; the fifth
// bits of a record are 64 bytes more for each block, bit j that of the j-th such vector, and the upper
// pairs of bits of Q6_K likewise for four vectors at a time. Scales stand as the file has them:
//
//   Q4_0 Q5_0 Q8_0   float16 d[32]                                             d * (code - zero)
//   Q4_1 Q5_1        float16 d[32], m[32]                                      d * code + m
//   Q4_K Q5_K        u8 scale[32], minimum[32]; every 8 records float16 d[32], dmin[32] before them
//                                                                              d * scale * code - dmin * minimum
//   Q6_K             i8 scale[2][32], one for 16 columns each; d[32] before    d * scale * (code - 32)
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "common.h"
#include "memory.h"

namespace qkv {

enum class Format { F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };

enum class Scaling { None, Scale, ScaleAndMinimum, Nested, NestedBySixteen };

struct Layout {
  Format format;
  std::string_view name;
  int bits;          // of a code; 16 or 32 for plain numbers
  int zero;          // the code of 0
  Scaling scaling;
  int block;         // columns of a block as the file has it
  int block_bytes;

  bool quantised() const { return scaling != Scaling::None; }
  bool nested() const { return scaling == Scaling::Nested || scaling == Scaling::NestedBySixteen; }
  int code_bytes() const { return bits * PANEL * GROUP / 8; }
  int record_bytes() const { return code_bytes() + (scaling == Scaling::Scale ? 64 : scaling == Scaling::None ? 0 : scaling == Scaling::Nested || scaling == Scaling::NestedBySixteen ? 64 : 128); }
  // what stands before every eighth record
  int header_bytes() const { return scaling == Scaling::Nested ? 128 : scaling == Scaling::NestedBySixteen ? 64 : 0; }
};

const Layout& layout(Format format);
const Layout& layout(std::string_view name);  // std::invalid_argument for a name there is not

// Rows as a file has them: `data` holds `rows` times columns / block blocks.
struct Part {
  const u8* data;
  int rows;
};

// A matrix, or the same rows of several side by side.
class Matrix {
 public:
  // The rows of all parts below each other; with `paired`, of two parts 16 rows in turn, so that a
  // panel holds a gate and what it multiplies.
  Matrix(Arena& arena, Format format, int columns, const std::vector<Part>& parts, bool paired);

  const Layout& kind() const { return *layout_; }
  Format format() const { return layout_->format; }
  int rows() const { return rows_; }          // with `paired`, of both parts together
  int columns() const { return columns_; }
  int padded() const { return padded_; }      // columns, rounded up to a whole record
  int panels() const { return ceil_div(rows_, PANEL); }
  std::size_t panel_bytes() const { return panel_bytes_; }
  const u8* panel(int number) const { return memory_.get() + number * panel_bytes_; }
  std::size_t bytes() const { return panels() * panel_bytes_; }

  // The values of a row, as the kernels have them: exactly those of the file.
  void row(int number, float* out) const;

 private:
  void pack(const u8* source, int row);

  const Layout* layout_;
  int rows_, columns_, padded_;
  std::size_t panel_bytes_;
  std::shared_ptr<u8> memory_;
};

}  // namespace qkv
