#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <stdexcept>
#include <vector>

#include "bind_decoder.h"
#include "bind_linear.h"
#include "bind_tables.h"
#include "decoder.h"

namespace tenure {

namespace nb = nanobind;

namespace {

template <class T, int dims>
using Array = nb::ndarray<T, nb::ndim<dims>, nb::c_contig, nb::device::cpu>;
using I32 = Array<const int32_t, 1>;
using Frequencies = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using AnyMatrix = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Halves = std::optional<Array<const uint16_t, 2>>;

// The keyword arguments of a constructor: each is asked for once by name, and none may be left over.
class Arguments {
public:
    explicit Arguments(const nb::kwargs& given) : given_(given) {}

    template <class T>
    T need(const char* name) {
        if (!given_.contains(name)) throw std::invalid_argument(std::string(name) + ": missing");
        return get<T>(name, T{});
    }
    template <class T>
    T get(const char* name, T otherwise) {
        asked_.insert(name);
        if (!given_.contains(name)) return otherwise;
        T value{};
        if (!nb::try_cast(given_[name], value)) throw nb::type_error((std::string(name) + ": of the wrong type").c_str());
        return value;
    }
    // One of `names` by its index.
    int choice(const char* name, const char* otherwise, std::initializer_list<const char*> names) {
        const auto value = get<std::string>(name, otherwise);
        int index = 0;
        for (const char* known : names) {
            if (value == known) return index;
            index++;
        }
        throw std::invalid_argument(std::string(name) + ": unknown value '" + value + "'");
    }
    std::vector<int> per_layer(const char* name, int layers) {
        const auto values = get<std::optional<I32>>(name, std::nullopt);
        if (!values) return std::vector<int>(std::max(layers, 0), 0);
        return {values->data(), values->data() + values->size()};
    }
    void reject_others() const {
        for (const auto& item : given_)
            if (const auto name = nb::cast<std::string>(item.first); !asked_.count(name))
                throw std::invalid_argument(name + ": the decoder knows no such argument");
    }

private:
    const nb::kwargs& given_;
    std::set<std::string> asked_;
};

DecoderShape shape_of(Arguments& given) {
    DecoderShape shape{};
    shape.layers = given.need<int>("layers");
    shape.hidden = given.need<int>("hidden");
    shape.heads = given.need<int>("heads");
    shape.kv_heads = given.need<int>("kv_heads");
    shape.head_dim = given.need<int>("head_dim");
    shape.ffn = given.need<int>("ffn");
    shape.vocab = given.need<int>("vocab");
    shape.codec = codec_named(given.get<std::string>("kv_codec", "bf16"));
    shape.rms_eps = given.get("rms_eps", 1e-5f);
    const int norms = given.choice("norms", "before", {"before", "after", "both"});
    shape.pre_norm = norms != 1;
    shape.post_norm = norms != 0;
    shape.qk_norm = QkNorm(given.choice("qk_norm", "none", {"none", "head", "whole"}));
    shape.activation = Activation(given.choice("activation", "silu", {"silu", "gelu_tanh"}));
    const auto freq = given.need<Frequencies>("inv_freq");
    if (freq.ndim() < 1 || freq.ndim() > 2) throw std::invalid_argument("inv_freq: must have one or two dimensions");
    shape.ropes = freq.ndim() == 2 ? static_cast<int>(freq.shape(0)) : 1;
    shape.rotary = 2 * static_cast<int>(freq.shape(freq.ndim() - 1));
    shape.inv_freq.assign(freq.data(), freq.data() + freq.size());
    shape.rope_of_layer = given.per_layer("rope_of_layer", shape.layers);
    shape.rope_scale = given.get("rope_scale", 1.0f);
    shape.windows = given.per_layer("windows", shape.layers);
    shape.attention_scale = given.get("attention_scale", 1.0f / std::sqrt(static_cast<float>(shape.head_dim)));
    shape.attention_cap = given.get("attention_cap", 0.0f);
    shape.logit_cap = given.get("logit_cap", 0.0f);
    shape.embedding_scale = given.get("embedding_scale", 1.0f);
    shape.residual_scale = given.get("residual_scale", 1.0f);
    shape.logit_scale = given.get("logit_scale", 1.0f);
    return shape;
}

void init(Decoder* self, const nb::kwargs& kwargs) {
    Arguments given(kwargs);
    const int threads = given.get("threads", 0);
    if (threads < 0 || threads > 1024) throw std::invalid_argument("threads: out of range");
    const auto name = given.get<std::string>("isa", "");
    const Isa& chosen = name.empty() ? isa() : isa_named(name);
    DecoderShape shape = shape_of(given);
    given.reject_others();
    new (self) Decoder(std::move(shape), threads, chosen);
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
          const std::vector<PyTable>& tables, const I32& logit_rows, const Array<float, 2>& logits) {
    if (logits.shape(0) != logit_rows.shape(0) || logits.shape(1) != static_cast<std::size_t>(self.shape().vocab))
        throw std::invalid_argument("logits: must be [len(logit_rows), vocab]");
    const auto size = [](const auto& array) { return static_cast<int64_t>(array.shape(0)); };
    std::vector<TableCall> calls;
    for (const PyTable& table : tables) calls.push_back(table_call(table));
    const StepCall call{arena.data(),     size(arena),        tokens.data(), size(tokens),
                        seq_rows.data(),  size(seq_rows),     first_pos.data(), size(first_pos),
                        calls.data(),     static_cast<int64_t>(calls.size()),     logit_rows.data(), size(logit_rows),
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
             "Decoder(layers, hidden, heads, kv_heads, head_dim, ffn, vocab, inv_freq [rotary / 2] or [ropes, rotary / 2], "
             "rope_of_layer=i32[layers] of 0, rope_scale=1.0, windows=i32[layers] of 0, rms_eps=1e-5, norms='before' | "
             "'after' | 'both', qk_norm='none' | 'head' | 'whole', activation='silu' | 'gelu_tanh', "
             "attention_scale=head_dim**-0.5, attention_cap=0.0, logit_cap=0.0, embedding_scale=1.0, residual_scale=1.0, "
             "logit_scale=1.0, kv_codec='bf16', threads=0, isa='')")
        .def("set_linear", &set_linear, "name"_a, "format"_a, "w"_a, "scale"_a.none() = nb::none(),
             "min"_a.none() = nb::none(), "bias"_a.none() = nb::none(),
             "Copies and packs layers.{i}.qkv|o|gate_up|down or lm_head. w [n, k]: f32, bf16 as uint16, int8, or uint8 "
             "holding one 4-bit value; scale and min are f16 bits [n, k/32].")
        .def("set_norm", [](Decoder& self, const std::string& name,
                            const Array<const float, 1>& w) { self.set_norm(name, w.data(), static_cast<int>(w.size())); },
             "name"_a, "weight"_a,
             "layers.{i}.attn_norm|ffn_norm|attn_post_norm|ffn_post_norm or norm, f32 [hidden]; layers.{i}.q_norm|k_norm, "
             "f32 [head_dim] or all heads of it: those the decoder was made with.")
        .def("set_embedding", &set_embedding, "format"_a, "w"_a, "scale"_a.none() = nb::none(),
             "min"_a.none() = nb::none(), "w [vocab, hidden]; it serves as lm_head too when none is set.")
        .def_prop_ro("weight_bytes", &Decoder::weight_bytes, "Bytes of all packed weights.")
        .def_prop_ro("block_bytes", &Decoder::block_bytes, "Bytes of one block of 32 tokens of all layers.")
        .def_prop_ro("last_times", &last_times, "Milliseconds of the last step: linear, attention, lm_head, total.")
        .def("step", &step, "arena"_a.noconvert(), "tokens"_a.noconvert(), "seq_rows"_a.noconvert(),
             "first_pos"_a.noconvert(), "tables"_a.noconvert(), "logit_rows"_a.noconvert(), "logits"_a.noconvert(),
             "Writes the keys and values of every row into its block and the logits of logit_rows into logits. tables: per "
             "group of layers (starts i32[S+1], first_block i32[S], offsets i64[B], codecs u8[B], encode_to i64[B], "
             "encode_codec u8[B]): entry starts[s] + i is block first_block[s] + i of sequence s and lies at offsets (where "
             "it is staged, when rows of it are written). encode_to >= 0: the step fills the block and encodes it there, "
             "and rows of later blocks see that; offsets may then be -1 if all its rows are in the step. Layers with the "
             "same window are a group: those without one first, then the widest window first; blocks that no row of the "
             "step sees need no entry.");
}

}  // namespace tenure
