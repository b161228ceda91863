// Where the blocks of the sequences of a step lie, for one group of layers.
//
// A block is staged while it is written. If it becomes full in the step and is to be stored in fewer bits, it is encoded
// at once, layer by layer: rows of the block itself see what is staged, rows of later blocks what is stored. That makes a
// row's result independent of how the tokens before it were cut into steps.
#pragma once

#include <cstdint>
#include <vector>

#include "buffer.h"
#include "codecs.h"
#include "team.h"

namespace tenure {

// As the step is told: entry i of sequence s, at starts[s] + i, is block number first_block[s] + i. Blocks that no row sees
// need no entry.
struct TableCall {
    const int32_t* starts;       // [sequences + 1]
    const int32_t* first_block;  // [sequences]
    const int64_t* offsets;      // [blocks] bytes into the arena; -1: written whole in this step, nobody keeps it staged
    const uint8_t* codecs;       // [blocks]
    const int64_t* encode_to;    // [blocks] where its encoded form goes, or -1
    const uint8_t* encode_codec; // [blocks]
    int64_t starts_size, first_block_size, blocks, codecs_size, encode_to_size, encode_codec_size;
};

// The ragged batch of a step: rows of sequence s are [seq_rows[s], seq_rows[s + 1]) at positions first_pos[s], …
struct Batch {
    int sequences;
    const int32_t* seq_rows;   // [sequences + 1]
    const int32_t* first_pos;  // [sequences]
    uint8_t* arena;

    int rows() const { return seq_rows[sequences]; }
};

// Bytes [begin, end) of the arena.
struct Extent {
    int64_t begin, end;
};

class BlockTable {
public:
    // window: the tokens that a row of these layers sees, itself included.
    BlockTable(const KvLayout& layout, Codec staged, int window) : layout_(layout), staged_(staged), window_(window) {}

    // Throws std::invalid_argument naming what is wrong; touches no byte of the arena. Adds what the step writes to
    // `written`.
    void check(const TableCall& call, const Batch& batch, int64_t arena_bytes, std::vector<Extent>& written) const;
    // A block that is written must belong to one sequence: two writers would leave what neither computed.
    static void check_apart(std::vector<Extent>& written);

    void plan(const TableCall& call, const Batch& batch);

    const KvLayout& layout() const { return layout_; }
    Codec staged() const { return staged_; }
    // Entry of block `block` of sequence s.
    int entry(int s, int block) const { return call_.starts[s] + block - call_.first_block[s]; }
    int first_block(int s) const { return call_.first_block[s]; }
    bool encodes(int entry) const { return call_.encode_to[entry] >= 0; }
    // Whether any block of the sequence is encoded in this step.
    bool sequence_encodes(int s) const { return encodes_[s]; }
    // Where later rows find entry `entry`, and in what codec.
    const int64_t* offsets() const { return offsets_; }
    const uint8_t* codecs() const { return codecs_; }
    // The head of a block that is written in this step, as staged; layers after the first may overwrite it.
    uint8_t* staged_head(int entry, int layer, int head) const;
    // Encodes what became full in this layer.
    void encode(int layer, const CodecKernels& kernels, Team& team) const;

private:
    KvLayout layout_;
    Codec staged_;
    int window_;
    TableCall call_{};
    uint8_t* arena_ = nullptr;
    const int64_t* offsets_ = nullptr;
    const uint8_t* codecs_ = nullptr;
    std::vector<int64_t> later_offsets_, scratch_at_;
    std::vector<uint8_t> later_codecs_, encodes_;
    std::vector<int> encoded_;  // entries
    Buffer scratch_;            // one layer of each block that is not kept staged
};

}  // namespace tenure
