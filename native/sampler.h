// Choosing the next token from logits.
#pragma once

#include <cstdint>

#include "team.h"

namespace tenure {

struct SampleParams {
    float temperature = 0.0f;  // 0 = greedy: the lowest index of the maximum
    float top_p = 1.0f;        // in (0, 1]; 1 = off
    int32_t top_k = 0;         // <= 0 or >= vocab = off
    uint64_t seed = 0;
    uint32_t position = 0;     // of the token being chosen, in its sequence
    uint32_t stream = 0;       // which of the n answers to one prompt
    float min_p = 0.0f;        // of the likeliest token's probability; 0 = off
    const uint32_t* allowed = nullptr;  // a bit for each token, lowest first: whether it may be chosen; null = all may
};

// One token per row of logits [rows, vocab] into out[rows]. Order: allowed, min_p, top_k, top_p; equal logits rank by lower
// id. What is not allowed is not looked at, so that an answer that may go few ways is chosen sooner than a free one. One uniform per row from Philox4x32-10 keyed by seed, counter (position, stream), so a choice depends on nothing
// but its own arguments. A row with NaN or +inf, or with no finite logit at all, gives -1; -inf means "never".
void sample(const float* logits, int vocab, const SampleParams* params, int rows, int32_t* out, Team& team);

// Philox4x32-10 of counter (c0..c3) and key (k0, k1); writes four words.
void philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

}  // namespace tenure
