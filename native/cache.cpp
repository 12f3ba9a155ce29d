#include "cache.h"

#include <algorithm>

namespace qkv {

namespace {
constexpr std::size_t SEGMENT_BYTES = std::size_t{16} << 20;
}

Cache::Cache(const std::vector<Slot>& slots, int groups, Kept kept) : slots_(slots), groups_(groups) {
  for (const auto& slot : slots) {
    shapes_.push_back({kept, round_up(slot.key_dim, 4), round_up(slot.value_dim, LANES)});
    offsets_.push_back(groups_[slot.group].bytes);
    groups_[slot.group].bytes += slot_bytes(static_cast<int>(shapes_.size()) - 1);
  }
  for (auto& group : groups_)
    while (group.segment < 1024 && group.segment * group.bytes * 2 <= SEGMENT_BYTES) group.segment *= 2;
}

void Cache::reserve(int group, int count) {
  auto& held = groups_[group];
  while (reserved(group) < count) held.segments.emplace_back(held.bytes * held.segment);
}

void Cache::clear(int group, int number) {
  for (int s = 0; s < static_cast<int>(slots_.size()); s++)
    for (int head = 0; slots_[s].group == group && head < slots_[s].kv_heads; head++) {
      const Block cleared = block(s, number, head);
      std::memset(cleared.key, 0, shapes_[s].key_bytes());
      std::memset(cleared.value, 0, shapes_[s].value_bytes());
    }
}

void Cache::copy(int group, int from, int to) {
  for (int s = 0; s < static_cast<int>(slots_.size()); s++)
    for (int head = 0; slots_[s].group == group && head < slots_[s].kv_heads; head++) {
      const Block source = block(s, from, head), copied = block(s, to, head);
      std::memcpy(copied.key, source.key, shapes_[s].key_bytes());
      std::memcpy(copied.value, source.value, shapes_[s].value_bytes());
    }
}

}  // namespace qkv
