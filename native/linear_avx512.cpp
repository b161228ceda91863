// Linear layers with AVX-512 (VNNI for the 8-bit dot products, BF16 for bf16).

// GCC 12 takes the deliberately undefined operands inside its own intrinsics for a mistake of ours (PR 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "linear_kernels.h"

#define TENURE_INLINE inline __attribute__((always_inline))

namespace tenure::avx512 {
namespace {

constexpr int kMostRows = 12;        // accumulators: 12 rows x 2 vectors of 16 outputs
constexpr int kMostGroupedRows = 6;  // as many again hold the integer sums of the group

TENURE_INLINE __m512i broadcast32(const void* at) {
    int32_t bits;
    std::memcpy(&bits, at, sizeof bits);
    return _mm512_set1_epi32(bits);
}

// Rows up to which a tile waits for memory rather than for arithmetic, by format.
constexpr int kMostWaiting[] = {2, 2, 4, 2};

// How many bytes ahead of use weights are fetched. Measured: a tile that waits for memory wants them near, in step with
// the processor's own prefetcher; one that waits for arithmetic wants them far, to hide memory altogether.
template <Format F, int R>
constexpr int64_t ahead() {
    return R <= kMostWaiting[static_cast<int>(F)] ? 1024 : 8192;
}

// Into L2: from there the processor's own prefetcher does the rest. Straight into L1 is 15-25 % slower from memory.
TENURE_INLINE void fetch(const std::byte* at) { _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T1); }

// Stores 16 outputs of one row: adds the bias, adds to what is there, or neither; never writes beyond n.
TENURE_INLINE void finish(const Block& b, int row, int first, __m512 v) {
    const int left = b.w->n - first;
    if (left <= 0) return;
    const __mmask16 mask = left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
    float* y = b.y + row * b.y_stride + first;
    if (b.bias) v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, b.bias + first));
    if (b.accumulate) v = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, y), v);
    _mm512_mask_storeu_ps(y, mask, v);
}

template <int R>
TENURE_INLINE void finish_tile(const Block& b, int row, int panel, __m512 (&sum)[R][2]) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        finish(b, row + r, panel * kPanel, sum[r][0]);
        finish(b, row + r, panel * kPanel + 16, sum[r][1]);
    }
}

// f32 and bf16: a step is 4 bytes of x (one f32 or two bf16) against 32 outputs.
template <Format F, int R>
TENURE_INLINE void plain_tile(const Block& b, int row, int panel) {
    const std::byte* w = b.w->data.as<std::byte>() + panel * b.w->panel_bytes();
    const std::byte* x = b.x + row * b.x_stride;
    __m512 sum[R][2];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    const int steps = F == Format::f32 ? b.w->k : (b.w->k + 1) / 2;
    for (int s = 0; s < steps; ++s, w += 128, x += 4) {
        const __m512i w0 = _mm512_load_si512(w), w1 = _mm512_load_si512(w + 64);
        fetch(w + ahead<F, R>());
        fetch(w + ahead<F, R>() + 64);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            const __m512i v = broadcast32(x + r * b.x_stride);
            if constexpr (F == Format::f32) {
                sum[r][0] = _mm512_fmadd_ps(_mm512_castsi512_ps(w0), _mm512_castsi512_ps(v), sum[r][0]);
                sum[r][1] = _mm512_fmadd_ps(_mm512_castsi512_ps(w1), _mm512_castsi512_ps(v), sum[r][1]);
            } else {
                sum[r][0] = _mm512_dpbf16_ps(sum[r][0], (__m512bh)w0, (__m512bh)v);
                sum[r][1] = _mm512_dpbf16_ps(sum[r][1], (__m512bh)w1, (__m512bh)v);
            }
        }
    }
    finish_tile<R>(b, row, panel, sum);
}

// The exact integer dot products of one group, 32 outputs by R rows. `q` points at the group's bytes.
template <Format F, int R>
TENURE_INLINE void dot_group(const std::byte* q, const std::byte* x, int64_t stride, __m512i (&dot)[R][2]) {
    const __m512i nibble = _mm512_set1_epi8(15);
#pragma GCC unroll 8
    for (int s = 0; s < 8; ++s) {
        __m512i w0, w1;
        if constexpr (F == Format::int8) {
            w0 = _mm512_load_si512(q + 128 * s);
            w1 = _mm512_load_si512(q + 128 * s + 64);
            fetch(q + ahead<F, R>() + 128 * s);
            fetch(q + ahead<F, R>() + 128 * s + 64);
        } else {
            w0 = _mm512_load_si512(q + 128 * (s / 2));
            w1 = _mm512_load_si512(q + 128 * (s / 2) + 64);
            if (s % 2 == 0) {
                fetch(q + ahead<F, R>() + 64 * s);
                fetch(q + ahead<F, R>() + 64 * s + 64);
            } else {
                w0 = _mm512_srli_epi16(w0, 4);
                w1 = _mm512_srli_epi16(w1, 4);
            }
            w0 = _mm512_and_si512(w0, nibble);
            w1 = _mm512_and_si512(w1, nibble);
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            const __m512i v = broadcast32(x + r * stride + 4 * s);
            dot[r][0] = _mm512_dpbusd_epi32(dot[r][0], w0, v);
            dot[r][1] = _mm512_dpbusd_epi32(dot[r][1], w1, v);
        }
    }
}

// Fine rows: dot = 128 * dot + that of the low values (+ the rows' bias).
template <Format F, int R>
TENURE_INLINE void dot_low(const std::byte* q, const std::byte* low, const std::byte* bias, int64_t stride,
                           __m512i (&dot)[R][2]) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        const __m512i more = bias ? broadcast32(bias + r * stride) : _mm512_setzero_si512();
        for (__m512i& sum : dot[r]) sum = _mm512_add_epi32(_mm512_slli_epi32(sum, 7), more);
    }
    dot_group<F, R>(q, low, stride, dot);
}

TENURE_INLINE __m512 halves(const std::byte* at) {
    return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(at)));
}

// int8 and int4: per group one integer dot product, then sum = fma(dot, scale_w * scale_x, sum) and, for int4,
// sum = fma(min_w, scale_x * sum_x, sum). The dot product of fine rows is one of their high and one of their low values.
template <Format F, bool Fine, int R>
TENURE_INLINE void grouped_tile(const Block& b, int row, int panel) {
    constexpr bool int4 = F == Format::int4;
    constexpr std::size_t kBytes = int4 ? kInt4GroupBytes : kInt8GroupBytes;
    constexpr std::size_t kHeader = int4 ? 2 * kScaleBytes : kScaleBytes;
    const int groups = b.w->k / kGroup;
    const std::byte* w = b.w->data.as<std::byte>() + panel * b.w->panel_bytes();
    const std::byte* x = b.x + row * b.x_stride;
    const std::byte* scale = x + (Fine ? 2 : 1) * b.w->k;  // per group, as PreparedRow lays them out
    const std::byte* extra = scale + groups * 4;
    __m512 sum[R][2];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (int g = 0; g < groups; ++g, w += kBytes, x += kGroup, scale += 4, extra += 4) {
        __m512i dot[R][2];
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            dot[r][0] = dot[r][1] = int4 || Fine ? _mm512_setzero_si512() : broadcast32(extra + r * b.x_stride);
        }
        for (std::size_t line = 0; line < kHeader; line += 64) fetch(w + ahead<F, R>() + line);
        dot_group<F, R>(w + kHeader, x, b.x_stride, dot);
        if constexpr (Fine) {
            dot_low<F, R>(w + kHeader, x + b.w->k, int4 ? nullptr : extra, b.x_stride, dot);
        }
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
            const __m512 scale_w = halves(w + 32 * j);
            const __m512 min_w = int4 ? halves(w + kScaleBytes + 32 * j) : _mm512_setzero_ps();
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) {
                const __m512 scale_x = _mm512_castsi512_ps(broadcast32(scale + r * b.x_stride));
                const __m512 f = _mm512_cvtepi32_ps(dot[r][j]);
                sum[r][j] = _mm512_fmadd_ps(f, _mm512_mul_ps(scale_w, scale_x), sum[r][j]);
                if constexpr (int4) {
                    const __m512 sum_x = _mm512_castsi512_ps(broadcast32(extra + r * b.x_stride));
                    sum[r][j] = _mm512_fmadd_ps(min_w, sum_x, sum[r][j]);
                }
            }
        }
    }
    finish_tile<R>(b, row, panel, sum);
}

template <Format F>
constexpr int most_rows() {
    return F == Format::int8 || F == Format::int4 ? kMostGroupedRows : kMostRows;
}

// One function per tile height: large enough that a call is nothing, small enough for the compiler to do well.
template <Format F, bool Fine, int R>
__attribute__((noinline)) void tile(const Block& b, int row, int panel) {
    if constexpr (F == Format::int8 || F == Format::int4) {
        grouped_tile<F, Fine, R>(b, row, panel);
    } else {
        plain_tile<F, R>(b, row, panel);
    }
}

using Tile = void (*)(const Block&, int, int);

template <Format F, bool Fine, int... R>
constexpr Tile pick(int rows, std::integer_sequence<int, R...>) {
    constexpr Tile tiles[] = {tile<F, Fine, R + 1>...};
    return tiles[rows - 1];
}

// Rows in tiles of nearly equal height, so that 13 rows are 7 + 6 and not 12 + 1; but the first tile, which brings a
// panel in for all of them, high enough to fetch far ahead when there are rows for that.
template <Format F, bool Fine = false>
void multiply_format(const Block& b) {
    constexpr int most = most_rows<F>(), enough = kMostWaiting[static_cast<int>(F)] + 1;
    for (int panel = b.panel0; panel < b.panel1; ++panel) {
        for (int row = b.row0; row < b.row1;) {
            const int left = b.row1 - row, tiles = (left + most - 1) / most;
            const int rows = std::min(left, std::max(enough, (left + tiles - 1) / tiles));
            pick<F, Fine>(rows, std::make_integer_sequence<int, most>())(b, row, panel);
            row += rows;
        }
    }
}

void multiply(const Block& b) {
    switch (b.w->format) {
        case Format::f32: return multiply_format<Format::f32>(b);
        case Format::bf16: return multiply_format<Format::bf16>(b);
        case Format::int8:
            return b.fine ? multiply_format<Format::int8, true>(b) : multiply_format<Format::int8>(b);
        case Format::int4:
            return b.fine ? multiply_format<Format::int4, true>(b) : multiply_format<Format::int4>(b);
    }
}

void prepare_bf16(const float* x, int k, std::byte* row) {
    for (int i = 0; i < k; i += 16) {
        const __mmask16 mask = k - i >= 16 ? 0xffff : static_cast<__mmask16>((1u << (k - i)) - 1);
        const __mmask16 padded = static_cast<__mmask16>(mask | mask << (k & 1));  // an odd k ends with one zero
        const __m256bh v = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, x + i));
        _mm256_mask_storeu_epi16(row + 2 * i, padded, (__m256i)v);
    }
}

// Largest magnitude as an integer, so that a NaN, larger than everything, is not lost on the way.
TENURE_INLINE float magnitude(__m512 a, __m512 b) {
    const __m512i bits = _mm512_max_epi32(_mm512_castps_si512(_mm512_abs_ps(a)), _mm512_castps_si512(_mm512_abs_ps(b)));
    const int32_t most = _mm512_reduce_max_epi32(bits);
    float value;
    std::memcpy(&value, &most, sizeof value);
    return value;
}

TENURE_INLINE void store_bytes(int8_t* to, __m512i values) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(values));
}

// Splits what is left in `q` of a fine row: low values are stored, high ones returned.
TENURE_INLINE __m512i store_low(int8_t* to, __m512i q) {
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(kLowValues / 2)), 7);
    store_bytes(to, _mm512_sub_epi32(q, _mm512_slli_epi32(high, 7)));
    return high;
}

template <bool Int4, bool Fine>
void prepare_grouped(const float* x, int k, std::byte* bytes) {
    constexpr float kMost = Fine ? kMostFineQ : kMostQ;
    const PreparedRow row(bytes, k, Fine);
    for (int g = 0; g < k / kGroup; ++g) {
        const __m512 a = _mm512_loadu_ps(x + g * kGroup), b = _mm512_loadu_ps(x + g * kGroup + 16);
        const float most = magnitude(a, b);
        const bool zero = most < kTiny;
        const __m512 inverse = _mm512_set1_ps(zero ? 0.0f : kMost / most);
        const __m512i qa = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse));
        const __m512i qb = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
        store_bytes(row.q + g * kGroup, Fine ? store_low(row.low + g * kGroup, qa) : qa);
        store_bytes(row.q + g * kGroup + 16, Fine ? store_low(row.low + g * kGroup + 16, qb) : qb);
        const float scale = zero ? 0.0f : most / kMost;
        const int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(qa, qb));
        row.scale[g] = scale;
        if constexpr (Int4) {
            row.sum[g] = scale * static_cast<float>(sum);
        } else {
            row.bias[g] = static_cast<int32_t>(-128u * static_cast<uint32_t>(sum));  // wraps on a poisoned row
        }
    }
}

void prepare(Format format, bool fine, const float* x, int k, std::byte* row) {
    if (format == Format::bf16) return prepare_bf16(x, k, row);
    if (format == Format::int4) return fine ? prepare_grouped<true, true>(x, k, row) : prepare_grouped<true, false>(x, k, row);
    fine ? prepare_grouped<false, true>(x, k, row) : prepare_grouped<false, false>(x, k, row);
}

}  // namespace

const LinearKernels linear_kernels = {prepare, multiply};

}  // namespace tenure::avx512
