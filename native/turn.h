// The orthogonal rotation that 4-bit values are stored in: a Walsh-Hadamard transform of runs of a head, as long as the
// largest power of two that divides it. It spreads outliers over the run; it is its own inverse. Include it only from kernel
// sources, like simd16.h.
#pragma once

#include "simd16.h"

namespace tenure {
namespace {

// One butterfly between lanes that are `stride` (1, 2, 4 or 8) apart.
template <int stride>
TENURE_INLINE f32x16 butterfly(f32x16 x) {
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    constexpr int s = stride;
    const f32x16 other = __builtin_shufflevector(x, x, 0 ^ s, 1 ^ s, 2 ^ s, 3 ^ s, 4 ^ s, 5 ^ s, 6 ^ s, 7 ^ s, 8 ^ s, 9 ^ s,
                                                 10 ^ s, 11 ^ s, 12 ^ s, 13 ^ s, 14 ^ s, 15 ^ s);
    return (lane & stride) != 0 ? other - x : other + x;
}

// x [head_dim], a multiple of 16, in place.
TENURE_INLINE void turn(float* x, int head_dim) {
    const int run = head_dim & -head_dim;
    for (int d = 0; d < head_dim; d += 16)
        store(x + d, butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(load<f32x16>(x + d))))));
    for (int stride = 16; stride < run; stride *= 2)
        for (int d = 0; d < head_dim; d += 16) {
            if (d & stride) continue;
            const auto a = load<f32x16>(x + d), b = load<f32x16>(x + d + stride);
            store(x + d, a + b);
            store(x + d + stride, a - b);
        }
    const f32x16 unit = splat(1.0f / __builtin_sqrtf(static_cast<float>(run)));
    for (int d = 0; d < head_dim; d += 16) store(x + d, load<f32x16>(x + d) * unit);
}

}  // namespace
}  // namespace tenure
