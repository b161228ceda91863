// How keys and values lie in a block, and how they get there.
//
// A block holds 32 tokens of all layers: [layer][kv head]. A head that is written token by token is "staged": two tiles of
// 16 tokens, a tile being K then V:
//   bf16: K [head_dim / 2][16 tokens][2],  V [8 token pairs][head_dim][2]   (the operand order of dot products of pairs)
//   f32:  K [head_dim][16 tokens],         V [16 tokens][head_dim]
// A full block may be encoded into fewer bits; codecs_portable.cpp says how such a head lies. The layout is private to
// native/; the rest of the world knows only block_bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "isa.h"

namespace tenure {

constexpr int kBlockTokens = 32;
constexpr int kTileTokens = 16;
constexpr int kMaxHeadDim = 256;

// What K or V is made of.
//   int8: turned (turn.h), one f16 scale per token, symmetric
//   int4: K: scale and least value per channel over the block's tokens; V: one f16 scale per token
enum class Form : uint8_t { bf16, f32, int8, int4 };

// Numbers are known outside: spec.CODECS has the same (a test compares).
enum class Codec : uint8_t { bf16 = 0, f32 = 1, int8 = 2, k8v4 = 3, int4 = 4 };
constexpr int kCodecs = 5;

struct CodecForms {
    const char* name;
    Form k, v;
};
constexpr CodecForms kCodecForms[kCodecs] = {
    {"bf16", Form::bf16, Form::bf16}, {"f32", Form::f32, Form::f32},   {"int8", Form::int8, Form::int8},
    {"k8v4", Form::int8, Form::int4}, {"int4", Form::int4, Form::int4},
};

constexpr const CodecForms& forms(Codec codec) { return kCodecForms[static_cast<int>(codec)]; }
// Written token by token; its values are not quantised.
constexpr bool is_staged(Codec codec) { return codec == Codec::bf16 || codec == Codec::f32; }
// What the open block of a sequence is written in.
constexpr Codec staging(Codec codec) { return codec == Codec::f32 ? Codec::f32 : Codec::bf16; }

// By name; throws std::invalid_argument when unknown.
Codec codec_named(const std::string& name);

// Bytes of the scales, and of the values, of K and V of one head in a block.
constexpr int64_t value_bytes(Form form, int64_t head_dim) {
    return kBlockTokens * head_dim * (form == Form::f32 ? 8 : form == Form::bf16 ? 4 : form == Form::int8 ? 2 : 1) / 2;
}
constexpr int64_t k_scale_bytes(Form form, int64_t head_dim) {
    return form == Form::int8 ? 2 * kBlockTokens : form == Form::int4 ? 3 * head_dim : 0;
}
constexpr int64_t v_scale_bytes(Form form) {
    return form == Form::int8 || form == Form::int4 ? 2 * kBlockTokens : 0;
}

// The blocks of some layers of a model.
struct KvLayout {
    int layers = 0;
    int kv_heads = 0;
    int head_dim = 0;

    int64_t head_bytes(Codec codec) const {
        const CodecForms& form = forms(codec);
        return k_scale_bytes(form.k, head_dim) + v_scale_bytes(form.v) + value_bytes(form.k, head_dim) +
               value_bytes(form.v, head_dim);
    }
    int64_t tile_bytes(Codec staged) const { return head_bytes(staged) / (kBlockTokens / kTileTokens); }
    int64_t head_offset(Codec codec, int layer, int head) const {
        return (int64_t(layer) * kv_heads + head) * head_bytes(codec);
    }
    int64_t block_bytes(Codec codec) const { return head_offset(codec, layers, 0); }
};

// Where the parts of an encoded head begin; its K scales are first.
struct HeadParts {
    int64_t v_scales, k, v;
};
constexpr HeadParts head_parts(const CodecForms& forms, int64_t head_dim) {
    const int64_t v_scales = k_scale_bytes(forms.k, head_dim), k = v_scales + v_scale_bytes(forms.v);
    return {v_scales, k, k + value_bytes(forms.k, head_dim)};
}

// A head of an encoded block as the attention kernels take it: values in the staged layout of bf16, and what each token's
// score and probability are still to be multiplied by.
struct Expanded {
    uint8_t* tiles;  // 2 tiles
    float* k_scale;  // [32]
    float* v_scale;  // [32]
    bool four_bits = true;  // whether K and V of 4 bits are asked for, by kernels that can do without; K has no k_scale then
};

struct CodecKernels {
    // Writes the K and V (f32 [head_dim] each) of token `slot` (0..15) of a staged tile.
    using Store = void (*)(uint8_t* tile, int slot, const float* k, const float* v, int head_dim);
    // Encodes a head of a full block from its staged bf16 form.
    using Encode = void (*)(const uint8_t* staged, uint8_t* head, int head_dim);
    using Expand = void (*)(const uint8_t* head, int head_dim, const Expanded& out);

    Store store[kCodecs];    // null unless staged
    Encode encode[kCodecs];  // null if staged
    Expand prepare[kCodecs];  // null if staged; K and V that the attention kernel takes as they are get only their scales
    Encode restore[kCodecs];  // the other way: a staged bf16 head from an encoded one
};

namespace portable { extern const CodecKernels codec_table; }
namespace avx2 { extern const CodecKernels codec_table; }
namespace avx512 { extern const CodecKernels codec_table; }

const CodecKernels& codec_kernels(const Isa& isa);

// Writes a whole block again in another codec: bf16, or one that bf16 is encoded into. Source and destination are apart.
// Throws std::invalid_argument when a codec is f32.
void recode(const CodecKernels& kernels, const KvLayout& layout, const uint8_t* from, Codec from_codec, uint8_t* to,
            Codec to_codec);

}  // namespace tenure
