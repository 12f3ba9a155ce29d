// Matrices as files hold them, and what they mean in double precision.
#pragma once

#include "check.h"

namespace qkv::tests {

constexpr Format FORMATS[] = {Format::F32,  Format::F16,  Format::BF16, Format::Q4_0, Format::Q4_1, Format::Q5_0,
                              Format::Q5_1, Format::Q8_0, Format::Q4_K, Format::Q5_K, Format::Q6_K};

struct Given {
  std::vector<u8> data;
  int rows, columns;
  // each (row, column): the value, and what its parts add up to in magnitude
  std::vector<double> values, sizes;
};

// Random codes under scales of an ordinary size.
Given given(Format format, int rows, int columns, Numbers& numbers);

double half(u16 bits);    // the value of a float16
float to_pairs(float x);  // rounded to bfloat16 and back

}  // namespace qkv::tests
