// int8 and int4 with AVX2 integer instructions; part of linear_portable.cpp where it is compiled for AVX2.
//
// vpmaddubsw multiplies unsigned by signed bytes and adds pairs into 16 bits. Weights enter as nibbles (0..15), so a
// group of 32 sums to at most 8 * 2 * 15 * 127 = 30480 per lane: no saturation, exact, equal to the other paths bit for
// bit. An int8 weight (q + 128) is two nibbles, 16 * high + low.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "linear_kernels.h"

namespace tenure::avx2 {
namespace {

inline __m256i broadcast32(const std::byte* at) {
    int32_t bits;
    std::memcpy(&bits, at, sizeof bits);
    return _mm256_set1_epi32(bits);
}

inline float load_float(const std::byte* at) {
    float value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

// The exact dot products of one group for R rows and 16 outputs; q points at their bytes in step 0.
template <Format F, int R>
inline __attribute__((always_inline)) void dot_group(const std::byte* q, const std::byte* x, int64_t stride,
                                                     __m256i (&dot)[R][2]) {
    constexpr bool int4 = F == Format::int4;
    const __m256i nibble = _mm256_set1_epi8(15), one = _mm256_set1_epi16(1), sixteen = _mm256_set1_epi16(16);
    __m256i low[R][2], high[R][2];  // int4 needs one sum only: low
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) low[r][0] = low[r][1] = high[r][0] = high[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int s = 0; s < (int4 ? 4 : 8); ++s) {
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
            const __m256i w = _mm256_load_si256(reinterpret_cast<const __m256i*>(q + 128 * s + 32 * v));
            const __m256i w_low = _mm256_and_si256(w, nibble);
            const __m256i w_high = _mm256_and_si256(_mm256_srli_epi16(w, 4), nibble);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const std::byte* at = x + r * stride + (int4 ? 8 : 4) * s;
                const __m256i x_low = broadcast32(at), x_high = int4 ? broadcast32(at + 4) : x_low;
                __m256i& other = int4 ? low[r][v] : high[r][v];
                low[r][v] = _mm256_add_epi16(low[r][v], _mm256_maddubs_epi16(w_low, x_low));
                other = _mm256_add_epi16(other, _mm256_maddubs_epi16(w_high, x_high));
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
            dot[r][v] = _mm256_madd_epi16(low[r][v], one);
            if constexpr (!int4) dot[r][v] = _mm256_add_epi32(dot[r][v], _mm256_madd_epi16(high[r][v], sixteen));
        }
    }
}

// Fine rows: dot = 128 * dot + that of the low values.
template <Format F, int R>
inline __attribute__((always_inline)) void add_low(const std::byte* q, const std::byte* low, int64_t stride,
                                                   __m256i (&dot)[R][2]) {
    __m256i of_low[R][2];
    dot_group<F, R>(q, low, stride, of_low);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < 2; ++v) dot[r][v] = _mm256_add_epi32(_mm256_slli_epi32(dot[r][v], 7), of_low[r][v]);
    }
}

// R rows by 16 outputs of a panel (half 0 or 1): the same fma per group, in the same order, as every other path.
template <Format F, bool Fine, int R>
__attribute__((noinline)) void grouped_tile(const Block& b, int row, int panel, int half, float (*out)[kPanel]) {
    constexpr bool int4 = F == Format::int4;
    constexpr std::size_t kBytes = int4 ? kInt4GroupBytes : kInt8GroupBytes;
    constexpr std::size_t kHeader = int4 ? 2 * kScaleBytes : kScaleBytes;
    const int groups = b.w->k / kGroup;
    const std::byte* w = b.w->data.as<std::byte>() + panel * b.w->panel_bytes();
    const std::byte* x = b.x + row * b.x_stride;
    const std::byte* scale = x + (Fine ? 2 : 1) * b.w->k;
    const std::byte* extra = scale + groups * 4;
    __m256 sum[R][2];
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
    for (int g = 0; g < groups; ++g, w += kBytes, x += kGroup, scale += 4, extra += 4) {
        __m256i dot[R][2];
        for (std::size_t line = 0; line < kBytes; line += 64) {
            _mm_prefetch(reinterpret_cast<const char*>(w + line + 4096), _MM_HINT_T1);
        }
        dot_group<F, R>(w + kHeader + 64 * half, x, b.x_stride, dot);
        if constexpr (Fine) add_low<F, R>(w + kHeader + 64 * half, x + b.w->k, b.x_stride, dot);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
            const auto* halves = reinterpret_cast<const __m128i*>(w + 32 * half + 16 * v);
            const __m256 scale_w = _mm256_cvtph_ps(_mm_load_si128(halves));
            const __m256 min_w = int4 ? _mm256_cvtph_ps(_mm_load_si128(halves + kScaleBytes / 16)) : scale_w;
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const __m256i bias = int4 ? _mm256_setzero_si256() : broadcast32(extra + r * b.x_stride);
                const __m256 f = _mm256_cvtepi32_ps(_mm256_add_epi32(dot[r][v], bias));
                const __m256 scale_x = _mm256_set1_ps(load_float(scale + r * b.x_stride));
                sum[r][v] = _mm256_fmadd_ps(f, _mm256_mul_ps(scale_w, scale_x), sum[r][v]);
                if constexpr (int4) {
                    sum[r][v] = _mm256_fmadd_ps(min_w, _mm256_set1_ps(load_float(extra + r * b.x_stride)), sum[r][v]);
                }
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        _mm256_store_ps(out[r] + 16 * half, sum[r][0]);
        _mm256_store_ps(out[r] + 16 * half + 8, sum[r][1]);
    }
}

// Calls finish(row, panel, sums) for every row of every panel of the block.
template <Format F, bool Fine, class Finish>
void multiply_grouped(const Block& b, Finish finish) {
    constexpr int kRows = F == Format::int4 ? 4 : 2;
    alignas(64) float sums[kRows][kPanel];
    for (int panel = b.panel0; panel < b.panel1; ++panel) {
        for (int row = b.row0; row < b.row1;) {
            const int rows = b.row1 - row >= kRows ? kRows : 1;
            for (int half = 0; half < 2; ++half) {
                if (rows == kRows) {
                    grouped_tile<F, Fine, kRows>(b, row, panel, half, sums);
                } else {
                    grouped_tile<F, Fine, 1>(b, row, panel, half, sums);
                }
            }
            for (int r = 0; r < rows; ++r) finish(row + r, panel, sums[r]);
            row += rows;
        }
    }
}

}  // namespace
}  // namespace tenure::avx2
