// Names, shapes and bytes of a decoder's weights.
#include <charconv>
#include <stdexcept>

#include "decoder.h"

namespace tenure {

namespace {

// "layers.12.qkv" → 12 and "qkv"; -1 when the name has another form.
int layer_of(const std::string& name, std::string& rest) {
    constexpr std::size_t prefix = 7;
    if (name.compare(0, prefix, "layers.") != 0) return -1;
    const std::size_t dot = name.find('.', prefix);
    if (dot == std::string::npos) return -1;
    int layer = -1;
    const auto [end, error] = std::from_chars(name.data() + prefix, name.data() + dot, layer);
    if (error != std::errc() || end != name.data() + dot) return -1;
    rest = name.substr(dot + 1);
    return layer;
}

[[noreturn]] void unknown(const std::string& name) {
    throw std::invalid_argument("name: the decoder has no weight called '" + name + "'");
}

std::string shape_text(int n, int k) { return "[" + std::to_string(n) + ", " + std::to_string(k) + "]"; }

void expect_shape(const std::string& name, int n, int k, int want_n, int want_k) {
    if (n != want_n || k != want_k)
        throw std::invalid_argument("w: " + name + " must be " + shape_text(want_n, want_k) + ", not " +
                                    shape_text(n, k));
}

}  // namespace

Decoder::BiasedLinear& Decoder::linear_named(const std::string& name, int& n, int& k) {
    if (name == "lm_head") {
        n = shape_.vocab, k = shape_.hidden;
        return lm_head_;
    }
    std::string part;
    const int index = layer_of(name, part);
    if (index < 0 || index >= shape_.layers) unknown(name);
    Layer& layer = layers_[index];
    k = shape_.hidden;
    if (part == "qkv") return n = shape_.qkv_width(), layer.qkv;
    if (part == "gate_up") return n = 2 * shape_.ffn, layer.gate_up;
    n = shape_.hidden;
    if (part == "o") return k = shape_.q_width(), layer.o;
    if (part == "down") return k = shape_.ffn, layer.down;
    unknown(name);
}

std::vector<float>& Decoder::norm_named(const std::string& name, int& size) {
    size = shape_.hidden;
    if (name == "norm") return final_norm_;
    std::string part;
    const int index = layer_of(name, part);
    if (index < 0 || index >= shape_.layers) unknown(name);
    Layer& layer = layers_[index];
    if (shape_.pre_norm && part == "attn_norm") return layer.attn_norm;
    if (shape_.pre_norm && part == "ffn_norm") return layer.ffn_norm;
    if (shape_.post_norm && part == "attn_post_norm") return layer.attn_post_norm;
    if (shape_.post_norm && part == "ffn_post_norm") return layer.ffn_post_norm;
    if (shape_.qk_norm == QkNorm::none) unknown(name);
    const bool whole = shape_.qk_norm == QkNorm::whole;
    if (part == "q_norm") return size = whole ? shape_.q_width() : shape_.head_dim, layer.q_norm;
    if (part == "k_norm") return size = whole ? shape_.kv_width() : shape_.head_dim, layer.k_norm;
    unknown(name);
}

void Decoder::set_linear(const std::string& name, Linear w, const float* bias) {
    int want_n = 0, want_k = 0;
    BiasedLinear& slot = linear_named(name, want_n, want_k);
    expect_shape(name, w.n, w.k, want_n, want_k);
    slot.bias = bias ? std::vector<float>(bias, bias + w.n) : std::vector<float>();
    slot.linear = std::move(w);
}

void Decoder::set_norm(const std::string& name, const float* weight, int n) {
    int want = 0;
    std::vector<float>& slot = norm_named(name, want);
    if (n != want)
        throw std::invalid_argument("weight: " + name + " must hold " + std::to_string(want) + " values, not " +
                                    std::to_string(n));
    slot.assign(weight, weight + n);
}

void Decoder::set_embedding(Linear w) {
    expect_shape("embedding", w.n, w.k, shape_.vocab, shape_.hidden);
    embedding_ = std::move(w);
}

void Decoder::check_weights() const {
    const auto missing = [](const std::string& name) {
        throw std::invalid_argument("weights: " + name + " was never set");
    };
    if (embedding_.n == 0) missing("embedding");
    if (final_norm_.empty()) missing("norm");
    for (std::size_t i = 0; i < layers_.size(); i++) {
        const Layer& layer = layers_[i];
        const std::string prefix = "layers." + std::to_string(i);
        const auto need = [&](bool needed, const std::vector<float>& norm, const char* part) {
            if (needed && norm.empty()) missing(prefix + part);
        };
        need(shape_.pre_norm, layer.attn_norm, ".attn_norm");
        need(shape_.pre_norm, layer.ffn_norm, ".ffn_norm");
        need(shape_.post_norm, layer.attn_post_norm, ".attn_post_norm");
        need(shape_.post_norm, layer.ffn_post_norm, ".ffn_post_norm");
        need(shape_.qk_norm != QkNorm::none, layer.q_norm, ".q_norm");
        need(shape_.qk_norm != QkNorm::none, layer.k_norm, ".k_norm");
        if (!layer.qkv.present()) missing(prefix + ".qkv");
        if (!layer.o.present()) missing(prefix + ".o");
        if (!layer.gate_up.present()) missing(prefix + ".gate_up");
        if (!layer.down.present()) missing(prefix + ".down");
    }
}

int64_t Decoder::weight_bytes() const {
    std::size_t bytes = embedding_.data.bytes() + final_norm_.size() * sizeof(float);
    const auto add = [&bytes](const BiasedLinear& w) { bytes += w.linear.data.bytes() + w.bias.size() * sizeof(float); };
    add(lm_head_);
    for (const Layer& layer : layers_) {
        for (const BiasedLinear* w : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down}) add(*w);
        for (const std::vector<float>* norm : {&layer.attn_norm, &layer.ffn_norm, &layer.attn_post_norm,
                                               &layer.ffn_post_norm, &layer.q_norm, &layer.k_norm})
            bytes += norm->size() * sizeof(float);
    }
    return static_cast<int64_t>(bytes);
}

}  // namespace tenure
