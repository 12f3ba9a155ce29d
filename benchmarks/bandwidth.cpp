// How fast this machine reads memory right now: the bound on decoding, which reads every weight for a token.
//
//     bandwidth MEGABYTES REPEATS THREADS...      prints {"1": 31.2e9, "2": 35.0e9}, bytes a second
//
// Each thread reads a part of its own. The buffer is on huge pages where the system gives them: with small
// ones the same read is up to a third slower, as addresses are looked up 512 times as often.

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kLanes = 64;  // enough independent sums that the compiler keeps many loads in flight

double seconds() {
    using clock = std::chrono::steady_clock;
    return std::chrono::duration<double>(clock::now().time_since_epoch()).count();
}

uint64_t sum(const uint64_t* words, size_t count) {
    uint64_t lanes[kLanes] = {};
    for (size_t at = 0; at + kLanes <= count; at += kLanes)
        for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += words[at + lane];
    uint64_t total = 0;
    for (uint64_t lane : lanes) total += lane;
    return total;
}

// Seconds in which so many threads read the buffer once. They start together: a thread's own start is not read time.
double read_once(const uint64_t* words, size_t count, int threads, std::atomic<uint64_t>& sink) {
    const size_t part = count / threads;
    std::atomic<int> ready{0};
    std::atomic<bool> go{false};
    std::vector<std::thread> others;
    auto work = [&](int index) { sink += sum(words + index * part, part); };
    for (int index = 1; index < threads; ++index)
        others.emplace_back([&, index] {
            ++ready;
            while (!go) std::this_thread::yield();
            work(index);
        });
    while (ready < threads - 1) std::this_thread::yield();
    const double start = seconds();
    go = true;
    work(0);
    for (auto& other : others) other.join();
    return seconds() - start;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 4) {
        std::fprintf(stderr, "usage: bandwidth MEGABYTES REPEATS THREADS...\n");
        return 2;
    }
    const size_t bytes = std::strtoull(argv[1], nullptr, 10) * 1000000 / kHugePage * kHugePage + kHugePage;
    const int repeats = std::atoi(argv[2]);
    void* buffer = std::aligned_alloc(kHugePage, bytes);
    if (!buffer || repeats < 1) return 1;
    madvise(buffer, bytes, MADV_HUGEPAGE);
    std::memset(buffer, 1, bytes);
    std::atomic<uint64_t> sink{0};
    for (int argument = 3; argument < argc; ++argument) {
        const int threads = std::max(1, std::atoi(argv[argument]));
        std::vector<double> times;
        for (int repeat = 0; repeat < repeats; ++repeat)
            times.push_back(read_once(static_cast<uint64_t*>(buffer), bytes / 8, threads, sink));
        std::sort(times.begin(), times.end());
        std::printf("%s\"%d\": %.4g", argument == 3 ? "{" : ", ", threads, bytes / times[times.size() / 2]);
    }
    std::printf("}\n");
    return sink == 0;  // the sums are used, so that they are computed
}
