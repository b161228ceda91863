// Python faces of linear layers, the sampler, the team and the instruction sets: for tests, `tenure doctor` and the
// engine's sampler. The decoder uses the C++ side directly.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bind_linear.h"
#include "isa.h"
#include "linear.h"
#include "sampler.h"
#include "shared_team.h"
#include "team.h"

namespace nb = nanobind;

namespace tenure {
namespace {

using Any2 = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Halves2 = nb::ndarray<const uint16_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats1 = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats2 = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Masks = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using MutableFloats2 = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T, class... Shape>
auto new_array(Shape... shape) {
    const std::size_t sizes[] = {static_cast<std::size_t>(shape)...};
    std::size_t count = 1;
    for (const std::size_t size : sizes) count *= size;
    T* data = new T[count]();
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return nb::ndarray<nb::numpy, T>(data, sizeof...(Shape), sizes, owner);
}

// Takes its turn on the process's team of that size, without the interpreter's lock; keeps the team alive in `kept`, as
// starting threads for every call would cost more than the call.
template <class Work>
void with_team(int threads, std::shared_ptr<SharedTeam>& kept, Work&& work) {
    if (threads < 0 || threads > 1024) throw std::invalid_argument("threads must be between 0 and 1024");
    kept = shared_team(threads);
    const std::shared_ptr<SharedTeam> held = kept;
    const nb::gil_scoped_release release;
    const std::lock_guard turn(held->turn);
    work(held->team);
}

void check_dtype(Format format, const Any2& w) {
    const nb::dlpack::dtype wanted[] = {nb::dtype<float>(), nb::dtype<uint16_t>(), nb::dtype<int8_t>(),
                                        nb::dtype<uint8_t>()};
    constexpr const char* names[] = {"float32", "uint16 (bf16 bits)", "int8", "uint8 (one 4-bit value per byte)"};
    const int at = static_cast<int>(format);
    if (w.dtype() != wanted[at]) throw std::invalid_argument(std::string("w must be ") + names[at]);
}

const uint16_t* check_scales(const char* name, const std::optional<Halves2>& scales, const Any2& w) {
    if (!scales) return nullptr;
    if (scales->shape(0) != w.shape(0) || scales->shape(1) * kGroup != w.shape(1)) {
        throw std::invalid_argument(std::string(name) + " must have shape [n, k / 32]");
    }
    return scales->data();
}

}  // namespace

Linear pack_arrays(const std::string& format, const Any2& w, const std::optional<Halves2>& scale,
                   const std::optional<Halves2>& min) {
    const Format chosen = format_named(format);
    check_dtype(chosen, w);
    constexpr std::size_t kMost = std::size_t{1} << 30;
    if (w.shape(0) > kMost || w.shape(1) > kMost) throw std::invalid_argument("w is too large");
    const uint16_t* scales = check_scales("scale", scale, w);
    const uint16_t* mins = check_scales("min", min, w);
    // Other threads decode the next matrix meanwhile; the caller holds the arrays.
    const nb::gil_scoped_release release;
    return pack(chosen, static_cast<int>(w.shape(0)), static_cast<int>(w.shape(1)), w.data(), scales, mins);
}

namespace {

struct PyLinear {
    Linear w;
    std::shared_ptr<SharedTeam> team;
};

void forward_into(PyLinear& self, const Floats2& x, MutableFloats2& y, int threads, const std::string& isa_name,
                  const std::optional<Floats1>& bias, bool accumulate, bool fine) {
    const std::size_t n = self.w.n, k = self.w.k;
    if (x.shape(1) != k) throw std::invalid_argument("x must have shape [m, k]");
    if (y.shape(0) != x.shape(0) || y.shape(1) != n) throw std::invalid_argument("y must have shape [m, n]");
    if (bias && bias->shape(0) != n) throw std::invalid_argument("bias must have shape [n]");
    if (x.shape(0) > (1u << 24)) throw std::invalid_argument("x has too many rows");
    const Isa& chosen = isa_name.empty() ? isa() : isa_named(isa_name);
    const LinearCall call{x.data(), int64_t(k),  y.data(), int64_t(n), int(x.shape(0)), bias ? bias->data() : nullptr,
                          accumulate, fine};
    Scratch scratch;
    with_team(threads, self.team, [&](Team& team) { linear(self.w, call, scratch, team, chosen); });
}

void bind_linear_class(nb::module_& m) {
    nb::class_<PyLinear>(m, "Linear", "Packed weights of one linear layer, y = x Wᵀ.")
        .def("__init__",
             [](PyLinear* self, const std::string& format, const Any2& w, std::optional<Halves2> scale,
                std::optional<Halves2> min) { new (self) PyLinear{pack_arrays(format, w, scale, min), {}}; },
             nb::arg("format"), nb::arg("w"), nb::arg("scale") = nb::none(), nb::arg("min") = nb::none(),
             "Packs w [n, k]: float32 (f32), uint16 bits (bf16), int8 (int8) or uint8 (int4); scale and min are f16 "
             "bits as uint16 [n, k / 32].")
        .def_prop_ro("shape", [](const PyLinear& self) { return nb::make_tuple(self.w.n, self.w.k); })
        .def_prop_ro("nbytes", [](const PyLinear& self) { return self.w.bytes(); }, "Packed bytes.")
        .def("dequantise",
             [](const PyLinear& self) {
                 auto out = new_array<float>(self.w.n, self.w.k);
                 unpack(self.w, out.data());
                 return out;
             },
             "The weights as float32 [n, k].")
        .def("forward",
             [](PyLinear& self, const Floats2& x, int threads, const std::string& isa, std::optional<Floats1> bias,
                bool fine) {
                 auto out = new_array<float>(x.shape(0), self.w.n);
                 MutableFloats2 y(out.data(), {x.shape(0), std::size_t(self.w.n)}, nb::handle());
                 forward_into(self, x, y, threads, isa, bias, false, fine);
                 return out;
             },
             nb::arg("x"), nb::arg("threads") = 1, nb::arg("isa") = "", nb::arg("bias") = nb::none(),
             nb::arg("fine") = false,
             "x [m, k] float32 -> y [m, n]; threads 0 = all cores, isa \"\" = the process's own. fine: int8 and int4 take "
             "x in 15 bits instead of 8.")
        .def("forward_into", &forward_into, nb::arg("x"), nb::arg("y"), nb::arg("threads") = 1, nb::arg("isa") = "",
             nb::arg("bias") = nb::none(), nb::arg("accumulate") = false, nb::arg("fine") = false,
             "Writes y [m, n] in place, or adds to it.");
}

template <class T>
void check_rows(const char* name, const Vector<T>& values, std::size_t rows) {
    if (values.shape(0) != rows) throw std::invalid_argument(std::string(name) + " must have one value per row");
}

void set_min_p(std::vector<SampleParams>& params, const Vector<float>& min_p) {
    check_rows("min_p", min_p, params.size());
    for (std::size_t r = 0; r < params.size(); ++r) {
        if (!(min_p(r) >= 0 && min_p(r) <= 1)) throw std::invalid_argument("min_p must be in [0, 1]");
        params[r].min_p = min_p(r);
    }
}

void set_masks(std::vector<SampleParams>& params, const Masks& masks, const Vector<int32_t>& mask_of, std::size_t vocab) {
    check_rows("mask_of", mask_of, params.size());
    if (masks.shape(1) != (vocab + 31) / 32) throw std::invalid_argument("masks must have a bit for each token");
    for (std::size_t r = 0; r < params.size(); ++r) {
        const int32_t at = mask_of(r);
        if (at < -1 || at >= int64_t(masks.shape(0))) throw std::invalid_argument("mask_of must be -1 or a row of masks");
        if (at >= 0) params[r].allowed = reinterpret_cast<const uint32_t*>(masks.data()) + at * masks.shape(1);
    }
}

auto sample_rows(const Floats2& logits, const Vector<float>& temperature, const Vector<float>& top_p,
                 const Vector<int32_t>& top_k, const Vector<uint64_t>& seed, const Vector<uint32_t>& position,
                 const Vector<uint32_t>& stream, int threads, const std::optional<Vector<float>>& min_p,
                 const std::optional<Masks>& masks, const std::optional<Vector<int32_t>>& mask_of) {
    const std::size_t rows = logits.shape(0);
    check_rows("temperature", temperature, rows);
    check_rows("top_p", top_p, rows);
    check_rows("top_k", top_k, rows);
    check_rows("seed", seed, rows);
    check_rows("position", position, rows);
    check_rows("stream", stream, rows);
    if (logits.shape(1) == 0) throw std::invalid_argument("logits must not be empty");
    std::vector<SampleParams> params(rows);
    for (std::size_t r = 0; r < rows; ++r) {
        params[r] = {temperature(r), top_p(r), top_k(r), seed(r), position(r), stream(r)};
        if (!(temperature(r) >= 0)) throw std::invalid_argument("temperature must be >= 0");
        if (!(top_p(r) > 0 && top_p(r) <= 1)) throw std::invalid_argument("top_p must be in (0, 1]");
    }
    if (min_p) set_min_p(params, *min_p);
    if (masks.has_value() != mask_of.has_value()) throw std::invalid_argument("masks need mask_of, and mask_of masks");
    if (masks) set_masks(params, *masks, *mask_of, logits.shape(1));
    auto out = new_array<int32_t>(rows);
    std::shared_ptr<SharedTeam> team_of_call;
    with_team(threads, team_of_call, [&](Team& team) {
        sample(logits.data(), int(logits.shape(1)), params.data(), int(rows), out.data(), team);
    });
    return out;
}

// Runs many small regions whose closures die at once, and counts: every item exactly once, or std::runtime_error.
void exercise_team(int threads, int regions, int fail_at) {
    const nb::gil_scoped_release release;
    Team team(threads);
    for (int region = 0; region < regions; ++region) {
        const int items = 1 + region % 37;
        std::vector<int> counts(items, 0);
        std::atomic<int> strangers{0};
        team.run(items, [&, stamp = region](int item, int thread) {
            if (thread < 0 || thread >= team.threads() || stamp != region) ++strangers;
            ++counts[item];
            if (region == fail_at && item == items / 2) throw std::domain_error("item failed as asked");
        });
        for (const int count : counts) strangers += count != 1;
        if (strangers != 0) throw std::runtime_error("a region ran an item twice, never, or for a stranger");
    }
}

void exercise_nesting(int threads) {
    Team team(threads);
    team.run(2, [&](int, int) { team.run(2, [](int, int) {}); });
}

}  // namespace

void bind_linear(nb::module_& m) {
    m.def("isa", [] { return std::string(isa().name); }, "The instruction set in use.");
    m.def("isas", &isas, "Instruction sets supported here, ascending.");
    m.def("cpu_features", &cpu_features, "Processor features that matter to the kernels.");
    m.def("cores", &Team::cores, "Cores this process may run on.");
    bind_linear_class(m);
    m.def("sample", &sample_rows, nb::arg("logits"), nb::arg("temperature"), nb::arg("top_p"), nb::arg("top_k"),
          nb::arg("seed"), nb::arg("position"), nb::arg("stream"), nb::arg("threads") = 1,
          nb::arg("min_p") = nb::none(), nb::arg("masks") = nb::none(), nb::arg("mask_of") = nb::none(),
          "One token id per row of logits [rows, vocab] as int32; -1 for a row that holds NaN or +inf. `mask_of` [rows] "
          "names each row's row of `masks` [.., ceil(vocab / 32)], a bit for each token that may be chosen; -1: all may.");
    m.def("philox4x32",
          [](const Vector<uint32_t>& counter, const Vector<uint32_t>& key) {
              if (counter.shape(0) != 4 || key.shape(0) != 2) throw std::invalid_argument("counter[4] and key[2]");
              auto out = new_array<uint32_t>(4);
              philox4x32(counter.data(), key.data(), out.data());
              return out;
          },
          nb::arg("counter"), nb::arg("key"), "Philox4x32-10, for tests against published vectors.");
    m.def("exercise_team", &exercise_team, nb::arg("threads"), nb::arg("regions"), nb::arg("fail_at") = -1,
          "Stress test of the thread team.");
    m.def("exercise_nesting", &exercise_nesting, nb::arg("threads"), "A nested region: raises.");
}

}  // namespace tenure
