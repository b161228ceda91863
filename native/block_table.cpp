#include "block_table.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace tenure {

namespace {

void require(bool holds, const char* argument, const std::string& what) {
    if (!holds) throw std::invalid_argument(std::string("tables.") + argument + ": " + what);
}

void check_sizes(const TableCall& call, const Batch& batch) {
    require(call.starts_size == batch.sequences + 1, "starts", "must hold one more than the number of sequences");
    require(call.first_block_size == batch.sequences, "first_block", "must hold one per sequence");
    require(call.codecs_size == call.blocks, "codecs", "must hold one per block");
    require(call.encode_to_size == call.blocks, "encode_to", "must hold one per block");
    require(call.encode_codec_size == call.blocks, "encode_codec", "must hold one per block");
    require(call.starts[0] == 0, "starts", "must start at 0");
    for (int s = 0; s < batch.sequences; s++) require(call.starts[s] <= call.starts[s + 1], "starts", "must ascend");
    require(call.starts[batch.sequences] == call.blocks, "starts", "must end at " + std::to_string(call.blocks));
}

class Checker {
public:
    Checker(const TableCall& call, const Batch& batch, int64_t arena_bytes, const KvLayout& layout, Codec staged,
            int window, std::vector<Extent>& written)
        : call_(call), batch_(batch), arena_bytes_(arena_bytes), layout_(layout), staged_(staged), window_(window),
          written_(written) {}

    void run() {
        check_sizes(call_, batch_);
        for (int s = 0; s < batch_.sequences; s++) sequence(s);
    }

private:
    void sequence(int s) {
        const int first = call_.first_block[s], blocks = call_.starts[s + 1] - call_.starts[s];
        const int begin = batch_.first_pos[s], end = begin + batch_.seq_rows[s + 1] - batch_.seq_rows[s];
        require(first >= 0, "first_block", "must not be negative");
        require(int64_t(first + int64_t(blocks)) * kBlockTokens >= end, "starts",
                "sequence " + std::to_string(s) + " has too few blocks for position " + std::to_string(end - 1));
        const int64_t seen = std::max<int64_t>(0, int64_t(begin) + 1 - window_);
        require(begin == end || int64_t(first) * kBlockTokens <= seen, "first_block",
                "block " + std::to_string(first) + " is after token " + std::to_string(seen) + ", which the first row of " +
                    "sequence " + std::to_string(s) + " sees");
        for (int i = 0; i < blocks; i++) {
            const int64_t at = (first + int64_t(i)) * kBlockTokens;
            const bool writes = begin < end && at < end && at + kBlockTokens > begin;
            entry(call_.starts[s] + i, writes, writes && at >= begin && at + kBlockTokens <= end,
                  writes && at + kBlockTokens <= end);
        }
    }

    // A block of which rows are written (or all of them: whole), or that becomes full.
    void entry(int i, bool writes, bool whole, bool fills) {
        const bool encodes = call_.encode_to[i] >= 0;
        require(call_.codecs[i] < kCodecs, "codecs", "unknown codec " + std::to_string(call_.codecs[i]));
        const auto codec = static_cast<Codec>(call_.codecs[i]);
        require(staging(codec) == staged_ && (!writes || codec == staged_), "codecs",
                "codec " + std::to_string(call_.codecs[i]) + " is not the decoder's");
        if (call_.offsets[i] == -1)
            require(whole && encodes, "offsets", "-1 is only for blocks that are written and encoded whole in the step");
        else
            place(call_.offsets[i], codec, writes, "offsets");
        if (!encodes) return;
        require(fills, "encode_to", "a block can be encoded in the step that fills it only");
        require(call_.encode_codec[i] < kCodecs, "encode_codec", "unknown codec " + std::to_string(call_.encode_codec[i]));
        const auto to = static_cast<Codec>(call_.encode_codec[i]);
        require(!is_staged(to) && staging(to) == staged_, "encode_codec", "is not one to encode into");
        place(call_.encode_to[i], to, true, "encode_to");
    }

    void place(int64_t offset, Codec codec, bool writes, const char* argument) {
        const int64_t bytes = layout_.block_bytes(codec);
        require(offset >= 0 && offset <= arena_bytes_ - bytes, argument,
                "offset " + std::to_string(offset) + " lies outside the arena");
        if (writes) written_.push_back({offset, offset + bytes});
    }

    const TableCall& call_;
    const Batch& batch_;
    int64_t arena_bytes_;
    const KvLayout& layout_;
    Codec staged_;
    int window_;
    std::vector<Extent>& written_;
};

}  // namespace

void BlockTable::check(const TableCall& call, const Batch& batch, int64_t arena_bytes,
                       std::vector<Extent>& written) const {
    Checker(call, batch, arena_bytes, layout_, staged_, window_, written).run();
}

void BlockTable::check_apart(std::vector<Extent>& written) {
    std::sort(written.begin(), written.end(), [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
    for (std::size_t i = 1; i < written.size(); i++)
        require(written[i].begin >= written[i - 1].end, "offsets", "two blocks that are written overlap");
}

void BlockTable::plan(const TableCall& call, const Batch& batch) {
    call_ = call;
    arena_ = batch.arena;
    offsets_ = call.offsets;
    codecs_ = call.codecs;
    encoded_.clear();
    encodes_.assign(batch.sequences, 0);
    for (int s = 0; s < batch.sequences; s++)
        for (int i = call.starts[s]; i < call.starts[s + 1]; i++)
            if (call.encode_to[i] >= 0) {
                encoded_.push_back(i);
                encodes_[s] = 1;
            }
    if (encoded_.empty()) return;
    later_offsets_.assign(call.offsets, call.offsets + call.blocks);
    later_codecs_.assign(call.codecs, call.codecs + call.blocks);
    scratch_at_.assign(call.blocks, -1);
    int64_t scratch = 0;
    for (const int i : encoded_) {
        later_offsets_[i] = call.encode_to[i];
        later_codecs_[i] = call.encode_codec[i];
        if (call.offsets[i] >= 0) continue;
        scratch_at_[i] = scratch;
        scratch += layout_.head_offset(staged_, 1, 0);
    }
    scratch_.reserve(scratch);
    offsets_ = later_offsets_.data();
    codecs_ = later_codecs_.data();
}

uint8_t* BlockTable::staged_head(int entry, int layer, int head) const {
    if (call_.offsets[entry] < 0)
        return scratch_.as<uint8_t>() + scratch_at_[entry] + layout_.head_offset(staged_, 0, head);
    return arena_ + call_.offsets[entry] + layout_.head_offset(staged_, layer, head);
}

void BlockTable::encode(int layer, const CodecKernels& kernels, Team& team) const {
    const int heads = layout_.kv_heads;
    const auto one = [&](int i, int) {
        const int entry = encoded_[i / heads], head = i % heads;
        const auto codec = static_cast<Codec>(call_.encode_codec[entry]);
        kernels.encode[static_cast<int>(codec)](
            staged_head(entry, layer, head),
            arena_ + call_.encode_to[entry] + layout_.head_offset(codec, layer, head), layout_.head_dim);
    };
    const int items = static_cast<int>(encoded_.size()) * heads;
    if (items > 0) team.run(items, one);
}

}  // namespace tenure
