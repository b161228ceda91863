// What bind.cpp takes from the bindings of the decoder and of the device.
#pragma once

#include <nanobind/nanobind.h>

namespace tenure {

void bind_decoder(nanobind::module_& m);  // Decoder
void bind_device(nanobind::module_& m);   // prefault, copy_blocks, and the test entry of attention

}  // namespace tenure
