#include "attention.h"

#include <algorithm>
#include <stdexcept>

#include "kernels.h"

namespace tenure {

namespace {

// A tile that costs more than this share of a step per thread is spread over its splits.
constexpr int kItemsPerThread = 8;
constexpr int kTargetTileRows = 96;

int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace

const AttentionKernels& attention_kernels(const Isa& isa) { return TENURE_CHOOSE(isa, attention_table); }

Attention::Attention(const KvLayout& layout, Codec staged, int heads, const Isa& isa, AttentionRule rule)
    : layout_(layout), staged_(staged), rule_(rule), kernels_(attention_kernels(isa)) {
    if (layout.head_dim <= 0 || layout.head_dim % 16 || layout.head_dim > kMaxHeadDim)
        throw std::invalid_argument("head_dim: must be a multiple of 16 up to " + std::to_string(kMaxHeadDim) +
                                    ", not " + std::to_string(layout.head_dim));
    if (layout.kv_heads <= 0 || heads <= 0 || heads % layout.kv_heads)
        throw std::invalid_argument("heads: must be a multiple of kv_heads");
    group_ = heads / layout.kv_heads;
    if (group_ > kMaxTileRows)
        throw std::invalid_argument("heads: more than " + std::to_string(kMaxTileRows) + " query heads per kv head");
    if (rule.window <= 0) throw std::invalid_argument("windows: must be positive");
    if (!(rule.soft_cap >= 0.0f)) throw std::invalid_argument("attention_cap: must not be negative");
    tile_tokens_ = std::max(1, kTargetTileRows / group_);
}

// Tokens that some row of the tile sees.
int64_t Attention::seen(const Tile& tile) const {
    return std::min(tile.visible, rule_.window) + tile.tokens - 1;
}

void Attention::plan(const Batch& batch, const BlockTable& table, int threads, const int32_t* table_rows) {
    batch_ = batch;
    table_ = &table;
    table_rows_ = table_rows;
    add_tiles();
    share_tiles(threads);
    add_items();
    part_buffer_.reserve(part_floats_ * sizeof(float));
    thread_buffer_.reserve(threads * thread_bytes());
    if (std::size_t(counters_) * sizeof(std::atomic<int>) > counter_buffer_.bytes())
        counter_buffer_ = Buffer(counters_ * sizeof(std::atomic<int>));  // zeroed; finishers leave them at zero
}

void Attention::add_tiles() {
    tiles_.clear();
    for (int s = 0; s < batch_.sequences; s++) {
        const int rows = batch_.seq_rows[s + 1] - batch_.seq_rows[s], row_of_table = table_row(s);
        const bool encodes = table_->sequence_encodes(row_of_table);
        for (int token = 0, tokens; token < rows; token += tokens) {
            const int position = batch_.first_pos[s] + token, block = position / kBlockTokens;
            tokens = std::min(tile_tokens_, rows - token);
            int own = -1;
            if (encodes) {
                // Rows of one block see it staged, all others see it encoded: no tile holds rows of two.
                tokens = std::min(tokens, kBlockTokens - position % kBlockTokens);
                const int entry = table_->entry(row_of_table, block);
                if (table_->encodes(entry)) own = entry;
            }
            const int end = position + tokens, visible = position + 1;
            const int first_split = std::max(0, visible - rule_.window) / kSplitTokens;
            tiles_.push_back({s, batch_.seq_rows[s] + token, tokens, visible, first_split,
                              ceil_div(end, kSplitTokens) - first_split, false, own, 0, 0});
        }
    }
}

void Attention::share_tiles(int threads) {
    int64_t total = 0;
    for (const Tile& tile : tiles_) total += tile.tokens * seen(tile);
    const int64_t fair = total * layout_.kv_heads / (int64_t(kItemsPerThread) * threads);
    part_floats_ = 0;
    counters_ = 0;
    for (Tile& tile : tiles_) {
        tile.shared = threads > 1 && tile.splits > 1 && tile.tokens * seen(tile) > fair;
        if (!tile.shared) continue;
        tile.part = part_floats_;
        tile.counter = counters_;
        part_floats_ += int64_t(tile.splits) * layout_.kv_heads * part_floats(tile.tokens);
        counters_ += layout_.kv_heads;
    }
}

void Attention::add_items() {
    items_.clear();
    for (int t = 0; t < static_cast<int>(tiles_.size()); t++) {
        const Tile& tile = tiles_[t];
        if (!tile.shared) {
            items_.push_back({t, -1, tile.tokens * seen(tile)});
            continue;
        }
        const int end = tile.visible + tile.tokens - 1;
        for (int split = 0; split < tile.splits; split++) {
            const int begin = (tile.first_split + split) * kSplitTokens;
            items_.push_back({t, split, int64_t(tile.tokens) * std::min(kSplitTokens, end - begin)});
        }
    }
    // Dearest first: what is left for last is small, so threads finish together.
    std::stable_sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
}

Blocks Attention::blocks_of(const Tile& tile, int head, int layer) const {
    const int row = table_row(tile.sequence), entry = table_->entry(row, table_->first_block(row));
    Blocks blocks{.arena = batch_.arena,
            .offsets = table_->offsets() + entry,
            .codecs = table_->codecs() + entry,
            .first = table_->first_block(row),
            .own = tile.own < 0 ? -1 : table_->first_block(row) + tile.own - entry,
            .own_head = tile.own < 0 ? nullptr : table_->staged_head(tile.own, layer, head),
            .staged = staged_,
            .tile_bytes = layout_.tile_bytes(staged_),
            .head_offsets = {},
            .head_bytes = {}};
    for (int i = 0; i < kCodecs; i++) {
        blocks.head_offsets[i] = layout_.head_offset(static_cast<Codec>(i), layer, head);
        blocks.head_bytes[i] = layout_.head_bytes(static_cast<Codec>(i));
    }
    return blocks;
}

Span Attention::span_of(const Tile& tile, int head, int split, const Blocks& blocks, const Call& call) const {
    const int s = tile.sequence;
    const int filled = batch_.first_pos[s] + batch_.seq_rows[s + 1] - batch_.seq_rows[s];
    const int begin = (tile.first_split + split) * kSplitTokens;
    return {.q = call.q + tile.token * call.q_stride + int64_t(head) * group_ * layout_.head_dim,
            .q_stride = call.q_stride,
            .group = group_,
            .rows = tile.tokens * group_,
            .visible = tile.visible,
            .window = rule_.window,
            .soft_cap = rule_.soft_cap * 1.44269504088896341f,
            .filled = filled,
            .begin = begin,
            .end = std::min(begin + kSplitTokens, tile.visible + tile.tokens - 1),
            .blocks = &blocks,
            .head_dim = layout_.head_dim};
}

Part Attention::part_at(float* base, int tokens) const {
    const int64_t rows = int64_t(tokens) * group_;
    return {base, base + rows * layout_.head_dim, base + rows * (layout_.head_dim + 1)};
}

int64_t Attention::part_floats(int tokens) const {
    return (int64_t(tokens) * group_ * (layout_.head_dim + 2) + 15) / 16 * 16;  // keeps every part on a cache line
}

std::size_t Attention::thread_bytes() const {
    return span_scratch_bytes() + 2 * part_floats(tile_tokens_) * sizeof(float);
}

void Attention::finish(const Tile& tile, const Part& part, int head, const Call& call) const {
    float* out = call.out + tile.token * call.out_stride + int64_t(head) * group_ * layout_.head_dim;
    kernels_.finish(part, tile.tokens * group_, group_, layout_.head_dim, out, call.out_stride);
}

void Attention::whole_tile(const Tile& tile, int head, const Call& call, int thread) {
    const Blocks blocks = blocks_of(tile, head, call.layer);
    auto* scratch = thread_buffer_.as<uint8_t>() + thread * thread_bytes();
    auto* floats = reinterpret_cast<float*>(scratch + span_scratch_bytes());
    const Part sum = part_at(floats, tile.tokens), next = part_at(floats + part_floats(tile.tokens), tile.tokens);
    const SpanKernel span = kernels_.span[static_cast<int>(staged_)];
    span(span_of(tile, head, 0, blocks, call), sum, scratch);
    for (int split = 1; split < tile.splits; split++) {
        span(span_of(tile, head, split, blocks, call), next, scratch);
        kernels_.fold(sum, next, tile.tokens * group_, layout_.head_dim);
    }
    finish(tile, sum, head, call);
}

void Attention::one_split(const Tile& tile, int split, int head, const Call& call, int thread) {
    const Blocks blocks = blocks_of(tile, head, call.layer);
    auto* scratch = thread_buffer_.as<uint8_t>() + thread * thread_bytes();
    const int64_t stride = part_floats(tile.tokens);
    float* base = part_buffer_.as<float>() + tile.part + int64_t(head) * tile.splits * stride;
    kernels_.span[static_cast<int>(staged_)](span_of(tile, head, split, blocks, call),
                                                   part_at(base + split * stride, tile.tokens), scratch);
    auto& done = counter_buffer_.as<std::atomic<int>>()[tile.counter + head];
    if (done.fetch_add(1, std::memory_order_acq_rel) != tile.splits - 1) return;
    done.store(0, std::memory_order_relaxed);
    const Part sum = part_at(base, tile.tokens);
    for (int i = 1; i < tile.splits; i++)
        kernels_.fold(sum, part_at(base + i * stride, tile.tokens), tile.tokens * group_, layout_.head_dim);
    finish(tile, sum, head, call);
}

void Attention::run(int layer, const float* q, int64_t q_stride, float* out, int64_t out_stride, Team& team) {
    const Call call{layer, q, q_stride, out, out_stride};
    const int heads = layout_.kv_heads;
    team.run(static_cast<int>(items_.size()) * heads, [&](int i, int thread) {
        const Item& item = items_[i / heads];
        const Tile& tile = tiles_[item.tile];
        if (item.split < 0)
            whole_tile(tile, i % heads, call, thread);
        else
            one_split(tile, item.split, i % heads, call, thread);
    });
}

}  // namespace tenure
