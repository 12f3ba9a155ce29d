// What the tests of the runtime without Python share: numbers to try, and a record of what was wrong.
//
// Expected values are computed in double precision from what the headers say, by code of the tests' own.
// Tolerances are bounds on the rounding of floats (UNIT is half the distance of 1 and the next one), so
// that they hold for every order and fusion of the same operations.
#pragma once

#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "kernels.h"

namespace qkv::tests {

constexpr double UNIT = 0x1p-24;
constexpr float NO_NUMBER = __builtin_nanf("");
constexpr float INFINITE = __builtin_inff();

// Numbers that look random and are the same on every machine.
class Numbers {
 public:
  explicit Numbers(u32 seed) : state_(seed * 2654435761u + 1) {}
  u32 bits() {
    state_ ^= state_ << 13, state_ ^= state_ >> 17, state_ ^= state_ << 5;
    return state_;
  }
  int below(int n) { return static_cast<int>(bits() % static_cast<u32>(n)); }
  float between(float low, float high) { return low + (high - low) * static_cast<float>(bits() >> 8) * 0x1p-24f; }
  std::vector<float> vector(int n, float size = 1) {
    std::vector<float> found(n);
    for (float& each : found) each = between(-size, size);
    return found;
  }

 private:
  u32 state_;
};

// Counts what is compared, and tells the first of what differs: under which circumstances, what, and where
// by the numbers `at`.
class Record {
 public:
  using At = std::initializer_list<long>;
  // What follows is compared under these circumstances.
  void about(std::string circumstances) { about_ = std::move(circumstances); }
  void that(bool holds, std::string_view what, At at = {}) {
    compared_++;
    if (!holds && tell(what, at)) std::printf("\n");
  }
  // |got - want| <= tolerance; what is no number is near nothing.
  void near(double got, double want, double tolerance, std::string_view what, At at = {}) {
    compared_++;
    if (std::fabs(got - want) <= tolerance || got == want) return;
    if (tell(what, at)) std::printf(": %.9g instead of %.9g, tolerance %.2g\n", got, want, tolerance);
  }
  void same(const std::vector<float>& got, const std::vector<float>& want, std::string_view what, At at = {}) {
    that(got.size() == want.size() && std::memcmp(got.data(), want.data(), got.size() * sizeof(float)) == 0, what, at);
  }
  long compared() const { return compared_; }
  long failed() const { return failed_; }

 private:
  bool tell(std::string_view what, At at) {
    if (++failed_ > 20) return false;
    std::printf("  wrong: %s: %.*s", about_.c_str(), static_cast<int>(what.size()), what.data());
    for (long each : at) std::printf(" %ld", each);
    return true;
  }

  std::string about_;
  long compared_ = 0, failed_ = 0;
};

void check_linear(const Kernels&, Record&);
void check_read(const Kernels&, Record&);
void check_finish(const Kernels&, Record&);
void check_rows(const Kernels&, Record&);
void check_cache(const Kernels&, Record&);
void check_attend(const Kernels&, Record&);
void check_workers(const Kernels&, Record&);
void check_program(const Kernels&, Record&);

}  // namespace qkv::tests
