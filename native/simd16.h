// Sixteen f32 lanes as a vector extension: one source compiles to AVX-512, to two AVX2 registers or to whatever the
// baseline has. Include it only from kernel sources; everything here is internal to a translation unit, because an inline
// function shared between units compiled for different instruction sets could end up anywhere.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__FMA__)
#include <immintrin.h>
#endif

#define TENURE_INLINE static inline __attribute__((always_inline))

namespace tenure {
namespace {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));

template <class V>
TENURE_INLINE V load(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

template <class V>
TENURE_INLINE void store(void* p, V v) {
    std::memcpy(p, &v, sizeof v);
}

TENURE_INLINE f32x16 splat(float x) { return x - f32x16{}; }  // x - 0 keeps every x, -0 too

TENURE_INLINE f32x16 vmax(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

// a * b + c: fused where the instruction set has it, the same way for every lane and every call.
TENURE_INLINE f32x16 madd(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    typedef float f32x8 __attribute__((vector_size(32)));
    struct Halves {
        f32x8 lo, hi;
    };
    const Halves x = load<Halves>(&a), y = load<Halves>(&b), z = load<Halves>(&c);
    const Halves r = {(f32x8)_mm256_fmadd_ps((__m256)x.lo, (__m256)y.lo, (__m256)z.lo),
                      (f32x8)_mm256_fmadd_ps((__m256)x.hi, (__m256)y.hi, (__m256)z.hi)};
    return load<f32x16>(&r);
#else
    return a * b + c;
#endif
}

// 2^x for x <= 127, relative error 1e-7. Far below -126 it is 0 with AVX-512 and stays at 2^-126 without, which callers
// mask or cannot tell from zero.
TENURE_INLINE f32x16 exp2_lanes(f32x16 x) {
#if defined(__AVX512F__)
    const f32x16 n = (f32x16)_mm512_roundscale_ps((__m512)x, 0);
#else
    x = vmax(x, splat(-126.0f));
    const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
    const f32x16 n = (x + magic) - magic;
#endif
    const f32x16 r = x - n;
    f32x16 p = splat(1.326472690e-3f);
    p = madd(p, r, splat(9.671512661e-3f));
    p = madd(p, r, splat(5.550733744e-2f));
    p = madd(p, r, splat(2.402224208e-1f));
    p = madd(p, r, splat(6.931469776e-1f));
    p = madd(p, r, splat(1.0f));
#if defined(__AVX512F__)
    return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    const i32x16 exponent = __builtin_convertvector(n, i32x16) << 23;
    return (f32x16)((i32x16)p + exponent);
#endif
}

// most * tanh(x / most): the identity near zero, ±most far from it. Absolute error below 2^-22 of `most`.
TENURE_INLINE f32x16 squash(f32x16 x, float most) {
    const f32x16 end = splat(60.0f);
    f32x16 power = splat(2.885390082f / most) * x;
    power = power < end ? power : end;
    return splat(most) - splat(2.0f * most) / (splat(1.0f) + exp2_lanes(power));
}

// Lane sums and maxima in one fixed order: halves folded onto each other.
TENURE_INLINE float sum_lanes(f32x16 v) {
    float t[16];
    std::memcpy(t, &v, sizeof t);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; i++) t[i] += t[i + width];
    return t[0];
}

TENURE_INLINE float max_lanes(f32x16 v) {
    float t[16];
    std::memcpy(t, &v, sizeof t);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; i++) t[i] = t[i] > t[i + width] ? t[i] : t[i + width];
    return t[0];
}

// bf16, rounded to nearest even; NaN stays NaN.
TENURE_INLINE uint32_t bf16_bits(float x) {
    uint32_t u;
    std::memcpy(&u, &x, sizeof u);
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return x != x ? 0x7fc0u : rounded;
}

// The two bf16 of each 32-bit lane, widened.
TENURE_INLINE f32x16 low_bf16(u32x16 pairs) { return (f32x16)(pairs << 16); }
TENURE_INLINE f32x16 high_bf16(u32x16 pairs) { return (f32x16)(pairs & 0xffff0000u); }

}  // namespace
}  // namespace tenure
