// How keys and values lie in a block, and how they get there.
//
// A block holds 32 tokens of all layers: [layer][kv head][2 tiles of 16 tokens], a tile being K then V:
//   bf16: K [head_dim / 2][16 tokens][2],  V [8 token pairs][head_dim][2]   (the operand order of dot products of pairs)
//   f32:  K [head_dim][16 tokens],         V [16 tokens][head_dim]
// The layout is private to native/; the rest of the world knows only block_bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "isa.h"

namespace tenure {

enum class Codec : uint8_t { bf16 = 0, f32 = 1 };
constexpr int kCodecs = 2;

constexpr int kBlockTokens = 32;
constexpr int kTileTokens = 16;

// By name; throws std::invalid_argument when unknown.
Codec codec_named(const std::string& name);

struct KvLayout {
    Codec codec = Codec::bf16;
    int layers = 0;
    int kv_heads = 0;
    int head_dim = 0;

    int64_t value_bytes() const { return codec == Codec::bf16 ? 2 : 4; }
    int64_t tile_bytes() const { return 2 * kTileTokens * head_dim * value_bytes(); }
    int64_t head_bytes() const { return kBlockTokens / kTileTokens * tile_bytes(); }
    int64_t head_offset(int layer, int head) const { return (int64_t(layer) * kv_heads + head) * head_bytes(); }
    int64_t block_bytes() const { return head_offset(layers, 0); }
};

// Writes the K and V (f32 [head_dim] each) of token `slot` (0..15) of a tile.
using StoreKernel = void (*)(uint8_t* tile, int slot, const float* k, const float* v, int head_dim);

struct CodecKernels {
    StoreKernel store[kCodecs];
};

namespace portable { extern const CodecKernels codec_table; }
namespace avx2 { extern const CodecKernels codec_table; }
namespace avx512 { extern const CodecKernels codec_table; }

const CodecKernels& codec_kernels(const Isa& isa);

}  // namespace tenure
