#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <new>

namespace qkv {

namespace {
constexpr std::size_t HUGE_PAGE = std::size_t{2} << 20;
constexpr std::size_t PAGE = 4096;
constexpr std::size_t CHUNK = 16 * HUGE_PAGE;
}  // namespace

Memory::Memory(std::size_t bytes) {
  if (bytes == 0) return;
  // a small buffer on a huge page of its own would waste most of it
  const bool large = bytes >= HUGE_PAGE;
  const std::size_t unit = large ? HUGE_PAGE : PAGE;
  const std::size_t rounded = (bytes + unit - 1) / unit * unit;
  length_ = large ? rounded + HUGE_PAGE : rounded;
  mapped_ = mmap(nullptr, length_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped_ == MAP_FAILED) {
    mapped_ = nullptr;
    throw std::bad_alloc();
  }
  const auto address = reinterpret_cast<std::uintptr_t>(mapped_);
  start_ = reinterpret_cast<unsigned char*>((address + unit - 1) / unit * unit);
  size_ = bytes;
#ifdef MADV_HUGEPAGE
  // only a hint: a system without huge pages serves it from plain ones
  if (large) (void)madvise(start_, rounded, MADV_HUGEPAGE);
#endif
}

Memory::~Memory() {
  if (mapped_ != nullptr) munmap(mapped_, length_);
}

std::shared_ptr<unsigned char> Arena::take(std::size_t bytes) {
  bytes = (bytes + 63) / 64 * 64;
  if (chunk_ == nullptr || used_ + bytes > chunk_->size()) {
    chunk_ = std::make_shared<Memory>(std::max(bytes, CHUNK));
    used_ = 0;
  }
  unsigned char* start = chunk_->as() + used_;
  used_ += bytes;
  return {chunk_, start};
}

}  // namespace qkv
