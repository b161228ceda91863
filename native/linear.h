// Linear layers: y = x Wᵀ with packed weights in four formats.
//
// Row invariance: a row of y depends on its row of x and on W alone, bit for bit, whatever the number of rows, their
// position and the number of threads. Every output is summed over K in ascending order; formats in groups of 32 take an
// exact integer dot product inside a group and one f32 fma per group, so tile shapes are free to differ.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "buffer.h"
#include "isa.h"
#include "team.h"

namespace tenure {

// f32:  f32 everywhere.
// bf16: x is rounded to bf16 (nearest even), products are summed in f32.
// int8: value = scale * q, q in -128..127, groups of 32 along K with one f16 scale (GGUF Q8_0, bit for bit).
// int4: value = scale * q + min, q in 0..15, groups of 32 along K, scale and min f16 (Q4_1; Q4_0 with min = -8 * scale).
// int8 and int4 quantise x to 8 bits with one f32 scale per 32 values, or to 15 bits for a `fine` call.
enum class Format : uint8_t { f32 = 0, bf16 = 1, int8 = 2, int4 = 3 };

// By name ("f32", "bf16", "int8", "int4"); throws std::invalid_argument when unknown.
Format format_named(const std::string& name);

constexpr int kGroup = 32;   // values that share a scale, along K
constexpr int kPanel = 32;   // outputs packed side by side

struct Linear {
    Format format = Format::f32;
    int n = 0;  // outputs
    int k = 0;  // inputs
    Buffer data;

    int panels() const { return (n + kPanel - 1) / kPanel; }
    std::size_t panel_bytes() const;
    std::size_t bytes() const { return panels() * panel_bytes(); }
};

std::size_t packed_bytes(Format format, int n, int k);

// Packs row-major w[n, k]: float | bf16 as uint16_t | int8_t | uint8_t with one 4-bit q per byte. `scale` (int8, int4)
// and `min` (int4) are f16 bits [n, k / 32]. Throws std::invalid_argument when the shape or a missing array forbids it.
Linear pack(Format format, int n, int k, const void* w, const uint16_t* scale = nullptr,
            const uint16_t* min = nullptr);

// Dequantised weights, row-major f32: all of them [n, k], or the one row of an embedding [k].
void unpack(const Linear& w, float* out);
void unpack_row(const Linear& w, int row, float* out);

// Rounded or quantised activations of the call in progress; one per caller, reused between calls.
struct Scratch {
    Buffer x;
};

struct LinearCall {
    const float* x;             // [m, k]
    int64_t x_stride;           // floats between rows
    float* y;                   // [m, n]
    int64_t y_stride;
    int m;
    const float* bias = nullptr;  // [n] or none
    bool accumulate = false;      // y += x Wᵀ (+ bias) instead of y = …
    bool fine = false;            // int8 and int4: x in 15 bits instead of 8, for twice the integer products
};

// x and y must not overlap. m = 0 does nothing.
void linear(const Linear& w, const LinearCall& call, Scratch& scratch, Team& team, const Isa& isa);

}  // namespace tenure
