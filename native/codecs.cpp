#include "codecs.h"

#include <cstring>
#include <stdexcept>

#include "buffer.h"
#include "kernels.h"

namespace tenure {

Codec codec_named(const std::string& name) {
    std::string known;
    for (int i = 0; i < kCodecs; i++) {
        if (name == kCodecForms[i].name) return static_cast<Codec>(i);
        known += (i ? ", " : "") + std::string(kCodecForms[i].name);
    }
    throw std::invalid_argument("kv_codec: unknown codec '" + name + "'; known: " + known);
}

const CodecKernels& codec_kernels(const Isa& isa) { return TENURE_CHOOSE(isa, codec_table); }

void recode(const CodecKernels& kernels, const KvLayout& layout, const uint8_t* from, Codec from_codec, uint8_t* to,
            Codec to_codec) {
    if (from_codec == Codec::f32 || to_codec == Codec::f32) throw std::invalid_argument("codec: f32 is not recoded");
    const int64_t staged_bytes = layout.head_bytes(Codec::bf16);
    const Buffer staged(staged_bytes);
    for (int i = 0; i < layout.layers * layout.kv_heads; i++) {
        const uint8_t* source = from + i * layout.head_bytes(from_codec);
        uint8_t* target = to + i * layout.head_bytes(to_codec);
        if (from_codec != Codec::bf16) {
            uint8_t* restored = is_staged(to_codec) ? target : staged.as<uint8_t>();
            kernels.restore[static_cast<int>(from_codec)](source, restored, layout.head_dim);
            source = restored;
        }
        if (!is_staged(to_codec))
            kernels.encode[static_cast<int>(to_codec)](source, target, layout.head_dim);
        else if (source != target)
            std::memcpy(target, source, staged_bytes);
    }
}

}  // namespace tenure
