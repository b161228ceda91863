// What codes of 4 bits stand for. Include it only from kernel sources, like simd16.h.
#pragma once

#include "codecs.h"
#include "simd16.h"

namespace tenure {
namespace {

// ---- K: per channel of a block a least value and a scale

// A scale in 8 bits: the exponent and three bits of the mantissa of an f32, from 2^-20 to 1.875 * 2^11.
constexpr uint32_t kScaleShift = 20, kScaleBias = (127 - 20) << 23;

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
struct Ranges {
    alignas(64) float scale[kMaxHeadDim], least[kMaxHeadDim];
};

TENURE_INLINE void read_ranges(const uint8_t* scales, int head_dim, Ranges& out) {
    for (int d = 0; d < head_dim; d += 16) {
        const auto code = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + 2 * head_dim + d));
        const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(code), kScaleShift);
        store(out.scale + d, _mm512_add_epi32(bits, _mm512_set1_epi32(kScaleBias)));
        const auto halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales + 2 * d));
        store(out.least + d, _mm512_cvtph_ps(halves));
    }
}

// The 16 values of channel i (even), then those of channel i + 1, in bf16.
TENURE_INLINE __m512i channel_table(const Ranges& ranges, int i) {
    const __m512 steps = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 even = _mm512_fmadd_ps(steps, _mm512_set1_ps(ranges.scale[i]), _mm512_set1_ps(ranges.least[i]));
    const __m512 odd = _mm512_fmadd_ps(steps, _mm512_set1_ps(ranges.scale[i + 1]), _mm512_set1_ps(ranges.least[i + 1]));
    return (__m512i)_mm512_cvtne2ps_pbh(odd, even);
}

// By the lowest 4 bits of each 16: even ones in the lower half of the table, odd ones in the upper.
TENURE_INLINE __m512i look_up_channels(__m512i x, __m512i table) {
    const __m512i code = _mm512_set1_epi32(0x000f000f), upper = _mm512_set1_epi32(16 << 16);
    return _mm512_permutexvar_epi16(_mm512_ternarylogic_epi32(x, code, upper, 0xea), table);  // x & code | upper
}
#endif

// ---- V: levels

// Values are turned (turn.h) and then one of the best 16 levels for a Gaussian of variance 1 (Lloyd and Max), rounded to bf16; the
// upper half of them. Thresholds lie halfway between neighbours.
constexpr float kLevels[8] = {0.12890625f, 0.388671875f, 0.65625f, 0.94140625f, 1.2578125f, 1.6171875f, 2.0625f, 2.734375f};

#if defined(__AVX512BW__)
// All 16 as bf16, twice: a look-up sees the lowest 5 bits of an index, of which 4 count.
TENURE_INLINE __m512i level_table() {
    alignas(64) uint16_t table[32];
    for (int i = 0; i < 16; i++)
        table[i] = table[i + 16] = static_cast<uint16_t>(bf16_bits(i < 8 ? -kLevels[7 - i] : kLevels[i - 8]));
    return _mm512_load_si512(table);
}
#endif

}  // namespace
}  // namespace tenure
