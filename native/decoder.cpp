#include "decoder.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <stdexcept>

#include "kernels.h"

namespace tenure {

namespace {

// Work below this many elements is done by the caller alone: waking the others would cost more.
constexpr int kInlineElements = 8192;

using Clock = std::chrono::steady_clock;

// Adds the time until its end to one of the step's sums.
class Timed {
public:
    explicit Timed(double& sum) : sum_(sum), start_(Clock::now()) {}
    ~Timed() { sum_ += std::chrono::duration<double, std::milli>(Clock::now() - start_).count(); }
    Timed(const Timed&) = delete;
    Timed& operator=(const Timed&) = delete;

private:
    double& sum_;
    Clock::time_point start_;
};

}  // namespace

const RowKernels& row_kernels(const Isa& isa) { return TENURE_CHOOSE(isa, row_table); }

Decoder::Decoder(DecoderShape shape, int threads, const Isa& isa)
    : shape_(std::move(shape)),
      isa_(isa),
      row_kernels_(row_kernels(isa)),
      codec_kernels_(codec_kernels(isa)),
      team_(shared_team(threads)) {
    check_shape(shape_);
    plan_layers();
}

// Layers with the same window are a group: they share a table of blocks, and an attention that is planned once per step.
// The groups are in the order of ModelShape.groups: the widest view first.
void Decoder::plan_layers() {
    const Codec staged = staging(shape_.codec);
    layers_.resize(shape_.layers);
    std::map<int, std::vector<int>, std::greater<>> groups;  // the layers of each window
    for (int layer = 0; layer < shape_.layers; layer++)
        groups[shape_.windows[layer] > 0 ? shape_.windows[layer] : kNoWindow].push_back(layer);
    layer_places_.resize(shape_.layers);
    for (const auto& [window, members] : groups) {
        const int group = static_cast<int>(tables_.size()), count = static_cast<int>(members.size());
        for (int index = 0; index < count; index++) layer_places_[members[index]] = {group, index};
        const KvLayout layout{count, shape_.kv_heads, shape_.head_dim};
        tables_.emplace_back(layout, staged, window);
        attentions_.emplace_back(layout, staged, shape_.heads, isa_, AttentionRule{window, shape_.attention_cap});
    }
    const int last = layer_places_.back().group;
    kept_attention_.emplace(tables_[last].layout(), staged, shape_.heads, isa_, attentions_[last].rule());
}

template <class F>
void Decoder::each_row(int rows, int row_cost, F&& f) {
    const int per_item = std::max(1, kInlineElements / std::max(1, row_cost));
    if (rows <= per_item) {
        for (int r = 0; r < rows; r++) f(r);
        return;
    }
    team_->team.run((rows + per_item - 1) / per_item, [&](int item, int) {
        const int end = std::min(rows, (item + 1) * per_item);
        for (int r = item * per_item; r < end; r++) f(r);
    });
}

void Decoder::apply(const BiasedLinear& w, const float* x, int64_t x_stride, float* y, int64_t y_stride, int rows,
                    bool accumulate) {
    const Timed timed(times_.linear_ms);
    const float* bias = w.bias.empty() ? nullptr : w.bias.data();
    linear(w.linear, {x, x_stride, y, y_stride, rows, bias, accumulate}, scratch_, team_->team, isa_);
}

// x itself when there is no such norm, else x normed, until the next call.
const float* Decoder::norm(const std::vector<float>& weight, const float* x, int rows) {
    if (weight.empty()) return x;
    const int n = shape_.hidden;
    each_row(rows, n, [&](int r) {
        row_kernels_.rms_norm(x + int64_t(r) * n, weight.data(), shape_.rms_eps, n, normed_.as<float>() + int64_t(r) * n);
    });
    return normed_.as<float>();
}

// x += residual_scale * norm(w input)
void Decoder::add_branch(const BiasedLinear& w, const std::vector<float>& post_norm, const float* input, int64_t stride,
                         float* x, int rows) {
    const int n = shape_.hidden;
    if (post_norm.empty() && shape_.residual_scale == 1.0f) return apply(w, input, stride, x, n, rows, true);
    float* branch = branch_.as<float>();
    apply(w, input, stride, branch, n, rows, false);
    each_row(rows, 2 * n, [&](int r) {
        float* y = branch + int64_t(r) * n;
        if (!post_norm.empty()) row_kernels_.rms_norm(y, post_norm.data(), shape_.rms_eps, n, y);
        row_kernels_.add_scaled(y, shape_.residual_scale, n, x + int64_t(r) * n);
    });
}

void Decoder::reserve(int64_t rows) {
    const auto floats = [rows](Buffer& buffer, int64_t width) { buffer.reserve(rows * width * sizeof(float)); };
    floats(x_, shape_.hidden);
    floats(kept_, shape_.hidden);
    floats(normed_, std::max(shape_.hidden, shape_.ffn));
    floats(branch_, shape_.hidden);
    floats(qkv_, shape_.qkv_width());
    floats(attended_, shape_.q_width());
    floats(kept_q_, shape_.q_width());
    floats(gate_up_, 2 * int64_t(shape_.ffn));
    floats(cos_, int64_t(shape_.ropes) * shape_.rotary / 2);
    floats(sin_, int64_t(shape_.ropes) * shape_.rotary / 2);
}

void Decoder::embed(const StepCall& call) {
    const int n = shape_.hidden;
    each_row(static_cast<int>(call.rows), n, [&](int r) {
        float* x = x_.as<float>() + int64_t(r) * n;
        unpack_row(embedding_, call.tokens[r], x);
        if (shape_.embedding_scale != 1.0f)
            for (int i = 0; i < n; i++) x[i] *= shape_.embedding_scale;
    });
}

// Where each row goes, and how far it is turned. The angle is the f32 product, as in the models' own training code; its
// cosine is taken in f64.
void Decoder::place_rows(const Batch& batch) {
    places_.resize(batch.rows());
    for (int s = 0; s < batch.sequences; s++)
        for (int row = batch.seq_rows[s], position = batch.first_pos[s]; row < batch.seq_rows[s + 1]; row++, position++)
            places_[row] = {s, position};
    const int angles = shape_.ropes * shape_.rotary / 2;
    each_row(batch.rows(), 32 * angles, [&](int row) {
        const float position = static_cast<float>(places_[row].position);
        float *cos = cos_.as<float>() + int64_t(row) * angles, *sin = sin_.as<float>() + int64_t(row) * angles;
        for (int d = 0; d < angles; d++) {
            const double angle = position * shape_.inv_freq[d];
            cos[d] = static_cast<float>(std::cos(angle)) * shape_.rope_scale;
            sin[d] = static_cast<float>(std::sin(angle)) * shape_.rope_scale;
        }
    });
}

void Decoder::norm_heads(const Layer& layer, float* q, float* k) const {
    if (shape_.qk_norm == QkNorm::none) return;
    const int size = shape_.qk_norm == QkNorm::head ? shape_.head_dim : 0;
    const auto each = [&](float* x, const std::vector<float>& weight, int width) {
        const int n = size ? size : width;
        for (float* end = x + width; x < end; x += n) row_kernels_.rms_norm(x, weight.data(), shape_.rms_eps, n, x);
    };
    each(q, layer.q_norm, shape_.q_width());
    each(k, layer.k_norm, shape_.kv_width());
}

void Decoder::rotate_and_store(const Batch& batch, int layer) {
    const int dim = shape_.head_dim, rope = shape_.rope_of_layer[layer];
    const int angles = shape_.ropes * shape_.rotary / 2, half = rope < 0 ? 0 : shape_.rotary / 2;
    const float q_scale = 1.44269504088896341f * shape_.attention_scale;
    const LayerPlace& at = layer_places_[layer];
    const BlockTable& table = tables_[at.group];
    const int64_t head_bytes = table.layout().head_bytes(table.staged());
    const int64_t tile_bytes = table.layout().tile_bytes(table.staged());
    const CodecKernels::Store store = codec_kernels_.store[static_cast<int>(table.staged())];
    each_row(batch.rows(), 2 * shape_.qkv_width(), [&](int row) {
        const RowPlace& place = places_[row];
        float* q = qkv_.as<float>() + int64_t(row) * shape_.qkv_width();
        float* k = q + shape_.q_width();
        const float* v = k + shape_.kv_width();
        const int64_t angle = int64_t(row) * angles + std::max(rope, 0) * half;
        const float *cos = cos_.as<float>() + angle, *sin = sin_.as<float>() + angle;
        norm_heads(layers_[layer], q, k);
        row_kernels_.rotate(q, shape_.heads, dim, half, cos, sin, q_scale);
        row_kernels_.rotate(k, shape_.kv_heads, dim, half, cos, sin, 1.0f);
        const int entry = table.entry(place.sequence, place.position / kBlockTokens);
        uint8_t* tile = table.staged_head(entry, at.index, 0) + place.position % kBlockTokens / kTileTokens * tile_bytes;
        for (int h = 0; h < shape_.kv_heads; h++)
            store(tile + h * head_bytes, place.position % kTileTokens, k + h * dim, v + h * dim, dim);
    });
    table.encode(at.index, codec_kernels_, team_->team);
}

void Decoder::attend(Attention& attention, int index, const float* q, int64_t q_stride) {
    const Timed timed(times_.attention_ms);
    attention.run(index, q, q_stride, attended_.as<float>(), shape_.q_width(), team_->team);
}

void Decoder::feed_forward(const Layer& layer, float* x, int rows) {
    const int hidden = shape_.hidden, ffn = shape_.ffn;
    float *inner = normed_.as<float>(), *gate_up = gate_up_.as<float>();
    apply(layer.gate_up, norm(layer.ffn_norm, x, rows), hidden, gate_up, 2 * int64_t(ffn), rows, false);
    const auto gate = row_kernels_.gate[static_cast<int>(shape_.activation)];
    each_row(rows, 4 * ffn, [&](int r) { gate(gate_up + 2 * int64_t(r) * ffn, ffn, inner + int64_t(r) * ffn); });
    add_branch(layer.down, layer.ffn_post_norm, inner, ffn, x, rows);
}

// After the last layer's keys and values are stored only the rows that give logits go on, each as a sequence of its own.
void Decoder::plan_kept(const StepCall& call, const Batch& batch) {
    kept_places_.clear();
    kept_rows_.assign(1, 0);
    kept_sequences_.clear();
    for (int64_t i = 0; i < call.logit_rows_size; i++) {
        const RowPlace& place = places_[call.logit_rows[i]];
        kept_places_.push_back(place.position);
        kept_rows_.push_back(static_cast<int32_t>(i + 1));
        kept_sequences_.push_back(place.sequence);
    }
    const Batch kept{static_cast<int>(call.logit_rows_size), kept_rows_.data(), kept_places_.data(), batch.arena};
    kept_attention_->plan(kept, tables_[layer_places_.back().group], team_->team.threads(), kept_sequences_.data());
}

void Decoder::keep_rows(const StepCall& call) {
    const int64_t hidden = shape_.hidden, width = shape_.q_width();
    for (int64_t i = 0; i < call.logit_rows_size; i++) {
        const int64_t row = call.logit_rows[i];
        std::memcpy(kept_.as<float>() + i * hidden, x_.as<float>() + row * hidden, hidden * sizeof(float));
        std::memcpy(kept_q_.as<float>() + i * width, qkv_.as<float>() + row * shape_.qkv_width(), width * sizeof(float));
    }
}

void Decoder::give_logits(float* logits, int rows) {
    const Timed timed(times_.lm_head_ms);
    const float* x = norm(final_norm_, kept_.as<float>(), rows);
    const float* bias = lm_head_.bias.empty() ? nullptr : lm_head_.bias.data();
    // Nothing averages out behind this layer: with x in 8 bits it alone made two fifths of what rounding x costs (KL).
    const LinearCall call{x, shape_.hidden, logits, shape_.vocab, rows, bias, false, true};
    linear(lm_head_.present() ? lm_head_.linear : embedding_, call, scratch_, team_->team, isa_);
    if (shape_.logit_scale == 1.0f && shape_.logit_cap == 0.0f) return;
    each_row(rows, shape_.vocab, [&](int r) {
        row_kernels_.scale_logits(logits + int64_t(r) * shape_.vocab, shape_.vocab, shape_.logit_scale,
                                  shape_.logit_cap);
    });
}

void Decoder::step(const StepCall& call) {
    const std::lock_guard lock(team_->turn);
    check_weights();
    check_step(call, shape_, tables_);
    times_ = {};
    const Timed timed(times_.total_ms);
    const int rows = static_cast<int>(call.rows), hidden = shape_.hidden, width = shape_.q_width();
    const int kept = static_cast<int>(call.logit_rows_size);
    const Batch batch{static_cast<int>(call.sequences), call.seq_rows, call.first_pos, call.arena};
    reserve(std::max(rows, kept));
    for (std::size_t i = 0; i < tables_.size(); i++) {
        tables_[i].plan(call.tables[i], batch);
        attentions_[i].plan(batch, tables_[i], team_->team.threads());
    }
    embed(call);
    place_rows(batch);
    plan_kept(call, batch);
    for (int i = 0; i < shape_.layers; i++) {
        const Layer& layer = layers_[i];
        apply(layer.qkv, norm(layer.attn_norm, x_.as<float>(), rows), hidden, qkv_.as<float>(), shape_.qkv_width(), rows,
              false);
        rotate_and_store(batch, i);
        float* x = x_.as<float>();
        int going_on = rows;
        if (i + 1 < shape_.layers) {
            attend(attentions_[layer_places_[i].group], layer_places_[i].index, qkv_.as<float>(), shape_.qkv_width());
        } else if (kept > 0) {
            keep_rows(call);
            attend(*kept_attention_, layer_places_[i].index, kept_q_.as<float>(), width);
            x = kept_.as<float>();
            going_on = kept;
        } else {
            return;
        }
        add_branch(layer.o, layer.attn_post_norm, attended_.as<float>(), width, x, going_on);
        feed_forward(layer, x, going_on);
    }
    give_logits(call.logits, kept);
}

}  // namespace tenure
