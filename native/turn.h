// The orthogonal rotation that K and V are turned by before they are rounded to 8 bits, and V to 4: a Walsh-Hadamard transform of runs of a head, as long as the
// largest power of two that divides it. It spreads outliers over the run; it is its own inverse. Include it only from kernel
// sources, like simd16.h.
#pragma once

#include "simd16.h"

namespace tenure {
namespace {

// One butterfly between lanes that are `stride` (1, 2, 4 or 8) apart.
template <int stride>
TENURE_INLINE f32x16 butterfly(f32x16 x) {
    constexpr int s = stride;
    constexpr auto sign = [](int lane) { return lane & s ? -1.0f : 1.0f; };
    const f32x16 signs = {sign(0), sign(1), sign(2), sign(3), sign(4), sign(5), sign(6), sign(7),
                          sign(8), sign(9), sign(10), sign(11), sign(12), sign(13), sign(14), sign(15)};
    const f32x16 other = __builtin_shufflevector(x, x, 0 ^ s, 1 ^ s, 2 ^ s, 3 ^ s, 4 ^ s, 5 ^ s, 6 ^ s, 7 ^ s, 8 ^ s, 9 ^ s,
                                                 10 ^ s, 11 ^ s, 12 ^ s, 13 ^ s, 14 ^ s, 15 ^ s);
    return madd(x, signs, other);  // exactly other ± x
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

// The same of 16 heads at once, each in a lane of x [head_dim].
TENURE_INLINE void turn_lanes(f32x16* x, int head_dim) {
    const int run = head_dim & -head_dim;
    for (int stride = 1; stride < run; stride *= 2)
        for (int d = 0; d < head_dim; d++) {
            if (d & stride) continue;
            const f32x16 a = x[d], b = x[d + stride];
            x[d] = a + b;
            x[d + stride] = a - b;
        }
    const f32x16 unit = splat(1.0f / __builtin_sqrtf(static_cast<float>(run)));
    for (int d = 0; d < head_dim; d++) x[d] = x[d] * unit;
}

}  // namespace
}  // namespace tenure
