// What bind.cpp takes from the bindings of linear layers.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>
#include <string>

#include "linear.h"

namespace tenure {

// Adds isa, isas, cpu_features, cores, Linear, sample and the test entries to the module.
void bind_linear(nanobind::module_& m);

// Packs numpy weights [n, k] and their f16 scales [n, k / 32]; throws std::invalid_argument naming what is wrong.
Linear pack_arrays(
    const std::string& format,
    const nanobind::ndarray<nanobind::ro, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>& w,
    const std::optional<nanobind::ndarray<const uint16_t, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>>&
        scale,
    const std::optional<nanobind::ndarray<const uint16_t, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>>&
        min);

}  // namespace tenure
