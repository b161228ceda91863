// A step of 64 tokens as the kernels take it, whatever the codecs of its two blocks. Include it only from kernel sources,
// like simd16.h.
#pragma once

#include "attention.h"
#include "simd16.h"

namespace tenure {
namespace {

constexpr int kBlocksPerStep = kStepTokens / kBlockTokens;

// Room for what a step expands. A part of a thread's scratch.
struct StepScratch {
    alignas(64) float k_scale[kStepTokens], v_scale[kStepTokens];
    alignas(64) uint8_t tiles[kBlocksPerStep][4 * kBlockTokens * kMaxHeadDim];
};

struct StepTiles {
    const uint8_t* tile[kTilesPerStep];  // in the staged layout
    const float *k_scale, *v_scale;      // [64] of scores and of probabilities; null: all ones
    bool k_turned[kBlocksPerStep], turned[kBlocksPerStep];  // whether K is, whether V is (turn.h)
    int begin;                           // absolute token
    int tokens;                          // up to the last that some row sees, 1..64
    int from, to;                        // blocks that some row sees: [from, to]
    const uint8_t* head[kBlocksPerStep]; // of the blocks; one that no row sees repeats the other
    Codec codec[kBlocksPerStep];
    int first, tiles;                    // those that some row sees are [first, tiles); the others repeat one and are masked
};

// The step at `begin` of a span whose last token that is seen is end - 1. `four_bits`: see Expanded.
TENURE_INLINE StepTiles step_at(const Span& span, int begin, int end, const CodecKernels& codecs, StepScratch& scratch,
                                bool four_bits = true) {
    StepTiles step;
    step.begin = begin;
    step.tokens = end - begin < kStepTokens ? end - begin : kStepTokens;
    step.first = span.unseen_tiles(begin);
    step.tiles = (step.tokens + kTileTokens - 1) / kTileTokens;
    step.k_scale = step.v_scale = nullptr;
    // Blocks that no row sees any of are not looked at: they may be gone.
    constexpr int kTiles = kBlockTokens / kTileTokens;
    const int from = step.first / kTiles, to = (step.tiles - 1) / kTiles;
    const Blocks& blocks = *span.blocks;
    const uint8_t* tiles[kBlocksPerStep] = {};
    for (int i = from; i <= to; i++) {
        const Blocks::Head head = blocks.head(begin / kBlockTokens + i);
        tiles[i] = step.head[i] = head.at;
        step.codec[i] = head.codec;
        step.k_turned[i] = forms(head.codec).k == Form::int8;
        step.turned[i] = !is_staged(head.codec);
        if (is_staged(head.codec)) continue;
        if (!step.k_scale) {
            for (int t = 0; t < kStepTokens; t++) scratch.k_scale[t] = scratch.v_scale[t] = 1.0f;
            step.k_scale = scratch.k_scale;
            step.v_scale = scratch.v_scale;
        }
        codecs.prepare[static_cast<int>(head.codec)](
            head.at, span.head_dim,
            {scratch.tiles[i], scratch.k_scale + i * kBlockTokens, scratch.v_scale + i * kBlockTokens, four_bits});
        tiles[i] = scratch.tiles[i];
    }
    for (int i = 0; i < kBlocksPerStep; i++) {
        const int seen = i < from ? from : i > to ? to : i;
        step.k_turned[i] = step.k_turned[seen];
        step.turned[i] = step.turned[seen];
        step.head[i] = step.head[seen];
        step.codec[i] = step.codec[seen];
    }
    step.from = from;
    step.to = to;
    for (int i = 0; i < kTilesPerStep; i++) {
        const int seen = i < step.first ? step.first : i < step.tiles ? i : step.tiles - 1;
        step.tile[i] = tiles[seen / kTiles] + seen % kTiles * blocks.tile_bytes;
    }
    return step;
}

}  // namespace
}  // namespace tenure
