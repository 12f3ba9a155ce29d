// How fast memory is read: the bound on decoding, which reads every weight for a token.
#pragma once

namespace qkv {

// Bytes a second in which so many threads together read a buffer far larger than any cache, on huge pages
// where the system gives them: the best of several passes. Takes 256 MiB meanwhile, and about 0.1 s.
double read_bandwidth(int threads);

}  // namespace qkv
