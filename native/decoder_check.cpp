// Everything a decoder is made of is checked before it exists, and all a step is told before a byte of the arena is
// touched.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "decoder.h"

namespace tenure {

namespace {

constexpr int64_t kMaxRows = 1 << 20;
constexpr int64_t kMaxPosition = 1 << 24;  // positions are exact in f32 below this

void require(bool holds, const char* argument, const std::string& what) {
    if (!holds) throw std::invalid_argument(std::string(argument) + ": " + what);
}

// starts[0] = 0, ascending, starts[last] = total.
void check_starts(const int32_t* starts, int64_t size, int64_t sequences, int64_t total, const char* argument) {
    require(size == sequences + 1, argument, "must hold one more than the number of sequences");
    require(starts[0] == 0, argument, "must start at 0");
    for (int64_t s = 0; s < sequences; s++) require(starts[s] <= starts[s + 1], argument, "must ascend");
    require(starts[sequences] == total, argument, "must end at " + std::to_string(total));
}

void check_sequences(const StepCall& call) {
    for (int64_t s = 0; s < call.sequences; s++) {
        const int64_t rows = call.seq_rows[s + 1] - call.seq_rows[s];
        const int64_t first = call.first_pos[s], blocks = call.block_starts[s + 1] - call.block_starts[s];
        require(first >= 0 && first + rows <= kMaxPosition, "first_pos", "position out of range");
        require(blocks * kBlockTokens >= first + rows, "block_starts",
                "sequence " + std::to_string(s) + " has too few blocks for position " + std::to_string(first + rows - 1));
    }
}

// A block that is written must belong to one sequence: two writers would leave what neither computed.
void check_written_once(const StepCall& call, int64_t block_bytes) {
    std::vector<int64_t> written;
    for (int64_t s = 0; s < call.sequences; s++) {
        const int64_t rows = call.seq_rows[s + 1] - call.seq_rows[s], first = call.first_pos[s];
        if (rows == 0) continue;
        for (int64_t b = first / kBlockTokens; b <= (first + rows - 1) / kBlockTokens; b++)
            written.push_back(call.block_offsets[call.block_starts[s] + b]);
    }
    std::sort(written.begin(), written.end());
    for (std::size_t i = 1; i < written.size(); i++)
        require(written[i] - written[i - 1] >= block_bytes, "block_offsets", "two blocks that are written overlap");
}

}  // namespace

void Decoder::check_shape(const DecoderShape& shape) {
    for (const int size : {shape.layers, shape.hidden, shape.ffn, shape.vocab})
        require(size > 0, "shape", "every size must be positive");
    require(shape.rotary > 0 && shape.rotary % 2 == 0 && shape.rotary <= shape.head_dim, "inv_freq",
            "must hold up to head_dim / 2 values");
    require(shape.inv_freq.size() == std::size_t(shape.ropes) * shape.rotary / 2, "inv_freq", "has no such shape");
    const auto layers = std::size_t(shape.layers);
    require(shape.windows.size() == layers, "windows", "must hold one per layer");
    for (const int window : shape.windows) require(window >= 0, "windows", "must not be negative");
    require(shape.rope_of_layer.size() == layers, "rope_of_layer", "must hold one per layer");
    for (const int rope : shape.rope_of_layer)
        require(rope >= -1 && rope < shape.ropes, "rope_of_layer", "must be -1 or an index of inv_freq");
    require(shape.pre_norm || shape.post_norm, "norms", "must be before or after");
    require(shape.attention_cap >= 0 && shape.logit_cap >= 0, "attention_cap, logit_cap", "must not be negative");
}

void check_step(const StepCall& call, const DecoderShape& shape, const KvLayout& layout) {
    require(call.rows <= kMaxRows, "tokens", "more than " + std::to_string(kMaxRows) + " rows");
    for (int64_t r = 0; r < call.rows; r++)
        require(call.tokens[r] >= 0 && call.tokens[r] < shape.vocab, "tokens",
                "token " + std::to_string(call.tokens[r]) + " is not in the vocabulary");
    check_starts(call.seq_rows, call.seq_rows_size, call.sequences, call.rows, "seq_rows");
    check_starts(call.block_starts, call.block_starts_size, call.sequences, call.blocks, "block_starts");
    check_sequences(call);
    for (int64_t b = 0; b < call.blocks; b++)
        require(call.block_offsets[b] >= 0 && call.block_offsets[b] <= call.arena_bytes - layout.block_bytes(),
                "block_offsets", "offset " + std::to_string(call.block_offsets[b]) + " lies outside the arena");
    check_written_once(call, layout.block_bytes());
    require(call.block_codecs_size == call.blocks, "block_codecs", "must hold one per block");
    for (int64_t b = 0; b < call.blocks; b++)
        require(call.block_codecs[b] == static_cast<uint8_t>(shape.codec), "block_codecs",
                "codec " + std::to_string(call.block_codecs[b]) + " is not the decoder's");
    require(call.logit_rows_size <= kMaxRows, "logit_rows", "more than " + std::to_string(kMaxRows) + " rows");
    for (int64_t i = 0; i < call.logit_rows_size; i++)
        require(call.logit_rows[i] >= 0 && call.logit_rows[i] < call.rows, "logit_rows",
                "row " + std::to_string(call.logit_rows[i]) + " is not in the step");
}

}  // namespace tenure
