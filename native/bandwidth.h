// How fast memory is read: the bound on decoding, which reads every weight for a token.
#pragma once

#include <cstddef>

namespace qkv {

// Bytes a second in which so many threads together read a buffer of about so many bytes over and over, on huge
// pages where the system gives them: the best of several passes. It may come from a cache that holds it.
double read_bandwidth(int threads, std::size_t bytes);

}  // namespace qkv
