#include <cmath>

#include "decoder_rows.h"
#include "simd16.h"

#ifndef TENURE_KERNELS
#define TENURE_KERNELS portable
#endif

namespace tenure::TENURE_KERNELS {
namespace {

void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
    f32x16 squares = {};
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        const auto v = load<f32x16>(x + i);
        squares = madd(v, v, squares);
    }
    float sum = sum_lanes(squares);
    for (; i < n; i++) sum += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(sum / static_cast<float>(n) + eps);
    for (i = 0; i < n; i++) out[i] = x[i] * scale * weight[i];
}

TENURE_INLINE f32x16 silu(f32x16 x) {
    // Past 2^115 the quotient is zero for all that f32 can tell, and exp2_lanes ends at 2^127.
    const f32x16 power = splat(-1.44269504f) * x, most = splat(115.0f);
    const f32x16 e = exp2_lanes(power < most ? power : most);
    return x / (splat(1.0f) + e);
}

void silu_mul(const float* gate_up, int n, float* out) {
    int i = 0;
    for (; i + 16 <= n; i += 16)
        store(out + i, silu(load<f32x16>(gate_up + i)) * load<f32x16>(gate_up + n + i));
    if (i == n) return;
    f32x16 gate = {};
    std::memcpy(&gate, gate_up + i, sizeof(float) * (n - i));
    gate = silu(gate);
    for (int j = 0; i < n; i++, j++) out[i] = gate[j] * gate_up[n + i];
}

void rotate(float* x, int heads, int head_dim, const float* cos, const float* sin, float scale) {
    const int half = head_dim / 2;
    for (int h = 0; h < heads; h++, x += head_dim)
        for (int i = 0; i < half; i++) {
            const float a = x[i], b = x[i + half];
            x[i] = (a * cos[i] - b * sin[i]) * scale;
            x[i + half] = (b * cos[i] + a * sin[i]) * scale;
        }
}

}  // namespace

extern const RowKernels row_table;
const RowKernels row_table = {rms_norm, silu_mul, rotate};

}  // namespace tenure::TENURE_KERNELS
