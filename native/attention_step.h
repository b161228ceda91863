// A step of 64 tokens as the kernels take it, whatever the codecs of its two blocks.
#pragma once

#include "attention.h"

namespace tenure {

constexpr int kBlocksPerStep = kStepTokens / kBlockTokens;

// Room for what a step expands. A part of a thread's scratch.
struct StepScratch {
    alignas(64) float k_scale[kStepTokens], v_scale[kStepTokens];
    alignas(64) uint8_t tiles[kBlocksPerStep][4 * kBlockTokens * kMaxHeadDim];
};

struct StepTiles {
    const uint8_t* tile[kTilesPerStep];  // in the staged layout
    const float *k_scale, *v_scale;      // [64] of scores and of probabilities; null: all ones
    bool turned[kBlocksPerStep];         // whether V is (turn.h)
    int begin;                           // absolute token
    int tokens;                          // up to the last that some row sees, 1..64
    int first, tiles;                    // those that some row sees are [first, tiles); the others repeat one and are masked
};

// The step at `begin` of a span whose last token that is seen is end - 1.
StepTiles step_at(const Span& span, int begin, int end, const CodecKernels& codecs, StepScratch& scratch);

}  // namespace tenure
