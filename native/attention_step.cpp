#include "attention_step.h"

#include <algorithm>

namespace tenure {

StepTiles step_at(const Span& span, int begin, int end, const CodecKernels& codecs, StepScratch& scratch) {
    StepTiles step;
    step.begin = begin;
    step.tokens = std::min(end - begin, kStepTokens);
    step.first = span.unseen_tiles(begin);
    step.tiles = (step.tokens + kTileTokens - 1) / kTileTokens;
    step.k_scale = step.v_scale = nullptr;
    // Blocks that no row sees any of are not looked at: they may be gone.
    constexpr int kTiles = kBlockTokens / kTileTokens;
    const int from = step.first / kTiles, to = (step.tiles - 1) / kTiles;
    const Blocks& blocks = *span.blocks;
    const uint8_t* tiles[kBlocksPerStep];
    for (int i = from; i <= to; i++) {
        const Blocks::Head head = blocks.head(begin / kBlockTokens + i);
        tiles[i] = head.at;
        step.turned[i] = forms(head.codec).v == Form::int4;
        if (is_staged(head.codec)) continue;
        if (!step.k_scale) {
            std::fill_n(scratch.k_scale, kStepTokens, 1.0f);
            std::fill_n(scratch.v_scale, kStepTokens, 1.0f);
            step.k_scale = scratch.k_scale;
            step.v_scale = scratch.v_scale;
        }
        codecs.expand[static_cast<int>(head.codec)](
            head.at, span.head_dim,
            {scratch.tiles[i], scratch.k_scale + i * kBlockTokens, scratch.v_scale + i * kBlockTokens});
        tiles[i] = scratch.tiles[i];
    }
    if (from > 0) step.turned[0] = step.turned[from];
    if (to + 1 < kBlocksPerStep) step.turned[1] = step.turned[to];
    for (int i = 0; i < kTilesPerStep; i++) {
        const int seen = std::clamp(i, step.first, step.tiles - 1);
        step.tile[i] = tiles[seen / kTiles] + seen % kTiles * blocks.tile_bytes;
    }
    return step;
}

}  // namespace tenure
