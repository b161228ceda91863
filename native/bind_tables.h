// A table of blocks as Python gives it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "block_table.h"

namespace tenure {

template <class T>
using Column = nanobind::ndarray<const T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

// (starts, first_block, offsets, codecs, encode_to, encode_codec), as TableCall has them.
using PyTable = std::tuple<Column<int32_t>, Column<int32_t>, Column<int64_t>, Column<uint8_t>, Column<int64_t>,
                           Column<uint8_t>>;

inline TableCall table_call(const PyTable& table) {
    const auto& [starts, first_block, offsets, codecs, encode_to, encode_codec] = table;
    const auto size = [](const auto& column) { return static_cast<int64_t>(column.shape(0)); };
    return {starts.data(),    first_block.data(), offsets.data(), codecs.data(),   encode_to.data(),
            encode_codec.data(), size(starts),    size(first_block), size(offsets), size(codecs),
            size(encode_to),  size(encode_codec)};
}

}  // namespace tenure
