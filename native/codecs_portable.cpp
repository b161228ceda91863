// Writing, encoding and expanding the heads of blocks, on vector extensions.
//
// An encoded head is [K scales][V scales][K][V]:
//   K int8: f16 [32 tokens];                    [2 tiles][head_dim][16 tokens] of one byte
//   K int4: f16 [head_dim] least value, 8 bits [head_dim] scale; [2 tiles][head_dim / 2][16 tokens]: a pair of channels in a byte
//   V int8: f16 [32 tokens];                    [32 tokens][head_dim] of one byte
//   V int4: f16 [32 tokens];                    [16 token pairs][head_dim]: indices into kLevels, turned (turn.h)
// Integers of 8 bits and the levels are exact in bf16, so expanding them loses nothing: scales of tokens are left to the
// attention kernel. K int4 is rounded to bf16 once more, as it is when it is staged.
#include "codecs.h"
#include "simd16.h"
#include "turn.h"

#ifndef TENURE_KERNELS
#define TENURE_KERNELS portable
#endif

namespace tenure::TENURE_KERNELS {
namespace {

typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));

constexpr int kTiles = kBlockTokens / kTileTokens;
constexpr float kLeastScale = 1e-7f, kMostScale = 65504.0f;  // of f16; never zero

// The best 16 levels for a Gaussian of variance 1 (Lloyd and Max), rounded to bf16; the upper half of them, and what lies
// halfway between neighbours.
constexpr float kLevels[8] = {0.12890625f, 0.388671875f, 0.65625f, 0.94140625f, 1.2578125f, 1.6171875f, 2.0625f, 2.734375f};

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

// GCC 12 takes vector conversions from and to bytes apart, lane by lane.
TENURE_INLINE f32x16 floats_of_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__FMA__)
    struct {
        __m256 lo, hi;
    } const r = {
        _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))),
        _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8))))};
    return load<f32x16>(&r);
#else
    return __builtin_convertvector(load<i8x16>(p), f32x16);
#endif
}

TENURE_INLINE void store_bytes(uint8_t* p, i32x16 x) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)x));
#else
    for (int i = 0; i < 16; i++) p[i] = static_cast<uint8_t>(x[i]);
#endif
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
    for (int tile = 0; tile < kTiles; tile++, out += kTileTokens * head_dim) {
        const uint8_t* keys = staged_keys(staged, tile, head_dim);
        f32x16 top = {};
        for (int i = 0; i < head_dim / 2; i++) {
            const auto pair = load<u32x16>(keys + 64 * i);
            top = vmax(top, vmax(magnitude(low_bf16(pair)), magnitude(high_bf16(pair))));
        }
        f32x16 inverse;
        for (int t = 0; t < kTileTokens; t++)
            inverse[t] = 1.0f / stored_scale(scales + 2 * (kTileTokens * tile + t), top[t] / 127.0f);
        for (int i = 0; i < head_dim / 2; i++) {
            const auto pair = load<u32x16>(keys + 64 * i);
            const i32x16 even = rounded(low_bf16(pair) * inverse, -127.0f, 127.0f);
            const i32x16 odd = rounded(high_bf16(pair) * inverse, -127.0f, 127.0f);
            store_bytes(out + 2 * i * kTileTokens, even);
            store_bytes(out + (2 * i + 1) * kTileTokens, odd);
        }
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

constexpr int kMaxDim = 256;

void encode_v8(const uint8_t* staged, uint8_t* scales, uint8_t* out, int head_dim) {
    alignas(64) float v[kMaxDim];
    for (int token = 0; token < kBlockTokens; token++, out += head_dim) {
        unstage_value(staged, token, head_dim, v);
        f32x16 top = {};
        for (int d = 0; d < head_dim; d += 16) top = vmax(top, magnitude(load<f32x16>(v + d)));
        const f32x16 inverse = splat(1.0f / stored_scale(scales + 2 * token, max_lanes(top) / 127.0f));
        for (int d = 0; d < head_dim; d += 16)
            store_bytes(out + d, rounded(load<f32x16>(v + d) * inverse, -127.0f, 127.0f));
    }
}

// Scale and least value of one channel, from its 32 values.
struct Range {
    float scale, least;
};

// A scale in 8 bits: the exponent and three bits of the mantissa of an f32, from 2^-20 to 1.875 * 2^11.
constexpr uint32_t kScaleShift = 20, kScaleBias = (127 - 20) << 23;

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
        const i32x16 one = steps_of(low_bf16(a), even) | steps_of(high_bf16(a), odd) << 4;
        const i32x16 two = steps_of(low_bf16(b), even) | steps_of(high_bf16(b), odd) << 4;
        store_bytes(out + i * kTileTokens, one);
        store_bytes(out + (i + head_dim / 2) * kTileTokens, two);
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
    alignas(64) float v[kMaxDim];
    i32x16 even[kMaxDim / 16], odd[kMaxDim / 16];
    for (int token = 0; token < kBlockTokens; token += 2, out += head_dim) {
        unstage_value(staged, token, head_dim, v);
        encode_levels(v, scales + 2 * token, head_dim, even);
        unstage_value(staged, token + 1, head_dim, v);
        encode_levels(v, scales + 2 * token + 2, head_dim, odd);
        for (int i = 0; i < head_dim / 16; i++)
            store_bytes(out + 16 * i, even[i] | odd[i] << 4);
    }
}

// ---- expanding

// Two rows of 16 integers as pairs of bf16; they are so small that the low half of an f32 is zero.
TENURE_INLINE u32x16 pair_of_rows(const uint8_t* even, const uint8_t* odd) {
    const f32x16 a = floats_of_bytes(even), b = floats_of_bytes(odd);
    return (u32x16)a >> 16 | (u32x16)b;
}

void expand_scales(const uint8_t* scales, float* out) {
    store(out, load_halves(scales));
    store(out + 16, load_halves(scales + 32));
}

void expand_k8(const uint8_t* scales, const uint8_t* in, int head_dim, const Expanded& out) {
    expand_scales(scales, out.k_scale);
    for (int tile = 0; tile < kTiles; tile++, in += kTileTokens * head_dim) {
        uint8_t* to = out.tiles + tile * 4 * kTileTokens * head_dim;
        for (int i = 0; i < head_dim / 2; i++)
            store(to + 64 * i, pair_of_rows(in + 2 * i * kTileTokens, in + (2 * i + 1) * kTileTokens));
    }
}

void expand_v8(const uint8_t* scales, const uint8_t* in, int head_dim, const Expanded& out) {
    expand_scales(scales, out.v_scale);
    for (int tile = 0; tile < kTiles; tile++) {
        uint8_t* to = out.tiles + (2 * tile + 1) * 2 * kTileTokens * head_dim;
        for (int pair = 0; pair < kTileTokens / 2; pair++, in += 2 * head_dim, to += 4 * head_dim)
            for (int d = 0; d < head_dim; d += 16) store(to + 4 * d, pair_of_rows(in + d, in + head_dim + d));
    }
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__)

// The entries that 16 bytes name, two nibbles each: the low ones in table[0..15], the high ones in table[odd..odd + 15].
template <int odd>
TENURE_INLINE __m512i look_up(const uint8_t* bytes, __m512i table) {
    const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
    const __m512i nibbles = _mm512_set1_epi32(0x000f000f);
    const __m512i index = _mm512_and_si512(_mm512_or_si512(x, _mm512_slli_epi32(x, 12)), nibbles);
    return _mm512_permutexvar_epi16(odd ? _mm512_or_si512(index, _mm512_set1_epi32(odd << 16)) : index, table);
}

void expand_k4(const uint8_t* scales, const uint8_t* in, int head_dim, const Expanded& out) {
    alignas(64) float scale[kMaxDim], least[kMaxDim];
    for (int d = 0; d < head_dim; d += 16) {
        const auto code = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + 2 * head_dim + d));
        const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(code), kScaleShift);
        store(scale + d, _mm512_add_epi32(bits, _mm512_set1_epi32(kScaleBias)));
        store(least + d, load_halves(scales + 2 * d));
    }
    for (int i = 0; i < kBlockTokens; i++) out.k_scale[i] = 1.0f;
    const __m512 steps = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    uint8_t* second = out.tiles + 4 * kTileTokens * head_dim;
    for (int i = 0; i < head_dim / 2; i++) {
        const __m512 even = _mm512_fmadd_ps(steps, _mm512_set1_ps(scale[2 * i]), _mm512_set1_ps(least[2 * i]));
        const __m512 odd = _mm512_fmadd_ps(steps, _mm512_set1_ps(scale[2 * i + 1]), _mm512_set1_ps(least[2 * i + 1]));
        const auto table = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
        _mm512_storeu_si512(out.tiles + 64 * i, look_up<16>(in + i * kTileTokens, table));
        _mm512_storeu_si512(second + 64 * i, look_up<16>(in + (i + head_dim / 2) * kTileTokens, table));
    }
}

TENURE_INLINE __m512i level_table() {
    alignas(64) uint16_t table[32];
    for (int i = 0; i < 16; i++)
        table[i] = table[i + 16] = static_cast<uint16_t>(bf16_bits(i < 8 ? -kLevels[7 - i] : kLevels[i - 8]));
    return _mm512_load_si512(table);
}

void expand_v4(const uint8_t* scales, const uint8_t* in, int head_dim, const Expanded& out) {
    expand_scales(scales, out.v_scale);
    const __m512i table = level_table();
    for (int tile = 0; tile < kTiles; tile++) {
        uint8_t* to = out.tiles + (2 * tile + 1) * 2 * kTileTokens * head_dim;
        for (int at = 0; at < kTileTokens / 2 * head_dim; at += 16, in += 16)
            _mm512_storeu_si512(to + 4 * at, look_up<0>(in, table));
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
            const auto x = __builtin_convertvector(load<u8x16>(in + (i + tile * head_dim / 2) * kTileTokens), i32x16);
            const f32x16 even = madd(__builtin_convertvector(x & 15, f32x16), scale[0], least[0]);
            const f32x16 odd = madd(__builtin_convertvector(x >> 4, f32x16), scale[1], least[1]);
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
        for (int at = 0; at < kTileTokens / 2 * head_dim; at++) to[at] = pairs.of[*in++];
    }
}

#endif

// ---- pairs of them

// Where the parts of an encoded head begin.
template <Form k_form, Form v_form>
struct Parts {
    int64_t v_scales, k, v;
    explicit Parts(int head_dim)
        : v_scales(k_scale_bytes(k_form, head_dim)),
          k(v_scales + v_scale_bytes(v_form)),
          v(k + value_bytes(k_form, head_dim)) {}
};

template <Form k_form, Form v_form>
void encode(const uint8_t* staged, uint8_t* head, int head_dim) {
    const Parts<k_form, v_form> at(head_dim);
    (k_form == Form::int8 ? encode_k8 : encode_k4)(staged, head, head + at.k, head_dim);
    (v_form == Form::int8 ? encode_v8 : encode_v4)(staged, head + at.v_scales, head + at.v, head_dim);
}

template <Form k_form, Form v_form>
void expand(const uint8_t* head, int head_dim, const Expanded& out) {
    const Parts<k_form, v_form> at(head_dim);
    (k_form == Form::int8 ? expand_k8 : expand_k4)(head, head + at.k, head_dim, out);
    (v_form == Form::int8 ? expand_v8 : expand_v4)(head + at.v_scales, head + at.v, head_dim, out);
}

// The staged head that an encoded one stands for, as near as bf16 comes.
template <Form k_form, Form v_form>
void restore(const uint8_t* head, uint8_t* staged, int head_dim) {
    alignas(64) float k_scale[kBlockTokens], v_scale[kBlockTokens], v[kMaxDim];
    expand<k_form, v_form>(head, head_dim, {staged, k_scale, v_scale});
    for (int tile = 0; tile < kTiles; tile++) {
        uint8_t* keys = staged + 2 * tile * 2 * kTileTokens * head_dim;
        const auto scale = load<f32x16>(k_scale + kTileTokens * tile);
        for (int i = 0; i < head_dim / 2; i++, keys += 64) {
            const auto pair = load<u32x16>(keys);
            store(keys, round_lanes(low_bf16(pair) * scale) | round_lanes(high_bf16(pair) * scale) << 16);
        }
    }
    for (int token = 0; token < kBlockTokens; token++) {
        unstage_value(staged, token, head_dim, v);
        for (int d = 0; d < head_dim; d += 16) store(v + d, load<f32x16>(v + d) * splat(v_scale[token]));
        if (v_form == Form::int4) turn(v, head_dim);
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
    {nullptr, nullptr, expand<kInt8, kInt8>, expand<kInt8, kInt4>, expand<kInt4, kInt4>},
    {nullptr, nullptr, restore<kInt8, kInt8>, restore<kInt8, kInt4>, restore<kInt4, kInt4>},
};

}  // namespace tenure::TENURE_KERNELS
