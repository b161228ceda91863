// A whole decoder: weights, and one call per step that runs all layers over a ragged batch of rows.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "attention.h"
#include "block_table.h"
#include "codecs.h"
#include "decoder_rows.h"
#include "linear.h"
#include "shared_team.h"

namespace tenure {

enum class QkNorm { none, head, whole };

// Families differ by these, not by code. Vectors hold one per layer unless they say otherwise.
struct DecoderShape {
    int layers, hidden, heads, kv_heads, head_dim, ffn, vocab;
    Codec codec = Codec::bf16;
    float rms_eps = 1e-5f;
    bool pre_norm = true, post_norm = false;  // RMS norms before attention and feed-forward, and of what they add
    QkNorm qk_norm = QkNorm::none;            // of queries and keys: each head by itself, or all heads as one vector
    Activation activation = Activation::silu;
    int ropes = 1, rotary = 0;       // ways to rotate, and how much of a head is rotated
    std::vector<float> inv_freq;     // [ropes][rotary / 2]
    std::vector<int> rope_of_layer;  // -1: not rotated
    float rope_scale = 1.0f;         // multiplies cos and sin (attention factor of some rope scalings)
    std::vector<int> windows;        // tokens a row sees, itself included; 0: all
    float attention_scale = 0.0f;    // of the scores
    float attention_cap = 0.0f, logit_cap = 0.0f;  // scores and logits are squashed to ±cap; 0: they are not
    float embedding_scale = 1.0f, residual_scale = 1.0f, logit_scale = 1.0f;

    int q_width() const { return heads * head_dim; }
    int kv_width() const { return kv_heads * head_dim; }
    int qkv_width() const { return q_width() + 2 * kv_width(); }
};

// One step. Nothing here is owned; sizes are in elements.
struct StepCall {
    uint8_t* arena;
    int64_t arena_bytes;
    const int32_t* tokens;
    int64_t rows;
    const int32_t* seq_rows;
    int64_t seq_rows_size;
    const int32_t* first_pos;
    int64_t sequences;
    const TableCall* tables;  // one per group of layers
    int64_t tables_size;
    const int32_t* logit_rows;
    int64_t logit_rows_size;
    float* logits;  // [logit_rows_size, vocab]
};

// Throws std::invalid_argument naming the argument that is wrong. Touches no byte of the arena.
void check_step(const StepCall& call, const DecoderShape& shape, const std::vector<BlockTable>& tables);

struct StepTimes {
    double linear_ms = 0, attention_ms = 0, lm_head_ms = 0, total_ms = 0;
};

class Decoder {
public:
    // threads 0 = all cores this process may run on. Throws std::invalid_argument when the shape cannot be served.
    Decoder(DecoderShape shape, int threads, const Isa& isa);

    // name: layers.{i}.qkv (q heads, then k, then v) | .o | .gate_up (gate, then up) | .down | lm_head. bias [n] or none.
    void set_linear(const std::string& name, Linear w, const float* bias);
    // name: layers.{i}.attn_norm | .ffn_norm | .attn_post_norm | .ffn_post_norm | .q_norm | .k_norm | norm, those the shape
    // asks for
    void set_norm(const std::string& name, const float* weight, int n);
    // Rows are dequantised as tokens need them. Without an lm_head the same matrix gives the logits.
    void set_embedding(Linear w);

    const DecoderShape& shape() const { return shape_; }
    int64_t weight_bytes() const;
    // Of a block of all layers, those of every group, in the shape's codec.
    int64_t block_bytes() const {
        return KvLayout{shape_.layers, shape_.kv_heads, shape_.head_dim}.block_bytes(shape_.codec);
    }
    const StepTimes& last_times() const { return times_; }

    // Throws std::invalid_argument when an argument or a missing weight forbids it.
    void step(const StepCall& call);

private:
    struct BiasedLinear {
        Linear linear;
        std::vector<float> bias;
        bool present() const { return linear.n > 0; }
    };
    struct Layer {
        std::vector<float> attn_norm, ffn_norm, attn_post_norm, ffn_post_norm, q_norm, k_norm;
        BiasedLinear qkv, o, gate_up, down;
    };

    struct RowPlace {
        int sequence, position;
    };
    // A layer is layer `index` of a group of layers, which has a table of blocks and an attention.
    struct LayerPlace {
        int group, index;
    };

    BiasedLinear& linear_named(const std::string& name, int& n, int& k);
    std::vector<float>& norm_named(const std::string& name, int& size);
    static void check_shape(const DecoderShape& shape);
    void plan_layers();
    void check_weights() const;
    void reserve(int64_t rows);
    void embed(const StepCall& call);
    void place_rows(const Batch& batch);
    void norm_heads(const Layer& layer, float* q, float* k) const;
    void rotate_and_store(const Batch& batch, int layer);
    void attend(Attention& attention, int index, const float* q, int64_t q_stride);
    void feed_forward(const Layer& layer, float* x, int rows);
    void plan_kept(const StepCall& call, const Batch& batch);
    void keep_rows(const StepCall& call);
    void apply(const BiasedLinear& w, const float* x, int64_t x_stride, float* y, int64_t y_stride, int rows,
               bool accumulate);
    void add_branch(const BiasedLinear& w, const std::vector<float>& post_norm, const float* input, int64_t stride,
                    float* x, int rows);
    const float* norm(const std::vector<float>& weight, const float* x, int rows);
    void give_logits(float* logits, int rows);
    template <class F>
    void each_row(int rows, int row_cost, F&& f);

    DecoderShape shape_;
    const Isa& isa_;
    const RowKernels& row_kernels_;
    const CodecKernels& codec_kernels_;
    std::vector<BlockTable> tables_;     // one per group of layers
    std::vector<Attention> attentions_;  // of all rows, likewise
    std::vector<LayerPlace> layer_places_;
    std::optional<Attention> kept_attention_;  // of the rows that give logits, in the last layer
    std::shared_ptr<SharedTeam> team_;
    std::vector<Layer> layers_;
    std::vector<float> final_norm_;
    Linear embedding_;
    BiasedLinear lm_head_;
    Scratch scratch_;
    // Activations of the step, rows apart by their width.
    Buffer x_, kept_, normed_, branch_, qkv_, attended_, kept_q_, gate_up_, cos_, sin_;
    std::vector<RowPlace> places_;
    std::vector<int32_t> kept_places_, kept_rows_, kept_sequences_;
    StepTimes times_;
};

}  // namespace tenure
