// Memory on huge pages where the system gives them, and on plain ones where it does not.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

namespace qkv {

// Zeroed at first, aligned to a huge page (2 MiB) when large and to a cache line otherwise. Untouched
// pages take no memory. Throws std::bad_alloc.
class Memory {
 public:
  Memory() = default;
  explicit Memory(std::size_t bytes);
  Memory(Memory&& other) noexcept { swap(other); }
  Memory& operator=(Memory&& other) noexcept {
    Memory taken(std::move(other));
    swap(taken);
    return *this;
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory();

  template <class T = unsigned char>
  T* as() const {
    return reinterpret_cast<T*>(start_);
  }
  std::size_t size() const { return size_; }

  // Makes room for so many bytes; what was there is lost when it grows.
  void reserve(std::size_t bytes) {
    if (bytes > size_) *this = Memory(bytes);
  }

 private:
  void swap(Memory& other) noexcept {
    std::swap(start_, other.start_);
    std::swap(size_, other.size_);
    std::swap(mapped_, other.mapped_);
    std::swap(length_, other.length_);
  }

  unsigned char* start_ = nullptr;
  std::size_t size_ = 0;
  void* mapped_ = nullptr;
  std::size_t length_ = 0;
};

// Many pieces on few huge pages: one of its own for each would waste most of it, and on plain pages
// memory is read at half the speed. A piece lives as long as anything holds it.
class Arena {
 public:
  // So many zeroed bytes, aligned to a cache line.
  std::shared_ptr<unsigned char> take(std::size_t bytes);

 private:
  std::shared_ptr<Memory> chunk_;
  std::size_t used_ = 0;
};

}  // namespace qkv
