#include "linear.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

#include "linear_kernels.h"
#include "stretches.h"

namespace tenure {
namespace {

constexpr bool grouped(Format format) { return format == Format::int8 || format == Format::int4; }

std::size_t panel_size(Format format, int k) {
    const auto inputs = static_cast<std::size_t>(k);
    switch (format) {
        case Format::f32: return inputs * kPanel * 4;
        case Format::bf16: return (inputs + 1) / 2 * kPanel * 4;
        case Format::int8: return inputs / kGroup * kInt8GroupBytes;
        case Format::int4: return inputs / kGroup * kInt4GroupBytes;
    }
    throw std::invalid_argument("Linear: unknown format");
}

void check_shape(Format format, int n, int k) {
    if (n <= 0 || k <= 0) throw std::invalid_argument("Linear: n and k must be positive");
    if (grouped(format) && k % kGroup != 0) {
        throw std::invalid_argument("Linear: int8 and int4 need k to be a multiple of 32, not " + std::to_string(k));
    }
}

// Where one element lives: the byte inside its panel.
struct Place {
    std::size_t value;  // of the element itself (int4: of the byte it shares)
    std::size_t scale;  // of its group's scale; min follows kScaleBytes later
    bool high;          // int4: upper nibble
};

Place place(Format format, int column, int i) {
    const std::size_t group = i / kGroup, inner = i % kGroup;
    switch (format) {
        case Format::f32: return {(std::size_t(i) * kPanel + column) * 4, 0, false};
        case Format::bf16: return {(std::size_t(i / 2) * kPanel + column) * 4 + i % 2 * 2, 0, false};
        case Format::int8: {
            const std::size_t base = group * kInt8GroupBytes;
            return {base + kScaleBytes + (inner / 4 * kPanel + column) * 4 + inner % 4, base + column * 2u, false};
        }
        case Format::int4: {
            const std::size_t base = group * kInt4GroupBytes;
            return {base + 2 * kScaleBytes + (inner / 8 * kPanel + column) * 4 + inner % 4, base + column * 2u,
                    inner % 8 >= 4};
        }
    }
    throw std::invalid_argument("Linear: unknown format");
}

template <class T>
void put(std::byte* at, T value) {
    std::memcpy(at, &value, sizeof value);
}

template <class T>
T get(const std::byte* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

constexpr int values_per_word(Format format) { return 1 << static_cast<int>(format); }
static_assert(values_per_word(Format::f32) == 1 && values_per_word(Format::int4) == 8);

// A panel holds a column's values as 32-bit words, with those of the other columns between them. Packing by words and
// not by values is what makes loading a model quick. `left` values of the row are still to come.
uint32_t packed_word(Format format, const void* w, std::size_t index, int left) {
    const auto load = [](const auto* from) { return get<uint32_t>(reinterpret_cast<const std::byte*>(from)); };
    switch (format) {
        case Format::f32: return load(static_cast<const float*>(w) + index);
        case Format::bf16: {
            const auto* values = static_cast<const uint16_t*>(w) + index;
            return left > 1 ? load(values) : *values;
        }
        case Format::int8: return load(static_cast<const int8_t*>(w) + index) ^ 0x80808080;  // + 128 in each byte
        case Format::int4: {
            const auto* values = static_cast<const uint8_t*>(w) + index;
            return (load(values) & 0x0f0f0f0f) | (load(values + 4) & 0x0f0f0f0f) << 4;
        }
    }
    throw std::invalid_argument("Linear: unknown format");
}

// f16 bits to f32, exact. Not a kernel: a handful of scales when weights are read back.
float half_to_float(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16, magnitude = half & 0x7fff;
    if (magnitude >= 0x7c00) return std::bit_cast<float>(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    if (magnitude >= 0x400) return std::bit_cast<float>(sign | ((magnitude << 13) + ((127 - 15) << 23)));
    const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
    return sign ? -subnormal : subnormal;
}

// One row of a panel, dequantised. The format is a template argument so that the loop holds no decisions.
template <Format F>
void unpack_column(const std::byte* panel, int column, int k, float* out) {
    float scale = 0, min = 0;
    for (int i = 0; i < k; ++i) {
        const Place at = place(F, column, i);
        if (grouped(F) && i % kGroup == 0) {
            scale = half_to_float(get<uint16_t>(panel + at.scale));
            if (F == Format::int4) min = half_to_float(get<uint16_t>(panel + at.scale + kScaleBytes));
        }
        if constexpr (F == Format::f32) {
            out[i] = get<float>(panel + at.value);
        } else if constexpr (F == Format::bf16) {
            out[i] = std::bit_cast<float>(uint32_t(get<uint16_t>(panel + at.value)) << 16);
        } else {
            const int byte = std::to_integer<int>(panel[at.value]);
            out[i] = F == Format::int8 ? scale * static_cast<float>(byte - 128)
                                       : scale * static_cast<float>(at.high ? byte >> 4 : byte & 15) + min;
        }
    }
}

const LinearKernels& kernels(const Isa& isa) {
#if defined(__x86_64__)
    return choose(isa, portable::linear_kernels, avx2::linear_kernels, avx512::linear_kernels);
#else
    static_cast<void>(isa);
    return portable::linear_kernels;
#endif
}

std::size_t prepared_stride(Format format, int k, bool fine) {
    const std::size_t values = fine ? 2 * std::size_t(k) : k;
    std::size_t bytes = format == Format::bf16 ? (std::size_t(k) + 1) / 2 * 4 : values + k / kGroup * 8;
    bytes = (bytes + 63) / 64 * 64;
    // Rows a multiple of 512 bytes apart would fight for the same few sets of the L1 cache.
    return bytes % 512 == 0 ? bytes + 64 : bytes;
}

// Fills scratch.x with the activations as `format` wants them; by all threads when there is enough to share.
void prepare(const Linear& w, const LinearCall& call, Scratch& scratch, Team& team, const LinearKernels& kernel) {
    const std::size_t stride = prepared_stride(w.format, w.k, call.fine);
    scratch.x.reserve(stride * call.m);
    auto* rows = scratch.x.as<std::byte>();
    constexpr int kChunkValues = 4096;
    const int chunk = std::max(1, kChunkValues / w.k);
    const auto prepare_chunk = [&](int item, int) {
        const int end = std::min(call.m, (item + 1) * chunk);
        for (int r = item * chunk; r < end; ++r) {
            kernel.prepare(w.format, call.fine, call.x + r * call.x_stride, w.k, rows + r * stride);
        }
    };
    team.run((call.m + chunk - 1) / chunk, prepare_chunk);
}

}  // namespace

Format format_named(const std::string& name) {
    constexpr const char* names[] = {"f32", "bf16", "int8", "int4"};
    for (int i = 0; i < 4; ++i) {
        if (name == names[i]) return static_cast<Format>(i);
    }
    throw std::invalid_argument("unknown weight format '" + name + "' (f32, bf16, int8 or int4)");
}

std::size_t Linear::panel_bytes() const { return panel_size(format, k); }

std::size_t packed_bytes(Format format, int n, int k) {
    check_shape(format, n, k);
    return std::size_t((n + kPanel - 1) / kPanel) * panel_size(format, k);
}

Linear pack(Format format, int n, int k, const void* w, const uint16_t* scale, const uint16_t* min) {
    if (w == nullptr) throw std::invalid_argument("pack: weights are missing");
    if (grouped(format) && scale == nullptr) throw std::invalid_argument("pack: this format needs scales");
    if (format == Format::int4 && min == nullptr) throw std::invalid_argument("pack: int4 needs mins");
    Linear packed{format, n, k, Buffer::shared(packed_bytes(format, n, k))};
    for (int row = 0; row < n; ++row) {
        std::byte* panel = packed.data.as<std::byte>() + row / kPanel * packed.panel_bytes();
        const std::size_t start = std::size_t(row) * k;
        for (int i = 0; i < k; i += values_per_word(format)) {
            put(panel + place(format, row % kPanel, i).value, packed_word(format, w, start + i, k - i));
        }
        for (int i = 0; grouped(format) && i < k; i += kGroup) {
            const std::size_t at = place(format, row % kPanel, i).scale;
            put(panel + at, scale[(start + i) / kGroup]);
            if (format == Format::int4) put(panel + at + kScaleBytes, min[(start + i) / kGroup]);
        }
    }
    return packed;
}

void unpack_row(const Linear& w, int row, float* out) {
    const std::byte* panel = w.data.as<std::byte>() + row / kPanel * w.panel_bytes();
    switch (w.format) {
        case Format::f32: return unpack_column<Format::f32>(panel, row % kPanel, w.k, out);
        case Format::bf16: return unpack_column<Format::bf16>(panel, row % kPanel, w.k, out);
        case Format::int8: return unpack_column<Format::int8>(panel, row % kPanel, w.k, out);
        case Format::int4: return unpack_column<Format::int4>(panel, row % kPanel, w.k, out);
    }
}

void unpack(const Linear& w, float* out) {
    for (int row = 0; row < w.n; ++row) unpack_row(w, row, out + std::size_t(row) * w.k);
}

void linear(const Linear& w, const LinearCall& call, Scratch& scratch, Team& team, const Isa& isa) {
    if (call.m <= 0) return;
    const LinearKernels& kernel = kernels(isa);
    Block block{&w, reinterpret_cast<const std::byte*>(call.x), call.x_stride * int64_t(sizeof(float)),
                call.y, call.y_stride, call.bias, call.accumulate, call.fine, 0, 0, 0, 0};
    if (w.format != Format::f32) {
        prepare(w, call, scratch, team, kernel);
        block.x = scratch.x.as<std::byte>();
        block.x_stride = int64_t(prepared_stride(w.format, w.k, call.fine));
    }
    // An item is a run of panels for a chunk of rows: enough items that a thread which is taken away leaves little
    // behind, not so many that claiming them shows; rows few enough to stay in the L2 cache beside a panel.
    constexpr int kTile = 12, kMostRows = 240;
    constexpr int64_t kItemBytes = 64 << 10, kRowBytes = 512 << 10;
    const int64_t row_bytes = w.format == Format::f32 ? int64_t(w.k) * 4 : block.x_stride;
    const int most_rows = int(std::clamp<int64_t>(kRowBytes / row_bytes, 2 * kTile, kMostRows));
    const int panels = w.panels(), chunks = (call.m + most_rows - 1) / most_rows;
    const int rows = (call.m + chunks * kTile - 1) / (chunks * kTile) * kTile;  // even chunks of whole tiles
    const int most = std::max(1, int(kItemBytes / int64_t(w.panel_bytes())));
    const int run = call.m > 16 ? 1 : std::clamp(panels / (8 * team.threads()), 1, most);
    const int runs = (panels + run - 1) / run;
    Stretches stretches(runs * chunks, team.threads());
    team.run(runs * chunks, [&](int, int thread) {
        const int item = stretches.take(thread);
        Block mine = block;
        mine.row0 = item / runs * rows;
        mine.row1 = std::min(call.m, mine.row0 + rows);
        mine.panel0 = item % runs * run;
        mine.panel1 = std::min(panels, mine.panel0 + run);
        kernel.multiply(mine);
    });
}

}  // namespace tenure
