// Dot products with encoded blocks as they lie in memory: integers of 8 bits are multiplied as such, by queries and
// probabilities of 15 bits, and 4 bits are looked up on the way. Included by attention_avx512.cpp only.
#pragma once

#include <immintrin.h>

#include "attention_step.h"
#include "four_bits.h"
#include "simd16.h"

namespace tenure::avx512 {
namespace {

// The blocks of the step after. They are prefetched all along this step, so many lines in each turn of the dot products,
// the first block's by scores and the second's by weigh. Asked for at once they would fill the core's miss buffers: it
// would wait for memory without computing, and then compute with nothing on its way.
struct Next {
    const uint8_t* at[kBlocksPerStep];
    int lines[kBlocksPerStep];
    int early[kBlocksPerStep];  // of them, those that are fetched before the first turn
    int each;                   // lines of each of head_dim / 2 turns: 0 (there is no such step), 1, 2 or 4

    void fetch_early(int block) const {
        for (int i = 0; i < early[block]; i++)
            _mm_prefetch(reinterpret_cast<const char*>(at[block] + 64 * i), _MM_HINT_T1);
    }
};

struct Step : StepTiles {
    Next next;
    const uint8_t* v[kTilesPerStep];  // the V of each tile, without what was never written
    // K and V of blocks that are not expanded, by their bits; else null. Of a block that no row sees they are the other's.
    const uint8_t *k8[kBlocksPerStep], *k4[kBlocksPerStep], *v8[kBlocksPerStep], *v4[kBlocksPerStep];
    const Ranges* ranges;  // [blocks] of k4
};

TENURE_INLINE __m512i pair_at(const void* p) {
    int v;
    std::memcpy(&v, p, sizeof v);
    return _mm512_set1_epi32(v);
}

TENURE_INLINE __m512 dot_pairs(__m512 sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

// The lines of turn i. One step ahead is far enough for the prefetch to L2 to arrive, and near enough for it to still be
// there.
template <int each>
TENURE_INLINE void fetch([[maybe_unused]] const uint8_t* from, [[maybe_unused]] int i) {
    for (int j = 0; j < each; j++)
        _mm_prefetch(reinterpret_cast<const char*>(from + 64 * (each * i + j)), _MM_HINT_T1);
}

// Queries and probabilities beside integers of 8 bits: as integers up to kMostInteger, the largest of a row being that.
constexpr float kMostInteger = 32767.0f, kLeastLargest = 1e-30f;  // never zero

TENURE_INLINE void store_integers(int16_t* to, __m512 x, __m512 inverse) {
    const __m512i integers = _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtsepi32_epi16(integers));
}

TENURE_INLINE __m512i words_at(const uint8_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// ---- K

// Scores against the blocks whose K is integers of 8 bits. Sums are exact: |q| < 2^15, |k| < 2^7, head_dim <= 2^8.
template <int R, int each>
TENURE_INLINE void integer_scores(const Step& step, const int16_t* q, const float* q_scale, int head_dim,
                                  __m512 (*out)[kTilesPerStep]) {
    __m512i sum[R][kTilesPerStep];
    for (int r = 0; r < R; r++)
        for (int i = 0; i < kTilesPerStep; i++) sum[r][i] = _mm512_setzero_si512();
    const uint8_t *first = step.k8[step.k8[0] ? 0 : 1], *second = step.k8[step.k8[1] ? 1 : 0];
    const uint8_t *first_end = first + kTileTokens * head_dim, *second_end = second + kTileTokens * head_dim;
    const uint8_t* next = step.next.at[0] + 64 * step.next.early[0];
    for (int d = 0; d < head_dim / 2; d++) {
        const __m512i a = words_at(first + 32 * d), b = words_at(first_end + 32 * d);
        const __m512i c = words_at(second + 32 * d), e = words_at(second_end + 32 * d);
        fetch<each>(next, d);
        for (int r = 0; r < R; r++) {
            const __m512i x = pair_at(q + r * head_dim + 2 * d);
            sum[r][0] = _mm512_dpwssd_epi32(sum[r][0], a, x);
            sum[r][1] = _mm512_dpwssd_epi32(sum[r][1], b, x);
            sum[r][2] = _mm512_dpwssd_epi32(sum[r][2], c, x);
            sum[r][3] = _mm512_dpwssd_epi32(sum[r][3], e, x);
        }
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < kTilesPerStep; i++)
            if (step.k8[i / 2]) out[r][i] = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[r][i]), _mm512_set1_ps(q_scale[r]));
}

// Scores against the blocks whose K is 4 bits: bit for bit as if they had been expanded.
template <int R, int each>
TENURE_INLINE void channel_scores(const Step& step, const uint16_t* q, int head_dim, __m512 (*out)[kTilesPerStep]) {
    __m512 sum[R][kTilesPerStep];
    for (int r = 0; r < R; r++)
        for (int i = 0; i < kTilesPerStep; i++) sum[r][i] = _mm512_setzero_ps();
    const int one = step.k4[0] ? 0 : 1, two = step.k4[1] ? 1 : 0;
    const uint8_t *first = step.k4[one], *second = step.k4[two];
    const int tile_bytes = kTileTokens * head_dim / 2;
    const uint8_t* next = step.next.at[0] + 64 * step.next.early[0];
    for (int d = 0; d < head_dim; d += 8, first += 64, second += 64) {
        __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(first + tile_bytes);
        __m512i c = _mm512_loadu_si512(second), e = _mm512_loadu_si512(second + tile_bytes);
        for (int i = d; i < d + 8; i += 2) {
            const __m512i low = channel_table(step.ranges[one], i), high = channel_table(step.ranges[two], i);
            const __m512i k[] = {look_up_channels(a, low), look_up_channels(b, low), look_up_channels(c, high),
                                 look_up_channels(e, high)};
            fetch<each>(next, i / 2);
            a = _mm512_srli_epi16(a, 4), b = _mm512_srli_epi16(b, 4);
            c = _mm512_srli_epi16(c, 4), e = _mm512_srli_epi16(e, 4);
            for (int r = 0; r < R; r++) {
                const __m512i x = pair_at(q + r * head_dim + i);
                for (int t = 0; t < kTilesPerStep; t++) sum[r][t] = dot_pairs(sum[r][t], k[t], x);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < kTilesPerStep; i++)
            if (step.k4[i / 2]) out[r][i] = sum[r][i];
}

// ---- V

// Probabilities of 32 tokens as integers of 15 bits; what they are to be multiplied by.
TENURE_INLINE float integer_weights(const float* p, int16_t* out) {
    const __m512 a = _mm512_load_ps(p), b = _mm512_load_ps(p + 16);
    const float most = _mm512_reduce_max_ps(_mm512_max_ps(a, b)), largest = most > kLeastLargest ? most : kLeastLargest;
    const __m512 inverse = _mm512_set1_ps(kMostInteger / largest);
    store_integers(out, a, inverse);
    store_integers(out + 16, b, inverse);
    return largest / kMostInteger;
}

// o[R][16 * W columns] += p V of a block whose V is integers of 8 bits. Sums are exact.
template <int R, int W, int each>
TENURE_INLINE void integer_weigh(const uint8_t* v, const int16_t (*p)[kBlockTokens], const float* scale, int head_dim,
                                 int column, const uint8_t* next, float* o) {
    __m512i sum[R][W];
    for (int r = 0; r < R; r++)
        for (int j = 0; j < W; j++) sum[r][j] = _mm512_setzero_si512();
    v += 2 * column;
    for (int t = 0; t < kBlockTokens / 2; t++, v += 2 * head_dim) {
        __m512i x[W];
        for (int j = 0; j < W; j++) x[j] = words_at(v + 32 * j);
        fetch<each>(next, t);
        for (int r = 0; r < R; r++) {
            const __m512i weight = pair_at(&p[r][2 * t]);
            for (int j = 0; j < W; j++) sum[r][j] = _mm512_dpwssd_epi32(sum[r][j], x[j], weight);
        }
    }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < W; j++) {
            float* at = o + r * head_dim + column + 16 * j;
            const __m512 value = _mm512_cvtepi32_ps(sum[r][j]);
            _mm512_storeu_ps(at, _mm512_fmadd_ps(value, _mm512_set1_ps(scale[r]), _mm512_loadu_ps(at)));
        }
}

template <int R, int each>
void integer_weigh_columns(const Step& step, int block, const float (*wide)[kStepTokens], int head_dim, float* o) {
    alignas(64) int16_t p[R][kBlockTokens];
    float scale[R];
    for (int r = 0; r < R; r++) scale[r] = integer_weights(wide[r] + kBlockTokens * block, p[r]);
    const uint8_t* next = step.next.at[1] + 64 * (step.next.early[1] + each * kBlockTokens / 2 * block);
    int column = 0;
    for (; column + 64 <= head_dim; column += 64, next += each * 64 * kBlockTokens)
        integer_weigh<R, 4, each>(step.v8[block], p, scale, head_dim, column, next, o);
    for (; column < head_dim; column += 16) integer_weigh<R, 1, 0>(step.v8[block], p, scale, head_dim, column, next, o);
}

// o[R][16 * W columns] += p V of the tiles [first, end) of a block whose V is levels: bit for bit as if it had been expanded.
template <int R, int W, int each>
TENURE_INLINE void level_weigh(const uint8_t* block, int first, int end, const uint16_t (*p)[kStepTokens], int head_dim,
                               int column, const uint8_t* next, float* o) {
    constexpr int kPairs = 4;  // of tokens, in each 16 bits
    const __m512i table = level_table();
    __m512 sum[R][W];
    for (int r = 0; r < R; r++)
        for (int j = 0; j < W; j++) sum[r][j] = _mm512_loadu_ps(o + r * head_dim + column + 16 * j);
    const int half_tile = kTileTokens / 2 / kPairs;
    for (int i = half_tile * first; i < half_tile * end; i++) {
        const uint8_t* v = block + 4 * (i % (2 * half_tile) * head_dim + column);
        __m512i x[W];
        for (int j = 0; j < W; j++) x[j] = _mm512_loadu_si512(v + 64 * j);
        for (int t = 0; t < kPairs; t++) {
            __m512i level[W];
            for (int j = 0; j < W; j++) {
                level[j] = _mm512_permutexvar_epi16(x[j], table);
                x[j] = _mm512_srli_epi16(x[j], 4);
            }
            fetch<each>(next, i % (2 * half_tile) * kPairs + t);
            for (int r = 0; r < R; r++) {
                const __m512i weight = pair_at(&p[r][2 * (kPairs * i + t)]);
                for (int j = 0; j < W; j++) sum[r][j] = dot_pairs(sum[r][j], level[j], weight);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < W; j++) _mm512_storeu_ps(o + r * head_dim + column + 16 * j, sum[r][j]);
}

template <int R, int each>
void level_weigh_columns(const Step& step, int block, int first, int end, const uint16_t (*p)[kStepTokens], int head_dim,
                         float* o) {
    const uint8_t* next = step.next.at[1] + 64 * (step.next.early[1] + each * kBlockTokens / 2 * block);
    int column = 0;
    for (; column + 64 <= head_dim; column += 64, next += each * 64 * kBlockTokens)
        level_weigh<R, 4, each>(step.v4[block], first, end, p, head_dim, column, next, o);
    for (; column < head_dim; column += 16)
        level_weigh<R, 1, 0>(step.v4[block], first, end, p, head_dim, column, next, o);
}

}  // namespace
}  // namespace tenure::avx512
