// Attention of the rows of a step over the blocks of their sequences.
//
// One arithmetic for every row, whoever its neighbours are: keys are taken in steps of 64 tokens at absolute positions;
// steps are summed in ascending order within a split of 512 tokens; splits are folded in ascending order by log-sum-exp.
// Decode is prefill with one row. What is free to differ is only how rows and splits are spread over threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "block_table.h"
#include "buffer.h"
#include "codecs.h"
#include "isa.h"
#include "team.h"

namespace tenure {

constexpr int kSplitTokens = 512;
constexpr int kStepTokens = 64;
constexpr int kTilesPerStep = kStepTokens / kTileTokens;
constexpr float kLowest = -1e30f;  // stands for minus infinity where a NaN must not arise
// How far (log2) a score may exceed the running maximum before what was summed is scaled down: sums of 2^8 lose nothing
// in f32, and a rescaling that is rare is a branch that is predicted.
constexpr float kSlack = 8.0f;

// One kv head in the blocks of one sequence, as the rows of one tile find it.
struct Blocks {
    struct Head {
        const uint8_t* at;
        Codec codec;
    };

    const uint8_t* arena;
    const int64_t* offsets;  // of block `first` and those after it
    const uint8_t* codecs;
    int first;
    int own;                 // the block the rows belong to, when they see it as staged and later rows as encoded; or -1
    const uint8_t* own_head;
    Codec staged;
    int64_t tile_bytes;             // of a staged tile
    int64_t head_offsets[kCodecs];  // of the layer and head within a block
    int64_t head_bytes[kCodecs];

    Head head(int block) const {
        if (block == own) return {own_head, staged};
        const int i = block - first;
        return {arena + offsets[i] + head_offsets[codecs[i]], static_cast<Codec>(codecs[i])};
    }
};

// Rows of one sequence and one kv head against tokens [begin, end) of it. Row r is query head r % group of token
// r / group and sees tokens [0, visible + r / group), of them the last `window` at most.
struct Span {
    const float* q;         // of the first row; scaled by log2(e) / sqrt(head_dim) (and whatever the model adds)
    int64_t q_stride;       // floats between tokens; query heads of a token are adjacent
    int group;
    int rows;
    int visible;
    int window;
    float soft_cap;         // scores are squashed to ±soft_cap (log2 units); 0: they are not
    int filled;             // tokens of the sequence that are written: what lies beyond is never looked at
    int begin, end;         // begin is a multiple of kSplitTokens, end - begin <= kSplitTokens, end <= filled
    const Blocks* blocks;
    int head_dim;

    int visible_to(int row) const { return visible + row / group; }
    int first_seen(int row) const { return visible_to(row) > window ? visible_to(row) - window : 0; }
    // Where the first step starts that holds a token the first row sees: no row sees an earlier one.
    int first_step() const {
        const int step = first_seen(0) / kStepTokens * kStepTokens;
        return begin > step ? begin : step;
    }
    // The first token that no row sees.
    int seen_end() const {
        const int seen = visible_to(rows - 1);
        return end < seen ? end : seen;
    }
    const float* query(int row) const { return q + row / group * q_stride + row % group * head_dim; }
    // Tiles of the step at `step` that no row sees any of.
    int unseen_tiles(int step) const { return first_seen(0) > step ? (first_seen(0) - step) / kTileTokens : 0; }
};

// Unnormalised result: o [rows][head_dim], the running maximum m [rows] (log2 units) and sum l [rows]. A row that sees
// nothing of a span has l = 0.
struct Part {
    float* o;
    float* m;
    float* l;
};

using SpanKernel = void (*)(const Span& span, const Part& part, void* scratch);
// Folds `from` into `into`, which holds the splits before it.
using FoldKernel = void (*)(const Part& into, const Part& from, int rows, int head_dim);
// Writes o / l to out, rows laid out like queries.
using FinishKernel = void (*)(const Part& part, int rows, int group, int head_dim, float* out, int64_t out_stride);

struct AttentionKernels {
    SpanKernel span[2];  // by what is staged: bf16, f32
    FoldKernel fold;
    FinishKernel finish;
};

namespace portable { extern const AttentionKernels attention_table; }
namespace avx2 { extern const AttentionKernels attention_table; }
namespace avx512 { extern const AttentionKernels attention_table; }

const AttentionKernels& attention_kernels(const Isa& isa);

constexpr int kMaxTileRows = 128;  // rows a span kernel takes at once
// Per row its query in bf16 and as integers (or turned, in f32), its sums of turned V and of lanes, and what it sees; the V
// of one tile; and what a step expands, with ranges.
constexpr std::size_t span_scratch_bytes() {
    return kMaxTileRows * ((2 + 2 + 4) * kMaxHeadDim + 64 + sizeof(float) + sizeof(int)) + 2 * kTileTokens * kMaxHeadDim +
           2 * (4 * kBlockTokens + 8) * kMaxHeadDim + 8 * kStepTokens;
}

constexpr int kNoWindow = 1 << 30;

// What may differ from model to model, or between the layers of one.
struct AttentionRule {
    int window = kNoWindow;  // tokens a row sees, itself included
    float soft_cap = 0.0f;   // in the model's own units; 0: none
};

// Plans a step once, then serves every layer of it that has its rule.
class Attention {
public:
    // heads must be a multiple of layout.kv_heads.
    Attention(const KvLayout& layout, Codec staged, int heads, const Isa& isa, AttentionRule rule = {});

    const AttentionRule& rule() const { return rule_; }

    // `table_rows` [sequences]: which sequence of the table each is; null: the same. All must outlive the runs.
    void plan(const Batch& batch, const BlockTable& table, int threads, const int32_t* table_rows = nullptr);
    // q [rows][heads * head_dim] with q_stride floats between rows; out likewise.
    void run(int layer, const float* q, int64_t q_stride, float* out, int64_t out_stride, Team& team);

private:
    // A run of consecutive tokens of one sequence. Either one thread takes all of its splits (one part in that thread's
    // scratch) or each split is an item of its own and the last one to finish folds them all.
    struct Tile {
        int sequence, token, tokens, visible;
        int first_split, splits;  // the splits that hold what its rows see
        bool shared;
        int own;       // entry of the block its rows belong to when that is encoded in this step; else -1
        int64_t part;  // floats into the part buffer: kv_heads * splits parts
        int counter;   // first of kv_heads counters
    };
    struct Item {
        int tile, split;  // split is -1 when one thread takes them all
        int64_t cost;
    };
    struct Call {
        int layer;
        const float* q;
        int64_t q_stride;
        float* out;
        int64_t out_stride;
    };

    void add_tiles();
    void share_tiles(int threads);
    void add_items();
    int table_row(int s) const { return table_rows_ ? table_rows_[s] : s; }
    Blocks blocks_of(const Tile& tile, int head, int layer) const;
    Span span_of(const Tile& tile, int head, int split, const Blocks& blocks, const Call& call) const;
    Part part_at(float* base, int tokens) const;
    void finish(const Tile& tile, const Part& part, int head, const Call& call) const;
    void whole_tile(const Tile& tile, int head, const Call& call, int thread);
    void one_split(const Tile& tile, int split, int head, const Call& call, int thread);
    int64_t part_floats(int tokens) const;
    std::size_t thread_bytes() const;

    int64_t seen(const Tile& tile) const;

    KvLayout layout_;
    Codec staged_;
    AttentionRule rule_;
    int group_, tile_tokens_;
    const AttentionKernels& kernels_;
    Batch batch_{};
    const BlockTable* table_ = nullptr;
    const int32_t* table_rows_ = nullptr;
    std::vector<Tile> tiles_;
    std::vector<Item> items_;
    int64_t part_floats_ = 0;
    int counters_ = 0;
    Buffer part_buffer_, thread_buffer_, counter_buffer_;
};

}  // namespace tenure
