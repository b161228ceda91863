// Writing, encoding and expanding the heads of blocks, on vector extensions.
//
// An encoded head is [K scales][V scales][K][V]:
//   K int8: f16 [32 tokens];  [2 tiles][head_dim / 2][16 tokens][2] of one byte, turned (turn.h)
//   K int4: f16 [head_dim] least value, 8 bits [head_dim] scale;  [2 tiles][head_dim / 8][16 tokens][2] of 16 bits
//   V int8: f16 [32 tokens];  [16 token pairs][head_dim][2] of one byte, turned
//   V int4: f16 [32 tokens];  [2 tiles][2][head_dim][2] of 16 bits: indices into kLevels, turned
// That is the order of the staged layout, whose pairs lie in one 32-bit lane. Of the 4-bit forms four such rows (pairs of
// channels, pairs of tokens) share 16 bits, the first lowest: shifting them down unpacks them with lanes staying in place.
// Integers of 8 bits and the levels are exact in bf16, so expanding them loses nothing: scales of tokens are left to the
// attention kernel. K int4 is rounded to bf16 once more, as it is when it is staged.
#include "codecs.h"
#include "four_bits.h"
#include "simd16.h"
#include "turn.h"

#ifndef TENURE_KERNELS
#define TENURE_KERNELS portable
#endif

namespace tenure::TENURE_KERNELS {
namespace {

typedef uint16_t u16x16 __attribute__((vector_size(32)));

constexpr int kTiles = kBlockTokens / kTileTokens;
constexpr float kLeastScale = 1e-7f, kMostScale = 65504.0f;  // of f16; never zero

float value_of_half(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000u) << 16, exponent = half >> 10 & 31u, mantissa = half & 0x3ffu;
    uint32_t bits = sign | (exponent + 112u) << 23 | mantissa << 13;
    float value;
    if (exponent == 0) {
        value = static_cast<float>(mantissa) * 0x1p-24f;
        return sign ? -value : value;
    }
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Rounded to nearest even; |x| <= 65504.
uint16_t half_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000u;
    const float magnitude = x < 0 ? -x : x;
    if (magnitude < 0x1p-14f) return static_cast<uint16_t>(sign | static_cast<uint32_t>(__builtin_rintf(magnitude * 0x1p24f)));
    bits &= 0x7fffffffu;
    return static_cast<uint16_t>(sign | (bits - (112u << 23) + 0xfffu + (bits >> 13 & 1u)) >> 13);
}

// A scale as it is stored, which is what is divided by.
float stored_scale(uint8_t* at, float scale) {
    const float bounded = scale > kLeastScale ? (scale < kMostScale ? scale : kMostScale) : kLeastScale;
    const uint16_t half = half_of(bounded);
    std::memcpy(at, &half, sizeof half);
    return value_of_half(half);
}

TENURE_INLINE f32x16 load_halves(const uint8_t* p) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
    float values[16];
    for (int i = 0; i < 16; i++) {
        uint16_t half;
        std::memcpy(&half, p + 2 * i, sizeof half);
        values[i] = value_of_half(half);
    }
    return load<f32x16>(values);
#endif
}

// GCC 12 takes vector conversions from and to narrow integers apart, lane by lane.
TENURE_INLINE u32x16 load_words(const uint8_t* p) {
#if defined(__AVX512F__)
    return (u32x16)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__FMA__)
    struct {
        __m256i lo, hi;
    } const r = {_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
                 _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
    return load<u32x16>(&r);
#else
    return __builtin_convertvector(load<u16x16>(p), u32x16);
#endif
}

// Two rows of integers of 8 bits, side by side.
TENURE_INLINE void store_pairs(uint8_t* p, i32x16 even, i32x16 odd) {
    const i32x16 x = (even & 255) | odd << 8;
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)x));
#else
    for (int i = 0; i < 16; i++) {
        const auto word = static_cast<uint16_t>(x[i]);
        std::memcpy(p + 2 * i, &word, sizeof word);
    }
#endif
}

// Two rows of integers of 4 bits beside the `i` pairs of rows (0..3) that are there.
TENURE_INLINE void add_nibbles(uint8_t* p, int i, i32x16 even, i32x16 odd) {
    const auto x = (u32x16)(even | odd << 16) << (4 * i);
    store(p, i == 0 ? x : load<u32x16>(p) | x);
}

TENURE_INLINE f32x16 magnitude(f32x16 x) { return (f32x16)((u32x16)x & 0x7fffffffu); }

// Nearest integers, within [low, high].
TENURE_INLINE i32x16 rounded(f32x16 x, float low, float high) {
    const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
    const f32x16 bottom = splat(low), top = splat(high);
    x = x < bottom ? bottom : x;
    x = x > top ? top : x;
    return __builtin_convertvector((x + magic) - magic, i32x16);
}

// ---- staged

const uint8_t* staged_values(const uint8_t* staged, int tile, int head_dim) {
    return staged + (2 * tile + 1) * 2 * kTileTokens * head_dim;
}
const uint8_t* staged_keys(const uint8_t* staged, int tile, int head_dim) {
    return staged + 2 * tile * 2 * kTileTokens * head_dim;
}

void store_bf16(uint8_t* tile, int slot, const float* k, const float* v, int head_dim) {
    auto* keys = reinterpret_cast<uint32_t*>(tile) + slot;
    for (int i = 0; i < head_dim / 2; i++)
        keys[i * kTileTokens] = bf16_bits(k[2 * i]) | bf16_bits(k[2 * i + 1]) << 16;
    auto* values = reinterpret_cast<uint16_t*>(tile + 2 * kTileTokens * head_dim) +
                   slot / 2 * 2 * head_dim + slot % 2;
    for (int i = 0; i < head_dim; i++) values[2 * i] = static_cast<uint16_t>(bf16_bits(v[i]));
}

void store_f32(uint8_t* tile, int slot, const float* k, const float* v, int head_dim) {
    auto* keys = reinterpret_cast<float*>(tile) + slot;
    for (int i = 0; i < head_dim; i++) keys[i * kTileTokens] = k[i];
    std::memcpy(tile + 4 * head_dim * (kTileTokens + slot), v, 4 * head_dim);
}

// bf16 bits of finite values, in the low halves.
TENURE_INLINE u32x16 round_lanes(f32x16 x) {
    const auto bits = (u32x16)x;
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

// ---- encoding

void encode_k8(const uint8_t* staged, uint8_t* scales, uint8_t* out, int head_dim) {
    f32x16 k[kMaxHeadDim];
    for (int tile = 0; tile < kTiles; tile++, out += kTileTokens * head_dim) {
        const uint8_t* keys = staged_keys(staged, tile, head_dim);
        for (int d = 0; d < head_dim; d += 2) {
            const auto pair = load<u32x16>(keys + 32 * d);
            k[d] = low_bf16(pair);
            k[d + 1] = high_bf16(pair);
        }
        turn_lanes(k, head_dim);
        f32x16 top = {}, inverse;
        for (int d = 0; d < head_dim; d++) top = vmax(top, magnitude(k[d]));
        for (int t = 0; t < kTileTokens; t++)
            inverse[t] = 1.0f / stored_scale(scales + 2 * (kTileTokens * tile + t), top[t] / 127.0f);
        for (int d = 0; d < head_dim; d += 2)
            store_pairs(out + d * kTileTokens, rounded(k[d] * inverse, -127.0f, 127.0f),
                        rounded(k[d + 1] * inverse, -127.0f, 127.0f));
    }
}

// The V of one token.
void unstage_value(const uint8_t* staged, int token, int head_dim, float* out) {
    const uint8_t* pairs = staged_values(staged, token / kTileTokens, head_dim) + token % kTileTokens / 2 * 4 * head_dim;
    for (int d = 0; d < head_dim; d += 16) {
        const auto pair = load<u32x16>(pairs + 4 * d);
        store(out + d, token % 2 ? high_bf16(pair) : low_bf16(pair));
    }
}

// The V of a token turned, as integers; its scale is stored.
void encode_value(const uint8_t* staged, int token, uint8_t* scale, int head_dim, i32x16* out) {
    alignas(64) float v[kMaxHeadDim];
    unstage_value(staged, token, head_dim, v);
    turn(v, head_dim);
    f32x16 top = {};
    for (int d = 0; d < head_dim; d += 16) top = vmax(top, magnitude(load<f32x16>(v + d)));
    const f32x16 inverse = splat(1.0f / stored_scale(scale, max_lanes(top) / 127.0f));
    for (int d = 0; d < head_dim; d += 16) out[d / 16] = rounded(load<f32x16>(v + d) * inverse, -127.0f, 127.0f);
}

void encode_v8(const uint8_t* staged, uint8_t* scales, uint8_t* out, int head_dim) {
    i32x16 even[kMaxHeadDim / 16], odd[kMaxHeadDim / 16];
    for (int token = 0; token < kBlockTokens; token += 2, out += 2 * head_dim) {
        encode_value(staged, token, scales + 2 * token, head_dim, even);
        encode_value(staged, token + 1, scales + 2 * token + 2, head_dim, odd);
        for (int i = 0; i < head_dim / 16; i++) store_pairs(out + 32 * i, even[i], odd[i]);
    }
}

// Scale and least value of one channel, from its 32 values.
struct Range {
    float scale, least;
};

// The least such scale that is not below `scale`, if there is one.
uint8_t scale_code(float scale) {
    uint32_t bits;
    std::memcpy(&bits, &scale, sizeof bits);
    if (bits <= kScaleBias) return 0;
    const uint32_t code = (bits - kScaleBias + (1u << kScaleShift) - 1) >> kScaleShift;
    return static_cast<uint8_t>(code < 255 ? code : 255);
}

float scale_of_code(uint8_t code) {
    const uint32_t bits = (uint32_t(code) << kScaleShift) + kScaleBias;
    float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return scale;
}

Range store_range(uint8_t* scales, int channel, int head_dim, f32x16 first, f32x16 second) {
    const float high = max_lanes(vmax(first, second)), low = -max_lanes(vmax(-first, -second));
    const float bounded = low < -kMostScale ? -kMostScale : low > kMostScale ? kMostScale : low;
    const uint16_t least = half_of(bounded);
    std::memcpy(scales + 2 * channel, &least, sizeof least);
    const float start = value_of_half(least), step = (high - start) / 15.0f;
    uint8_t& code = scales[2 * head_dim + channel];
    code = scale_code(step > 0.0f ? step : 0.0f);
    return {scale_of_code(code), start};
}

i32x16 steps_of(f32x16 x, Range range) {
    return rounded((x - splat(range.least)) / splat(range.scale), 0.0f, 15.0f);
}

void encode_k4(const uint8_t* staged, uint8_t* scales, uint8_t* out, int head_dim) {
    const uint8_t *first = staged_keys(staged, 0, head_dim), *second = staged_keys(staged, 1, head_dim);
    for (int i = 0; i < head_dim / 2; i++) {
        const auto a = load<u32x16>(first + 64 * i), b = load<u32x16>(second + 64 * i);
        const Range even = store_range(scales, 2 * i, head_dim, low_bf16(a), low_bf16(b));
        const Range odd = store_range(scales, 2 * i + 1, head_dim, high_bf16(a), high_bf16(b));
        uint8_t *one = out + i / 4 * 64, *two = one + kTileTokens * head_dim / 2;
        add_nibbles(one, i % 4, steps_of(low_bf16(a), even), steps_of(high_bf16(a), odd));
        add_nibbles(two, i % 4, steps_of(low_bf16(b), even), steps_of(high_bf16(b), odd));
    }
}

// Indices of the nearest of the 16 levels, and those levels.
TENURE_INLINE i32x16 level_index(f32x16 x) {
    const f32x16 size = magnitude(x);
    i32x16 above = {};
    for (int i = 0; i < 7; i++) above -= size > splat((kLevels[i] + kLevels[i + 1]) / 2);
    return x < 0.0f ? 7 - above : 8 + above;
}

TENURE_INLINE f32x16 level_value(f32x16 x) {
    const f32x16 size = magnitude(x);
    f32x16 level = splat(kLevels[0]);
    for (int i = 0; i < 7; i++)
        level = size > splat((kLevels[i] + kLevels[i + 1]) / 2) ? splat(kLevels[i + 1]) : level;
    return x < 0.0f ? -level : level;
}

// Turns a token's V and finds its levels; the scale that fits them best (least squares) is stored.
void encode_levels(float* v, uint8_t* scale, int head_dim, i32x16* index) {
    turn(v, head_dim);
    f32x16 squares = {};
    for (int d = 0; d < head_dim; d += 16) squares = madd(load<f32x16>(v + d), load<f32x16>(v + d), squares);
    const float size = __builtin_sqrtf(sum_lanes(squares) / static_cast<float>(head_dim));
    const f32x16 inverse = splat(1.0f / (size > kLeastScale ? size : kLeastScale));
    f32x16 fit = {}, norm = {};
    for (int d = 0; d < head_dim; d += 16) {
        const f32x16 x = load<f32x16>(v + d), unit = x * inverse, level = level_value(unit);
        index[d / 16] = level_index(unit);
        fit = madd(x, level, fit);
        norm = madd(level, level, norm);
    }
    stored_scale(scale, sum_lanes(fit) / sum_lanes(norm));
}

void encode_v4(const uint8_t* staged, uint8_t* scales, uint8_t* out, int head_dim) {
    alignas(64) float v[kMaxHeadDim];
    i32x16 even[kMaxHeadDim / 16], odd[kMaxHeadDim / 16];
    for (int token = 0; token < kBlockTokens; token += 2) {
        unstage_value(staged, token, head_dim, v);
        encode_levels(v, scales + 2 * token, head_dim, even);
        unstage_value(staged, token + 1, head_dim, v);
        encode_levels(v, scales + 2 * token + 2, head_dim, odd);
        for (int i = 0; i < head_dim / 16; i++)
            add_nibbles(out + token / 8 * 4 * head_dim + 64 * i, token % 8 / 2, even[i], odd[i]);
    }
}

// ---- expanding

// 16 pairs of integers as pairs of bf16; they are so small that the low half of an f32 is zero.
TENURE_INLINE u32x16 bf16_pairs(const uint8_t* p) {
    const u32x16 x = load_words(p);
    const auto even = __builtin_convertvector((i32x16)(x << 24) >> 24, f32x16);
    const auto odd = __builtin_convertvector((i32x16)(x << 16) >> 24, f32x16);
    return (u32x16)even >> 16 | (u32x16)odd;
}

void expand_scales(const uint8_t* scales, float* out) {
    store(out, load_halves(scales));
    store(out + 16, load_halves(scales + 32));
}

void expand_k8(const uint8_t* scales, const uint8_t* in, int head_dim, const Expanded& out) {
    expand_scales(scales, out.k_scale);
    for (int tile = 0; tile < kTiles; tile++, in += kTileTokens * head_dim) {
        uint8_t* to = out.tiles + tile * 4 * kTileTokens * head_dim;
        for (int i = 0; i < head_dim / 2; i++) store(to + 64 * i, bf16_pairs(in + 32 * i));
    }
}

void expand_v8(const uint8_t* scales, const uint8_t* in, int head_dim, const Expanded& out) {
    expand_scales(scales, out.v_scale);
    for (int tile = 0; tile < kTiles; tile++) {
        uint8_t* to = out.tiles + (2 * tile + 1) * 2 * kTileTokens * head_dim;
        for (int at = 0; at < kTileTokens * head_dim; at += 32, in += 32) store(to + 2 * at, bf16_pairs(in));
    }
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__)

void expand_k4(const uint8_t* scales, const uint8_t* in, int head_dim, const Expanded& out) {
    Ranges ranges;
    read_ranges(scales, head_dim, ranges);
    for (int i = 0; i < kBlockTokens; i++) out.k_scale[i] = 1.0f;
    uint8_t *first = out.tiles, *second = out.tiles + 4 * kTileTokens * head_dim;
    for (int d = 0; d < head_dim; d += 8, in += 64) {
        __m512i one = _mm512_loadu_si512(in), two = _mm512_loadu_si512(in + kTileTokens * head_dim / 2);
        for (int i = d; i < d + 8; i += 2, first += 64, second += 64) {
            const __m512i table = channel_table(ranges, i);
            _mm512_storeu_si512(first, look_up_channels(one, table));
            _mm512_storeu_si512(second, look_up_channels(two, table));
            one = _mm512_srli_epi16(one, 4);
            two = _mm512_srli_epi16(two, 4);
        }
    }
}

void expand_v4(const uint8_t* scales, const uint8_t* in, int head_dim, const Expanded& out) {
    expand_scales(scales, out.v_scale);
    const __m512i table = level_table();
    for (int tile = 0; tile < kTiles; tile++) {
        uint8_t* to = out.tiles + (2 * tile + 1) * 2 * kTileTokens * head_dim;
        // Of each 16 bits a look-up sees the lowest 5, and the table is there twice.
        for (int half = 0; half < 2; half++, to += 16 * head_dim)
            for (int d = 0; d < head_dim; d += 16, in += 64) {
                const __m512i x = _mm512_loadu_si512(in);
                uint8_t* at = to + 4 * d;
                _mm512_storeu_si512(at, _mm512_permutexvar_epi16(x, table));
                _mm512_storeu_si512(at + 4 * head_dim, _mm512_permutexvar_epi16(_mm512_srli_epi16(x, 4), table));
                _mm512_storeu_si512(at + 8 * head_dim, _mm512_permutexvar_epi16(_mm512_srli_epi16(x, 8), table));
                _mm512_storeu_si512(at + 12 * head_dim, _mm512_permutexvar_epi16(_mm512_srli_epi16(x, 12), table));
            }
    }
}

#else

void expand_k4(const uint8_t* scales, const uint8_t* in, int head_dim, const Expanded& out) {
    for (int i = 0; i < kBlockTokens; i++) out.k_scale[i] = 1.0f;
    const auto least_of = [scales](int channel) {
        uint16_t bits;
        std::memcpy(&bits, scales + 2 * channel, sizeof bits);
        return splat(value_of_half(bits));
    };
    const auto scale_of = [&](int channel) { return splat(scale_of_code(scales[2 * head_dim + channel])); };
    for (int i = 0; i < head_dim / 2; i++) {
        const f32x16 scale[2] = {scale_of(2 * i), scale_of(2 * i + 1)};
        const f32x16 least[2] = {least_of(2 * i), least_of(2 * i + 1)};
        for (int tile = 0; tile < kTiles; tile++) {
            const auto x = load<i32x16>(in + tile * kTileTokens * head_dim / 2 + i / 4 * 64) >> (4 * (i % 4));
            const f32x16 even = madd(__builtin_convertvector(x & 15, f32x16), scale[0], least[0]);
            const f32x16 odd = madd(__builtin_convertvector(x >> 16 & 15, f32x16), scale[1], least[1]);
            store(out.tiles + tile * 4 * kTileTokens * head_dim + 64 * i, round_lanes(even) | round_lanes(odd) << 16);
        }
    }
}

// Two levels for each byte.
struct LevelPairs {
    uint32_t of[256];
    LevelPairs() {
        const auto bits = [](int i) { return bf16_bits(i < 8 ? -kLevels[7 - i] : kLevels[i - 8]); };
        for (int i = 0; i < 256; i++) of[i] = bits(i & 15) | bits(i >> 4) << 16;
    }
};

void expand_v4(const uint8_t* scales, const uint8_t* in, int head_dim, const Expanded& out) {
    static const LevelPairs pairs;
    expand_scales(scales, out.v_scale);
    for (int tile = 0; tile < kTiles; tile++) {
        auto* to = reinterpret_cast<uint32_t*>(out.tiles + (2 * tile + 1) * 2 * kTileTokens * head_dim);
        for (int half = 0; half < 2; half++)
            for (int d = 0; d < head_dim; d++, in += 4) {
                uint32_t x;
                std::memcpy(&x, in, sizeof x);
                for (int i = 0; i < 4; i++, x >>= 4)
                    to[(4 * half + i) * head_dim + d] = pairs.of[(x & 15) | (x >> 12 & 0xf0)];
            }
    }
}

#endif

// ---- pairs of them

// Where the parts of an encoded head begin.
template <Form k_form, Form v_form>
HeadParts parts(int head_dim) {
    return head_parts({nullptr, k_form, v_form}, head_dim);
}

template <Form k_form, Form v_form>
void encode(const uint8_t* staged, uint8_t* head, int head_dim) {
    const HeadParts at = parts<k_form, v_form>(head_dim);
    (k_form == Form::int8 ? encode_k8 : encode_k4)(staged, head, head + at.k, head_dim);
    (v_form == Form::int8 ? encode_v8 : encode_v4)(staged, head + at.v_scales, head + at.v, head_dim);
}

template <Form k_form, Form v_form>
void expand(const uint8_t* head, int head_dim, const Expanded& out) {
    const HeadParts at = parts<k_form, v_form>(head_dim);
    (k_form == Form::int8 ? expand_k8 : expand_k4)(head, head + at.k, head_dim, out);
    (v_form == Form::int8 ? expand_v8 : expand_v4)(head + at.v_scales, head + at.v, head_dim, out);
}

// What the attention kernel does not take as it is: with AVX-512 it multiplies integers of 8 bits itself,
// and looks up what 4 bits stand for, unless it needs that more than once.
template <Form k_form, Form v_form>
void prepare(const uint8_t* head, int head_dim, const Expanded& out) {
#if defined(__AVX512BF16__)
    const HeadParts at = parts<k_form, v_form>(head_dim);
    if (k_form == Form::int8)
        expand_scales(head, out.k_scale);
    else if (out.four_bits)
        expand_k4(head, head + at.k, head_dim, out);
    if (v_form == Form::int8)
        expand_scales(head + at.v_scales, out.v_scale);
    else if (out.four_bits)
        expand_v4(head + at.v_scales, head + at.v, head_dim, out);
    else
        expand_scales(head + at.v_scales, out.v_scale);
#else
    expand<k_form, v_form>(head, head_dim, out);
#endif
}

// The staged head that an encoded one stands for, as near as bf16 comes.
template <Form k_form, Form v_form>
void restore(const uint8_t* head, uint8_t* staged, int head_dim) {
    alignas(64) float k_scale[kBlockTokens], v_scale[kBlockTokens], v[kMaxHeadDim];
    expand<k_form, v_form>(head, head_dim, {staged, k_scale, v_scale});
    for (int tile = 0; tile < kTiles; tile++) {
        uint8_t* keys = staged + 2 * tile * 2 * kTileTokens * head_dim;
        const auto scale = load<f32x16>(k_scale + kTileTokens * tile);
        f32x16 k[kMaxHeadDim];
        for (int d = 0; d < head_dim; d += 2) {
            const auto pair = load<u32x16>(keys + 32 * d);
            k[d] = low_bf16(pair) * scale;
            k[d + 1] = high_bf16(pair) * scale;
        }
        if (k_form == Form::int8) turn_lanes(k, head_dim);
        for (int d = 0; d < head_dim; d += 2) store(keys + 32 * d, round_lanes(k[d]) | round_lanes(k[d + 1]) << 16);
    }
    for (int token = 0; token < kBlockTokens; token++) {
        unstage_value(staged, token, head_dim, v);
        for (int d = 0; d < head_dim; d += 16) store(v + d, load<f32x16>(v + d) * splat(v_scale[token]));
        turn(v, head_dim);
        uint8_t* pairs = staged + (2 * (token / kTileTokens) + 1) * 2 * kTileTokens * head_dim;
        auto* to = reinterpret_cast<uint16_t*>(pairs + token % kTileTokens / 2 * 4 * head_dim) + token % 2;
        for (int d = 0; d < head_dim; d++) to[2 * d] = static_cast<uint16_t>(bf16_bits(v[d]));
    }
}

constexpr Form kInt8 = Form::int8, kInt4 = Form::int4;

}  // namespace

extern const CodecKernels codec_table;
const CodecKernels codec_table = {
    {store_bf16, store_f32, nullptr, nullptr, nullptr},
    {nullptr, nullptr, encode<kInt8, kInt8>, encode<kInt8, kInt4>, encode<kInt4, kInt4>},
    {nullptr, nullptr, prepare<kInt8, kInt8>, prepare<kInt8, kInt4>, prepare<kInt4, kInt4>},
    {nullptr, nullptr, restore<kInt8, kInt8>, restore<kInt8, kInt4>, restore<kInt4, kInt4>},
};

}  // namespace tenure::TENURE_KERNELS
