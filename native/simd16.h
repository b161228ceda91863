// Sixteen f32 lanes as a vector extension, and as many as a register holds: one source compiles to AVX-512, to AVX2 or to
// whatever the baseline has. Include it only from kernel sources; everything here is internal to a translation unit, because
// an inline function shared between units compiled for different instruction sets could end up anywhere.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__FMA__)
#include <immintrin.h>
#endif

#define TENURE_INLINE static inline __attribute__((always_inline))

namespace tenure {
namespace {

// As many lanes as a register holds: compilers keep sums of this type in registers, and wider ones in memory.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float f32xn __attribute__((vector_size(4 * kLanes)));
typedef int32_t i32xn __attribute__((vector_size(4 * kLanes)));
typedef uint32_t u32xn __attribute__((vector_size(4 * kLanes)));

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

template <class V = f32x16>
TENURE_INLINE V splat(float x) {
    return x - V{};  // x - 0 keeps every x, -0 too
}

template <class V>
TENURE_INLINE V vmax(V a, V b) {
#if defined(__AVX512F__)
    return (V)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

// a * b + c: fused where the instruction set has it, the same way for every lane and every call.
template <class V>
TENURE_INLINE V madd(V a, V b, V c) {
#if defined(__AVX512F__)
    return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    if constexpr (sizeof(V) == sizeof(f32xn)) {
        return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
    } else {
        struct Halves {
            f32xn lo, hi;
        };
        const Halves x = load<Halves>(&a), y = load<Halves>(&b), z = load<Halves>(&c);
        const Halves r = {madd(x.lo, y.lo, z.lo), madd(x.hi, y.hi, z.hi)};
        return load<V>(&r);
    }
#else
    return a * b + c;
#endif
}

// 2^x for x <= 127, relative error 1e-7. Far below -126 it is 0 with AVX-512 and stays at 2^-126 without, which callers
// mask or cannot tell from zero.
template <class V>
TENURE_INLINE V exp2_lanes(V x) {
#if defined(__AVX512F__)
    const V n = (V)_mm512_roundscale_ps((__m512)x, 0);
#else
    x = vmax(x, splat<V>(-126.0f));
    const V magic = splat<V>(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
    const V n = (x + magic) - magic;
#endif
    const V r = x - n;
    V p = splat<V>(1.326472690e-3f);
    p = madd(p, r, splat<V>(9.671512661e-3f));
    p = madd(p, r, splat<V>(5.550733744e-2f));
    p = madd(p, r, splat<V>(2.402224208e-1f));
    p = madd(p, r, splat<V>(6.931469776e-1f));
    p = madd(p, r, splat<V>(1.0f));
#if defined(__AVX512F__)
    return (V)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    using Integers = decltype(x < x);
    const Integers exponent = __builtin_convertvector(n, Integers) << 23;
    return (V)((Integers)p + exponent);
#endif
}

// most * tanh(x / most): the identity near zero, ±most far from it. Absolute error below 2^-22 of `most`.
template <class V>
TENURE_INLINE V squash(V x, float most) {
    const V end = splat<V>(60.0f);
    V power = splat<V>(2.885390082f / most) * x;
    power = power < end ? power : end;
    return splat<V>(most) - splat<V>(2.0f * most) / (splat<V>(1.0f) + exp2_lanes(power));
}

// Lane sums and maxima in one fixed order: halves folded onto each other.
TENURE_INLINE float sum_lanes(f32x16 v) {
    float t[16];
    std::memcpy(t, &v, sizeof t);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; i++) t[i] += t[i + width];
    return t[0];
}

template <class V>
TENURE_INLINE float max_lanes(V v) {
    constexpr int lanes = sizeof v / sizeof(float);
    float t[lanes];
    std::memcpy(t, &v, sizeof t);
    for (int width = lanes / 2; width > 0; width /= 2)
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
#if !defined(__AVX512F__)
TENURE_INLINE f32xn low_bf16(u32xn pairs) { return (f32xn)(pairs << 16); }
TENURE_INLINE f32xn high_bf16(u32xn pairs) { return (f32xn)(pairs & 0xffff0000u); }
#endif

}  // namespace
}  // namespace tenure
