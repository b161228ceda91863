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

void check_step(const StepCall& call, const DecoderShape& shape, const std::vector<BlockTable>& tables) {
    require(call.rows <= kMaxRows, "tokens", "more than " + std::to_string(kMaxRows) + " rows");
    for (int64_t r = 0; r < call.rows; r++)
        require(call.tokens[r] >= 0 && call.tokens[r] < shape.vocab, "tokens",
                "token " + std::to_string(call.tokens[r]) + " is not in the vocabulary");
    check_starts(call.seq_rows, call.seq_rows_size, call.sequences, call.rows, "seq_rows");
    for (int64_t s = 0; s < call.sequences; s++) {
        const int64_t first = call.first_pos[s], rows = call.seq_rows[s + 1] - call.seq_rows[s];
        require(first >= 0 && first + rows <= kMaxPosition, "first_pos", "position out of range");
    }
    require(call.tables_size == int64_t(tables.size()), "tables",
            "must hold one per group of layers: " + std::to_string(tables.size()));
    const Batch batch{static_cast<int>(call.sequences), call.seq_rows, call.first_pos, call.arena};
    std::vector<Extent> written;
    for (std::size_t i = 0; i < tables.size(); i++) tables[i].check(call.tables[i], batch, call.arena_bytes, written);
    BlockTable::check_apart(written);
    require(call.logit_rows_size <= kMaxRows, "logit_rows", "more than " + std::to_string(kMaxRows) + " rows");
    for (int64_t i = 0; i < call.logit_rows_size; i++)
        require(call.logit_rows[i] >= 0 && call.logit_rows[i] < call.rows, "logit_rows",
                "row " + std::to_string(call.logit_rows[i]) + " is not in the step");
}

}  // namespace tenure
