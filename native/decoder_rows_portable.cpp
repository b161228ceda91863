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

// x / (1 + 2^power)
TENURE_INLINE f32x16 over_one_plus(f32x16 x, f32x16 power) {
    // Past 2^115 the quotient is zero for all that f32 can tell, and exp2_lanes ends at 2^127.
    const f32x16 most = splat(115.0f);
    return x / (splat(1.0f) + exp2_lanes(power < most ? power : most));
}

template <Activation activation>
TENURE_INLINE f32x16 activate(f32x16 x) {
    if constexpr (activation == Activation::silu) return over_one_plus(x, splat(-1.44269504f) * x);
    // x/2 (1 + tanh(u)) = x / (1 + e^-2u) with u = sqrt(2/pi) (x + 0.044715 x^3); -2 log2(e) sqrt(2/pi) = -2.3022082.
    return over_one_plus(x, splat(-2.30220820f) * (x + splat(0.044715f) * x * x * x));
}

template <Activation activation>
void gate(const float* gate_up, int n, float* out) {
    int i = 0;
    for (; i + 16 <= n; i += 16)
        store(out + i, activate<activation>(load<f32x16>(gate_up + i)) * load<f32x16>(gate_up + n + i));
    if (i == n) return;
    f32x16 last = {};
    std::memcpy(&last, gate_up + i, sizeof(float) * (n - i));
    last = activate<activation>(last);
    for (int j = 0; i < n; i++, j++) out[i] = last[j] * gate_up[n + i];
}

void rotate(float* x, int heads, int head_dim, int half, const float* cos, const float* sin, float scale) {
    for (int h = 0; h < heads; h++, x += head_dim) {
        for (int i = 0; i < half; i++) {
            const float a = x[i], b = x[i + half];
            x[i] = (a * cos[i] - b * sin[i]) * scale;
            x[i + half] = (b * cos[i] + a * sin[i]) * scale;
        }
        for (int i = 2 * half; i < head_dim; i++) x[i] *= scale;
    }
}

void add_scaled(const float* y, float scale, int n, float* x) {
    for (int i = 0; i < n; i++) x[i] += scale * y[i];
}

void scale_logits(float* x, int n, float scale, float cap) {
    for (int i = 0; i < n; i++) x[i] *= scale;
    if (cap == 0.0f) return;
    int i = 0;
    for (; i + 16 <= n; i += 16) store(x + i, squash(load<f32x16>(x + i), cap));
    f32x16 last = {};
    std::memcpy(&last, x + i, sizeof(float) * (n - i));
    last = squash(last, cap);
    std::memcpy(x + i, &last, sizeof(float) * (n - i));
}

}  // namespace

extern const RowKernels row_table;
const RowKernels row_table = {rms_norm, {gate<Activation::silu>, gate<Activation::gelu_tanh>}, rotate,
                                add_scaled, scale_logits};

}  // namespace tenure::TENURE_KERNELS
