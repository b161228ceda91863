#include "codecs.h"

#include <stdexcept>

#include "kernels.h"

namespace tenure {

Codec codec_named(const std::string& name) {
    if (name == "bf16") return Codec::bf16;
    if (name == "f32") return Codec::f32;
    throw std::invalid_argument("kv_codec: unknown codec '" + name + "'; known: bf16, f32");
}

const CodecKernels& codec_kernels(const Isa& isa) { return TENURE_CHOOSE(isa, codec_table); }

}  // namespace tenure
