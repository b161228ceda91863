// What a decoder does to one row at a time. Every kernel treats a row the same way whatever surrounds it.
#pragma once

#include <cstdint>

#include "isa.h"

namespace tenure {

struct RowKernels {
    // out = x / sqrt(mean(x²) + eps) * weight
    void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* out);
    // out[i] = silu(gate_up[i]) * gate_up[n + i]
    void (*silu_mul)(const float* gate_up, int n, float* out);
    // Rotates `heads` vectors of head_dim in place, pairing (i, i + head_dim / 2), then multiplies by scale.
    void (*rotate)(float* x, int heads, int head_dim, const float* cos, const float* sin, float scale);
};

namespace portable { extern const RowKernels row_table; }
namespace avx2 { extern const RowKernels row_table; }
namespace avx512 { extern const RowKernels row_table; }

const RowKernels& row_kernels(const Isa& isa);

}  // namespace tenure
