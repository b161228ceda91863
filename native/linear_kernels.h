// What linear.cpp asks of an instruction set, and the layouts both sides agree on. Private to the linear layers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear.h"

namespace tenure {

// Packed weights are panels of 32 outputs, one after the other. Inside a panel:
//   f32   [k][32] float
//   bf16  [k/2][32][2]; an odd k is padded with a zero
//   int8  per group of 32: scale f16[32], then [8][32][4] bytes, q + 128
//   int4  per group of 32: scale f16[32], min f16[32], then [4][32][4] bytes; the low nibble of byte j of step s is
//         q[8 s + j], the high one q[8 s + 4 + j]
// so one panel is one sequential stream and every step of 4 bytes of x meets 128 bytes of weights (64 for int4).
constexpr std::size_t kScaleBytes = kPanel * 2;
constexpr std::size_t kInt8GroupBytes = kScaleBytes + kPanel * kGroup;
constexpr std::size_t kInt4GroupBytes = 2 * kScaleBytes + kPanel * kGroup / 2;

// Prepared activations, one row every `x_stride` bytes:
//   f32   the caller's own rows
//   bf16  k values, an odd k padded with a zero
//   int8  k values q, then per group: scale f32[k/32], then int32 -128 * sum(q), which undoes the + 128 of the weights
//   int4  k values q, then per group: scale f32[k/32], then f32 scale * sum(q), which meets the min of the weights
// A fine row has a second k values behind the first: q = 128 * high + low, the low ones in -64..63. So 15 bits are two
// exact dot products of 8, put together as integers.
constexpr int kLowValues = 128;
constexpr float kMostQ = 127, kMostFineQ = kMostQ * kLowValues;

struct PreparedRow {
    int8_t* q;
    int8_t* low;  // fine only
    float* scale;
    union {
        int32_t* bias;  // int8
        float* sum;     // int4
    };

    PreparedRow(std::byte* row, int k, bool fine)
        : q(reinterpret_cast<int8_t*>(row)), low(q + k), scale(reinterpret_cast<float*>(row + (fine ? 2 : 1) * k)),
          sum(scale + k / kGroup) {}
};

// Below this a group counts as zero: kMostFineQ / amax must not overflow, and such values move no output.
constexpr float kTiny = 1e-30f;

// The part of y that one work item computes: rows [row0, row1) of panels [panel0, panel1).
struct Block {
    const Linear* w;
    const std::byte* x;
    int64_t x_stride;  // bytes
    float* y;
    int64_t y_stride;  // floats
    const float* bias;
    bool accumulate;
    bool fine;
    int row0, row1, panel0, panel1;
};

struct LinearKernels {
    // Rounds or quantises one row of k values (not for f32).
    void (*prepare)(Format format, bool fine, const float* x, int k, std::byte* row);
    void (*multiply)(const Block& block);
};

namespace portable {
extern const LinearKernels linear_kernels;
}
namespace avx2 {
extern const LinearKernels linear_kernels;
}
namespace avx512 {
extern const LinearKernels linear_kernels;
}

}  // namespace tenure
