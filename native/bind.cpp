// The module tenure._native.
#include <nanobind/nanobind.h>

#include "bind_decoder.h"
#include "bind_linear.h"

NB_MODULE(_native, m) {
    m.doc() = "Kernels and the decoder of Tenure, in C++.";
    tenure::bind_linear(m);
    tenure::bind_decoder(m);
    tenure::bind_device(m);
}
