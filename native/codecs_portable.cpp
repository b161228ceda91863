#include "codecs.h"
#include "simd16.h"

#ifndef TENURE_KERNELS
#define TENURE_KERNELS portable
#endif

namespace tenure::TENURE_KERNELS {
namespace {

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

}  // namespace

extern const CodecKernels codec_table;
const CodecKernels codec_table = {{store_bf16, store_f32}};

}  // namespace tenure::TENURE_KERNELS
