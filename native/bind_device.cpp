// Bytes of the arena, and attention alone for its tests.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "attention.h"
#include "bind_decoder.h"
#include "bind_tables.h"
#include "shared_team.h"

namespace tenure {

namespace nb = nanobind;

namespace {

template <class T, int dims>
using Array = nb::ndarray<T, nb::ndim<dims>, nb::c_contig, nb::device::cpu>;
using Bytes = Array<uint8_t, 1>;
using Offsets = Array<const int64_t, 1>;

// Makes the pages of bytes [begin, end) resident without changing a byte.
void prefault(const Bytes& arena, int64_t begin, int64_t end) {
    const int64_t size = static_cast<int64_t>(arena.shape(0));
    if (begin < 0 || begin > end || end > size) throw std::invalid_argument("begin, end: outside the arena");
    const nb::gil_scoped_release nogil;
    // An atomic add of zero is a write to the page, and safe beside a step that already uses it.
    for (int64_t at = begin; at < end; at += 4096) __atomic_fetch_add(arena.data() + at, 0, __ATOMIC_RELAXED);
}

void copy_blocks(const Bytes& arena, const Offsets& src, const Offsets& dst, int64_t nbytes) {
    if (src.shape(0) != dst.shape(0)) throw std::invalid_argument("dst: must be as long as src");
    const int64_t last = static_cast<int64_t>(arena.shape(0)) - nbytes;
    if (nbytes < 0 || last < 0) throw std::invalid_argument("nbytes: more than the arena holds");
    for (std::size_t i = 0; i < src.shape(0); i++) {
        if (src(i) < 0 || src(i) > last) throw std::invalid_argument("src: an offset lies outside the arena");
        if (dst(i) < 0 || dst(i) > last) throw std::invalid_argument("dst: an offset lies outside the arena");
        if (src(i) != dst(i) && std::llabs(src(i) - dst(i)) < nbytes)
            throw std::invalid_argument("dst: a block overlaps its source");
    }
    const nb::gil_scoped_release nogil;
    for (std::size_t i = 0; i < src.shape(0); i++)
        if (src(i) != dst(i)) std::memcpy(arena.data() + dst(i), arena.data() + src(i), nbytes);
}

int64_t block_bytes(const std::string& codec, int layers, int kv_heads, int head_dim) {
    return KvLayout{layers, kv_heads, head_dim}.block_bytes(codec_named(codec));
}

// Block i of src_codec at src[i] is written again in dst_codec at dst[i].
void recode_blocks(const Bytes& arena, const Offsets& src, const std::string& src_codec, const Offsets& dst,
                   const std::string& dst_codec, int layers, int kv_heads, int head_dim, const std::string& isa_name) {
    const KvLayout layout{layers, kv_heads, head_dim};
    const Codec from = codec_named(src_codec), to = codec_named(dst_codec);
    if (layers <= 0 || kv_heads <= 0 || head_dim <= 0 || head_dim % 16 || head_dim > kMaxHeadDim)
        throw std::invalid_argument("layers, kv_heads, head_dim: no such blocks");
    if (src.shape(0) != dst.shape(0)) throw std::invalid_argument("dst: must be as long as src");
    const int64_t size = static_cast<int64_t>(arena.shape(0)), read = layout.block_bytes(from);
    const int64_t written = layout.block_bytes(to);
    for (std::size_t i = 0; i < src.shape(0); i++) {
        if (src(i) < 0 || src(i) > size - read) throw std::invalid_argument("src: an offset lies outside the arena");
        if (dst(i) < 0 || dst(i) > size - written) throw std::invalid_argument("dst: an offset lies outside the arena");
        if (src(i) < dst(i) + written && dst(i) < src(i) + read)
            throw std::invalid_argument("dst: a block overlaps its source");
    }
    const CodecKernels& kernels = codec_kernels(isa_name.empty() ? isa() : isa_named(isa_name));
    const nb::gil_scoped_release nogil;
    for (std::size_t i = 0; i < src.shape(0); i++)
        recode(kernels, layout, arena.data() + src(i), from, arena.data() + dst(i), to);
}

// One layer, one sequence per entry of first_pos: stores k and v (already rotated) into the blocks, then attends.
void attention(const Bytes& arena, const std::string& staged_codec, const std::string& isa_name, int threads,
               const Array<const float, 3>& q, const Array<const float, 3>& k, const Array<const float, 3>& v,
               const Array<const int32_t, 1>& seq_rows, const Array<const int32_t, 1>& first_pos, const PyTable& table,
               const Array<float, 3>& out, int window, float soft_cap) {
    const int rows = static_cast<int>(q.shape(0)), heads = static_cast<int>(q.shape(1));
    const int kv_heads = static_cast<int>(k.shape(1)), dim = static_cast<int>(q.shape(2));
    const KvLayout layout{1, kv_heads, dim};
    const Codec staged = codec_named(staged_codec);
    if (!is_staged(staged)) throw std::invalid_argument("staged: must be bf16 or f32");
    const Isa& chosen = isa_named(isa_name);
    Attention attention(layout, staged, heads, chosen, {window, soft_cap});
    const Batch batch{static_cast<int>(first_pos.shape(0)), seq_rows.data(), first_pos.data(), arena.data()};
    if (batch.rows() != rows) throw std::invalid_argument("seq_rows: must end at the number of rows");
    BlockTable blocks(layout, staged, window);
    blocks.plan(table_call(table), batch);
    const CodecKernels& kernels = codec_kernels(chosen);
    for (int s = 0; s < batch.sequences; s++)
        for (int row = seq_rows(s), position = first_pos(s); row < seq_rows(s + 1); row++, position++)
            for (int h = 0; h < kv_heads; h++)
                kernels.store[static_cast<int>(staged)](
                    blocks.staged_head(blocks.entry(s, position / kBlockTokens), 0, h) +
                        position % kBlockTokens / kTileTokens * layout.tile_bytes(staged),
                    position % kTileTokens, &k(row, h, 0), &v(row, h, 0), dim);
    std::vector<float> scaled(q.data(), q.data() + q.size());
    for (float& x : scaled) x *= 1.44269504088896341f / std::sqrt(static_cast<float>(dim));
    const auto team = shared_team(threads);
    const std::lock_guard lock(team->turn);
    blocks.encode(0, kernels, team->team);
    attention.plan(batch, blocks, team->team.threads());
    attention.run(0, scaled.data(), int64_t(heads) * dim, out.data(), int64_t(heads) * dim, team->team);
}

}  // namespace

void bind_device(nb::module_& m) {
    using namespace nb::literals;
    m.def("prefault", &prefault, "arena"_a.noconvert(), "begin"_a, "end"_a,
          "Makes the pages of bytes [begin, end) resident without changing them; without the interpreter's lock.");
    m.def("copy_blocks", &copy_blocks, "arena"_a.noconvert(), "src"_a, "dst"_a, "nbytes"_a,
          "Copies nbytes from each src offset to its dst offset, in order; without the interpreter's lock.");
    m.def("recode", &recode_blocks, "arena"_a.noconvert(), "src"_a, "src_codec"_a, "dst"_a, "dst_codec"_a, "layers"_a,
          "kv_heads"_a, "head_dim"_a, "isa"_a = "",
          "Writes whole blocks again in another codec (not f32), each from its src offset to its dst offset, in order; "
          "without the interpreter's lock.");
    m.def("block_bytes", &block_bytes, "codec"_a, "layers"_a, "kv_heads"_a, "head_dim"_a,
          "Bytes of a block of 32 tokens in the layout the kernels use.");
    m.def("attention", &attention, "arena"_a.noconvert(), "staged"_a, "isa"_a, "threads"_a, "q"_a, "k"_a, "v"_a,
          "seq_rows"_a, "first_pos"_a, "table"_a.noconvert(), "out"_a.noconvert(), "window"_a = kNoWindow,
          "soft_cap"_a = 0.0f,
          "For tests: stores k, v [rows, kv_heads, dim] and attends with q [rows, heads, dim] into out. Arguments are "
          "trusted.");
}

}  // namespace tenure
