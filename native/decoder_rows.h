// What a decoder does to one row at a time. Every kernel treats a row the same way whatever surrounds it.
#pragma once

#include <cstdint>

#include "isa.h"

namespace tenure {

struct RowKernels {
    // out = x / sqrt(mean(x²) + eps) * weight
    void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* out);
    // out[i] = f(gate_up[i]) * gate_up[n + i], f by Activation
    void (*gate[2])(const float* gate_up, int n, float* out);
    // Rotates the first 2 * half of each of `heads` vectors of head_dim in place, pairing (i, i + half), then multiplies
    // all of it by scale.
    void (*rotate)(float* x, int heads, int head_dim, int half, const float* cos, const float* sin, float scale);
    // x += scale * y
    void (*add_scaled)(const float* y, float scale, int n, float* x);
    // x = squash(x * scale, cap); cap 0: not squashed
    void (*scale_logits)(float* x, int n, float scale, float cap);
};

enum class Activation { silu = 0, gelu_tanh = 1 };

namespace portable { extern const RowKernels row_table; }
namespace avx2 { extern const RowKernels row_table; }
namespace avx512 { extern const RowKernels row_table; }

const RowKernels& row_kernels(const Isa& isa);

}  // namespace tenure
