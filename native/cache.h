// Keys and values of many sequences, in blocks of 16 tokens that the caller hands out.
#pragma once

#include <vector>

#include "kernels.h"

namespace qkv {

// What one attention keeps. Slots of a group share their tables of blocks.
struct Slot {
  int group, kv_heads, key_dim, value_dim;
};

class Cache {
 public:
  Cache(const std::vector<Slot>& slots, int groups, Kept kept);
  Cache(const Cache&) = delete;

  // Makes room for blocks 0 to before `count` of a group. What is there stays where it is.
  void reserve(int group, int count);
  // A block's values, in all slots of its group, become zeros or those of another.
  void clear(int group, int block);
  void copy(int group, int from, int to);

  const Slot& slot(int number) const { return slots_[number]; }
  const BlockShape& shape(int number) const { return shapes_[number]; }
  int groups() const { return static_cast<int>(groups_.size()); }
  int reserved(int group) const { return static_cast<int>(groups_[group].segments.size()) * groups_[group].segment; }
  // of all slots of a group, for one block
  std::size_t block_bytes(int group) const { return groups_[group].bytes; }

  // Keys of a head lie block by block, and so do its values: a text's blocks, which mostly follow each other,
  // are read in order.
  Block block(int slot, int number, int head) const {
    const auto& group = groups_[slots_[slot].group];
    const auto& shape = shapes_[slot];
    const std::size_t place = std::size_t(head) * group.segment + number % group.segment;
    u8* start = group.segments[number / group.segment].as<u8>() + offsets_[slot] * group.segment;
    u8* values = start + std::size_t(slots_[slot].kv_heads) * group.segment * shape.key_bytes();
    return {start + place * shape.key_bytes(), values + place * shape.value_bytes()};
  }

 private:
  // Memory comes in segments of some blocks, so that it grows without moving.
  struct Group {
    std::size_t bytes = 0;
    int segment = 1;  // blocks
    std::vector<Memory> segments;
  };
  std::size_t slot_bytes(int slot) const { return shapes_[slot].bytes() * slots_[slot].kv_heads; }

  std::vector<Slot> slots_;
  std::vector<BlockShape> shapes_;
  std::vector<std::size_t> offsets_;  // of a slot within a block of its group
  std::vector<Group> groups_;
};

}  // namespace qkv
