// Sharing a range between threads so that each walks through memory in one place.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace tenure {

// Hands out [0, count) so that every thread walks a stretch of its own: weights then stream through one place in memory,
// and the processor's prefetcher is not led astray by a new start for every item. A thread whose stretch is used up takes
// from the far end of another's, so that a thread which never comes leaves nothing behind.
class Stretches {
public:
    Stretches(int count, int threads) : stretches_(std::min(threads, kMost)) {
        for (int s = 0; s < stretches_; ++s) {
            const auto first = uint64_t(count) * s / stretches_, last = uint64_t(count) * (s + 1) / stretches_;
            left_[s].range.store(first << 32 | last, std::memory_order_relaxed);
        }
    }

    // To be called `count` times in all, by any threads.
    int take(int thread) {
        for (int i = 0, s = thread % stretches_;; ++i, s = (s + 1) % stretches_) {
            std::atomic<uint64_t>& range = left_[s].range;
            uint64_t now = range.load(std::memory_order_relaxed);
            while (now >> 32 < (now & 0xffffffff)) {
                const uint64_t then = i == 0 ? now + (uint64_t{1} << 32) : now - 1;
                if (range.compare_exchange_weak(now, then, std::memory_order_relaxed)) {
                    return static_cast<int>(i == 0 ? now >> 32 : then & 0xffffffff);
                }
            }
        }
    }

private:
    static constexpr int kMost = 32;
    struct alignas(64) Stretch {
        std::atomic<uint64_t> range;  // first << 32 | last
    };
    int stretches_;
    Stretch left_[kMost];
};

}  // namespace tenure
