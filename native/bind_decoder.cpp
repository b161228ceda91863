#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <stdexcept>

#include "bind_decoder.h"
#include "bind_linear.h"
#include "decoder.h"

namespace tenure {

namespace nb = nanobind;

namespace {

template <class T, int dims>
using Array = nb::ndarray<T, nb::ndim<dims>, nb::c_contig, nb::device::cpu>;
using I32 = Array<const int32_t, 1>;
using AnyMatrix = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Halves = std::optional<Array<const uint16_t, 2>>;

DecoderShape shape_of(const nb::kwargs& given) {
    const auto number = [&given](const char* name) {
        if (!given.contains(name)) throw std::invalid_argument(std::string(name) + ": missing");
        return nb::cast<int>(given[name]);
    };
    const auto real = [&given](const char* name, float otherwise) {
        return given.contains(name) ? nb::cast<float>(given[name]) : otherwise;
    };
    if (!given.contains("inv_freq")) throw std::invalid_argument("inv_freq: missing");
    const auto freq = nb::cast<Array<const float, 1>>(given["inv_freq"]);
    const auto codec = given.contains("kv_codec") ? nb::cast<std::string>(given["kv_codec"]) : std::string("bf16");
    DecoderShape shape{number("layers"),   number("hidden"), number("heads"), number("kv_heads"),
                       number("head_dim"), number("ffn"),    number("vocab"), real("rms_eps", 1e-5f),
                       real("rope_scale", 1.0f), std::vector<float>(freq.data(), freq.data() + freq.size()),
                       codec_named(codec)};
    return shape;
}

void reject_unknown(const nb::kwargs& given) {
    static const char* known[] = {"layers", "hidden",  "heads",    "kv_heads", "head_dim",   "ffn",
                                  "vocab",  "rms_eps", "inv_freq", "kv_codec", "rope_scale", "threads", "isa"};
    for (const auto& item : given) {
        const auto name = nb::cast<std::string>(item.first);
        bool found = false;
        for (const char* k : known) found |= name == k;
        if (!found) throw std::invalid_argument(name + ": the decoder knows no such argument");
    }
}

void init(Decoder* self, const nb::kwargs& given) {
    reject_unknown(given);
    const int threads = given.contains("threads") ? nb::cast<int>(given["threads"]) : 0;
    if (threads < 0 || threads > 1024) throw std::invalid_argument("threads: out of range");
    const auto name = given.contains("isa") ? nb::cast<std::string>(given["isa"]) : std::string();
    const Isa& chosen = name.empty() ? isa() : isa_named(name);
    new (self) Decoder(shape_of(given), threads, chosen);
}

void set_linear(Decoder& self, const std::string& name, const std::string& format, const AnyMatrix& w,
                const Halves& scale, const Halves& min, const std::optional<Array<const float, 1>>& bias) {
    Linear packed = pack_arrays(format, w, scale, min);
    if (bias && bias->shape(0) != w.shape(0)) throw std::invalid_argument("bias: must hold one value per row of w");
    self.set_linear(name, std::move(packed), bias ? bias->data() : nullptr);
}

void set_embedding(Decoder& self, const std::string& format, const AnyMatrix& w, const Halves& scale,
                   const Halves& min) {
    self.set_embedding(pack_arrays(format, w, scale, min));
}

void step(Decoder& self, const Array<uint8_t, 1>& arena, const I32& tokens, const I32& seq_rows, const I32& first_pos,
          const I32& block_starts, const Array<const int64_t, 1>& block_offsets,
          const Array<const uint8_t, 1>& block_codecs, const I32& logit_rows, const Array<float, 2>& logits) {
    if (logits.shape(0) != logit_rows.shape(0) || logits.shape(1) != static_cast<std::size_t>(self.shape().vocab))
        throw std::invalid_argument("logits: must be [len(logit_rows), vocab]");
    const auto size = [](const auto& array) { return static_cast<int64_t>(array.shape(0)); };
    const StepCall call{arena.data(),        size(arena),         tokens.data(),        size(tokens),
                        seq_rows.data(),     size(seq_rows),      first_pos.data(),     size(first_pos),
                        block_starts.data(), size(block_starts),  block_offsets.data(), size(block_offsets),
                        block_codecs.data(), size(block_codecs),  logit_rows.data(),    size(logit_rows),
                        logits.data()};
    const nb::gil_scoped_release nogil;
    self.step(call);
}

nb::dict last_times(const Decoder& self) {
    const StepTimes& t = self.last_times();
    nb::dict out;
    out["linear_ms"] = t.linear_ms;
    out["attention_ms"] = t.attention_ms;
    out["lm_head_ms"] = t.lm_head_ms;
    out["total_ms"] = t.total_ms;
    return out;
}

}  // namespace

void bind_decoder(nb::module_& m) {
    using namespace nb::literals;
    nb::class_<Decoder>(m, "Decoder", "A whole decoder: weights, and one call per step over a ragged batch of rows.")
        .def("__init__", &init, "shape"_a,
             "Decoder(layers, hidden, heads, kv_heads, head_dim, ffn, vocab, inv_freq, rms_eps=1e-5, rope_scale=1.0, "
             "kv_codec='bf16', threads=0, isa='')")
        .def("set_linear", &set_linear, "name"_a, "format"_a, "w"_a, "scale"_a.none() = nb::none(),
             "min"_a.none() = nb::none(), "bias"_a.none() = nb::none(),
             "Copies and packs layers.{i}.qkv|o|gate_up|down or lm_head. w [n, k]: f32, bf16 as uint16, int8, or uint8 "
             "holding one 4-bit value; scale and min are f16 bits [n, k/32].")
        .def("set_norm", [](Decoder& self, const std::string& name,
                            const Array<const float, 1>& w) { self.set_norm(name, w.data(), static_cast<int>(w.size())); },
             "name"_a, "weight"_a, "layers.{i}.attn_norm|ffn_norm or norm, f32 [hidden].")
        .def("set_embedding", &set_embedding, "format"_a, "w"_a, "scale"_a.none() = nb::none(),
             "min"_a.none() = nb::none(), "w [vocab, hidden]; it serves as lm_head too when none is set.")
        .def_prop_ro("weight_bytes", &Decoder::weight_bytes, "Bytes of all packed weights.")
        .def_prop_ro("block_bytes", &Decoder::block_bytes, "Bytes of one block of 32 tokens.")
        .def_prop_ro("last_times", &last_times, "Milliseconds of the last step: linear, attention, lm_head, total.")
        .def("step", &step, "arena"_a.noconvert(), "tokens"_a.noconvert(), "seq_rows"_a.noconvert(),
             "first_pos"_a.noconvert(), "block_starts"_a.noconvert(), "block_offsets"_a.noconvert(),
             "block_codecs"_a.noconvert(), "logit_rows"_a.noconvert(), "logits"_a.noconvert(),
             "Writes the keys and values of every row into its block and the logits of logit_rows into logits.");
}

}  // namespace tenure
