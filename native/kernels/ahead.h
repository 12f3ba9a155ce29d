// What is read next is asked for while the kernels compute, so that memory is never idle.
#pragma once

#include "../common.h"

namespace qkv::QKV_ISA {

// A run of bytes to ask for, line for line: a burst of them would hold up what is read now.
class Ahead {
 public:
  Ahead() = default;
  Ahead(const u8* from, std::size_t bytes) : at_(from), end_(from == nullptr ? nullptr : from + bytes) {}
  void fetch(int bytes) {
    for (int i = 0; at_ < end_ && i < bytes; i += ROUND_LINE, at_ += ROUND_LINE) prefetch(at_);
  }

 private:
  const u8 *at_ = nullptr, *end_ = nullptr;
};

}  // namespace qkv::QKV_ISA
