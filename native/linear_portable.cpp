// Linear layers in plain C++ on vector extensions; compiled for the base architecture and again for AVX2, where int8 and
// int4 take the integer instructions of linear_avx2.h instead.
//
// A group of 32 inputs is first expanded to f32, 32 by 32 outputs, and then meets all rows. Products of quantised values
// and their sums stay below 2^24, so f32 arithmetic on them is exact and equals the integer dot product of the AVX-512
// path bit for bit. Fine rows take two such sums, of high and of low values.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "linear_kernels.h"

#if defined(__AVX2__)
#include "linear_avx2.h"
#endif

#ifndef TENURE_KERNELS
#define TENURE_KERNELS portable
#endif

namespace tenure::TENURE_KERNELS {
namespace {

// Rows at a time so that their sums stay in the 16 registers: 3 rows of 4 vectors, or 1 of 8.
#if defined(__AVX2__)
constexpr int kLanes = 8, kMostRows = 3;
#else
constexpr int kLanes = 4, kMostRows = 1;
#endif
constexpr int kVectors = kPanel / kLanes;

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

inline Floats splat(float v) { return v - Floats{}; }  // minus, not plus: -0 stays -0

template <class V>
inline V load(const void* at) {
    V v;
    std::memcpy(&v, at, sizeof v);
    return v;
}

inline Floats as_floats(Words bits) { return (Floats)bits; }

inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX2__)  // compiled with FMA too
    return Floats(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
#else
    return a * b + c;
#endif
}

inline float half_to_float(uint16_t half) {
    // Shifting the exponent into place leaves subnormals right and everything a power of two too small, but for
    // infinity and NaN, which keep an exponent of their own.
    uint32_t bits = uint32_t(half & 0x7fff) << 13;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    value *= 0x1p112f;
    if ((half & 0x7c00) == 0x7c00) {
        bits |= 0x7f800000;
        std::memcpy(&value, &bits, sizeof value);
    }
    return half & 0x8000 ? -value : value;
}

// The weights of up to 32 inputs, expanded; and what turns their dot product into a sum.
struct Group {
    alignas(64) float w[kGroup][kPanel];
    alignas(64) float scale[kPanel];
    alignas(64) float min[kPanel];
};

void expand_bytes(const std::byte* q, bool nibbles, Group& group) {
    const Words mask = Words{} + (nibbles ? 15u : 255u);
    const int steps = nibbles ? kGroup / 8 : kGroup / 4;
    for (int s = 0; s < steps; ++s) {
        for (int v = 0; v < kVectors; ++v) {
            const Words words = load<Words>(q + (s * kPanel + v * kLanes) * 4);
            for (int j = 0; j < 4; ++j) {
                const Words low = words >> (8 * j) & mask;
                float* out = &group.w[nibbles ? 8 * s + j : 4 * s + j][v * kLanes];
                const Ints offset = Ints{} + (nibbles ? 0 : 128);
                const Floats value = __builtin_convertvector(Ints(low) - offset, Floats);
                std::memcpy(out, &value, sizeof value);
                if (!nibbles) continue;
                const Floats upper = __builtin_convertvector(Ints(words >> (8 * j + 4) & mask), Floats);
                std::memcpy(&group.w[8 * s + 4 + j][v * kLanes], &upper, sizeof upper);
            }
        }
    }
}

// Expands inputs [32 g, 32 g + 32) of a panel, or as many as there are; returns how many.
int expand(const Linear& w, const std::byte* panel, int g, Group& group) {
    const int count = std::min(kGroup, w.k - g * kGroup);
    if (w.format == Format::f32) {
        std::memcpy(group.w, panel + std::size_t(g) * kGroup * kPanel * 4, std::size_t(count) * kPanel * 4);
    } else if (w.format == Format::bf16) {
        const std::byte* pairs = panel + std::size_t(g) * kGroup * kPanel * 2;
        for (int i = 0; i < count; i += 2) {
            for (int v = 0; v < kVectors; ++v) {
                const Words words = load<Words>(pairs + (i / 2 * kPanel + v * kLanes) * 4);
                const Floats even = as_floats(words << 16), odd = as_floats(words & (Words{} + 0xffff0000u));
                std::memcpy(&group.w[i][v * kLanes], &even, sizeof even);
                std::memcpy(&group.w[i + 1][v * kLanes], &odd, sizeof odd);
            }
        }
    } else {
        const bool int4 = w.format == Format::int4;
        const std::byte* header = panel + g * (int4 ? kInt4GroupBytes : kInt8GroupBytes);
        for (int n = 0; n < kPanel; ++n) {
            group.scale[n] = half_to_float(load<uint16_t>(header + 2 * n));
            if (int4) group.min[n] = half_to_float(load<uint16_t>(header + kScaleBytes + 2 * n));
        }
        expand_bytes(header + (int4 ? 2 * kScaleBytes : kScaleBytes), int4, group);
    }
    return count;
}

inline float x_value(Format format, const std::byte* row, int i) {
    if (format == Format::f32) return load<float>(row + std::size_t(i) * 4);
    if (format == Format::bf16) {
        const uint32_t bits = uint32_t(load<uint16_t>(row + std::size_t(i) * 2)) << 16;
        return load<float>(&bits);
    }
    return static_cast<float>(load<int8_t>(row + i));
}

// Adds the products of the `count` values from `first` on of R rows.
template <int R>
inline void add_products(const Block& b, const Group& group, int first, int count, int row, Floats (&sum)[R][kVectors]) {
    for (int i = 0; i < count; ++i) {
        for (int r = 0; r < R; ++r) {
            const Floats x = splat(x_value(b.w->format, b.x + (row + r) * b.x_stride, first + i));
            for (int v = 0; v < kVectors; ++v) {
                sum[r][v] = multiply_add(load<Floats>(&group.w[i][v * kLanes]), x, sum[r][v]);
            }
        }
    }
}

// Adds one group's part to R rows of sums [.., kPanel].
template <int R>
void add_group(const Block& b, const Group& group, int g, int count, int row, float (*sums)[kPanel]) {
    const Format format = b.w->format;
    const bool grouped = format == Format::int8 || format == Format::int4;
    Floats sum[R][kVectors];
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < kVectors; ++v) sum[r][v] = grouped ? Floats{} : load<Floats>(&sums[r][v * kLanes]);
    }
    add_products<R>(b, group, g * kGroup, count, row, sum);
    if (grouped && b.fine) {  // 128 * the sum of the high values is exact, and so is that of the low ones
        Floats low[R][kVectors] = {};
        add_products<R>(b, group, b.w->k + g * kGroup, count, row, low);
        for (int r = 0; r < R; ++r) {
            for (int v = 0; v < kVectors; ++v) sum[r][v] = multiply_add(sum[r][v], splat(kLowValues), low[r][v]);
        }
    }
    for (int r = 0; r < R; ++r) {
        const std::byte* scales = b.x + (row + r) * b.x_stride + (b.fine ? 2 : 1) * b.w->k;
        const Floats scale_x = grouped ? splat(load<float>(scales + 4 * g)) : Floats{};
        for (int v = 0; v < kVectors; ++v) {
            Floats total = sum[r][v];
            if (grouped) {
                const Floats scale = load<Floats>(&group.scale[v * kLanes]) * scale_x;
                total = multiply_add(total, scale, load<Floats>(&sums[r][v * kLanes]));
            }
            if (format == Format::int4) {
                const Floats sum_x = splat(load<float>(scales + 4 * (b.w->k / kGroup + g)));
                total = multiply_add(load<Floats>(&group.min[v * kLanes]), sum_x, total);
            }
            std::memcpy(&sums[r][v * kLanes], &total, sizeof total);
        }
    }
}

void finish(const Block& b, int row, int panel, const float* sums) {
    float* y = b.y + row * b.y_stride + panel * kPanel;
    const int count = std::min(kPanel, b.w->n - panel * kPanel);
    for (int n = 0; n < count; ++n) {
        const float v = b.bias ? sums[n] + b.bias[panel * kPanel + n] : sums[n];
        y[n] = b.accumulate ? y[n] + v : v;
    }
}

// Rows are taken in chunks so that a group is expanded once for many of them while their sums stay in the L1 cache.
void multiply_expanded(const Block& b) {
    constexpr int kChunk = 48;
    Group group;
    alignas(64) float sums[kChunk][kPanel];
    const int groups = (b.w->k + kGroup - 1) / kGroup;
    for (int panel = b.panel0; panel < b.panel1; ++panel) {
        const std::byte* bytes = b.w->data.as<std::byte>() + panel * b.w->panel_bytes();
        for (int row0 = b.row0; row0 < b.row1; row0 += kChunk) {
            const int rows = std::min(kChunk, b.row1 - row0);
            std::memset(sums, 0, sizeof sums[0] * rows);
            for (int g = 0; g < groups; ++g) {
                const int count = expand(*b.w, bytes, g, group);
                int r = 0;
                for (; r + kMostRows <= rows; r += kMostRows) {
                    add_group<kMostRows>(b, group, g, count, row0 + r, sums + r);
                }
                for (; r < rows; ++r) add_group<1>(b, group, g, count, row0 + r, sums + r);
            }
            for (int r = 0; r < rows; ++r) finish(b, row0 + r, panel, sums[r]);
        }
    }
}

void multiply(const Block& b) {
#if defined(__AVX2__)
    const auto finish_row = [&](int row, int panel, const float* sums) { finish(b, row, panel, sums); };
    if (b.w->format == Format::int8) {
        return b.fine ? multiply_grouped<Format::int8, true>(b, finish_row)
                      : multiply_grouped<Format::int8, false>(b, finish_row);
    }
    if (b.w->format == Format::int4) {
        return b.fine ? multiply_grouped<Format::int4, true>(b, finish_row)
                      : multiply_grouped<Format::int4, false>(b, finish_row);
    }
#endif
    multiply_expanded(b);
}

uint16_t to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);  // NaN stays one
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void prepare_bf16(const float* x, int k, std::byte* row) {
    for (int i = 0; i < k + (k & 1); ++i) {
        const uint16_t bits = i < k ? to_bf16(x[i]) : uint16_t(0);
        std::memcpy(row + 2 * i, &bits, sizeof bits);
    }
}

// Quantises 32 values; `low` is null unless the row is fine.
void prepare_group(const float* x, int8_t* q, int8_t* low, float& scale, int32_t& sum) {
    const float most_q = low ? kMostFineQ : kMostQ;
    // Magnitudes compared as integers, so that a NaN, larger than everything, is not lost on the way.
    uint32_t most_bits = 0;
    for (int i = 0; i < kGroup; ++i) most_bits = std::max(most_bits, load<uint32_t>(x + i) & 0x7fffffff);
    const float most = load<float>(&most_bits);
    const bool zero = most < kTiny;
    const float inverse = zero ? 0.0f : most_q / most;
    scale = zero ? 0.0f : most / most_q;
    sum = 0;
    for (int i = 0; i < kGroup; ++i) {
        const float v = x[i] * inverse;
        // Not true of NaN and infinity: the scale carries those.
        const int value = std::fabs(v) < most_q + 0.5f ? static_cast<int>(std::nearbyint(v)) : 0;
        const int high = low ? (value + kLowValues / 2) >> 7 : value;
        if (low) low[i] = static_cast<int8_t>(value - high * kLowValues);
        q[i] = static_cast<int8_t>(high);
        sum += value;
    }
}

void prepare(Format format, bool fine, const float* x, int k, std::byte* bytes) {
    if (format == Format::bf16) return prepare_bf16(x, k, bytes);
    const PreparedRow row(bytes, k, fine);
    for (int g = 0; g < k / kGroup; ++g) {
        int32_t sum;
        prepare_group(x + g * kGroup, row.q + g * kGroup, fine ? row.low + g * kGroup : nullptr, row.scale[g], sum);
        if (format == Format::int4) {
            row.sum[g] = row.scale[g] * static_cast<float>(sum);
        } else {
            row.bias[g] = -128 * sum;
        }
    }
}

}  // namespace

const LinearKernels linear_kernels = {prepare, multiply};

}  // namespace tenure::TENURE_KERNELS
