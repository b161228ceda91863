#include "isa.h"

#include <cstdlib>
#include <stdexcept>
#include <utility>

namespace tenure {
namespace {

constexpr Isa kIsas[] = {{IsaLevel::portable, "portable"}, {IsaLevel::avx2, "avx2"}, {IsaLevel::avx512, "avx512"}};

#if defined(__x86_64__)
// __builtin_cpu_supports also asks whether the operating system saves the registers.
#define TENURE_FEATURE(name) {name, __builtin_cpu_supports(name) != 0}

std::vector<std::pair<const char*, bool>> probe() {
    __builtin_cpu_init();
    return {TENURE_FEATURE("sse4.2"),   TENURE_FEATURE("avx"),        TENURE_FEATURE("f16c"),
            TENURE_FEATURE("fma"),      TENURE_FEATURE("avx2"),       TENURE_FEATURE("avx512f"),
            TENURE_FEATURE("avx512bw"), TENURE_FEATURE("avx512vl"),   TENURE_FEATURE("avx512dq"),
            TENURE_FEATURE("avx512vbmi"), TENURE_FEATURE("avx512vnni"), TENURE_FEATURE("avx512bf16")};
}
#undef TENURE_FEATURE
#else
std::vector<std::pair<const char*, bool>> probe() { return {}; }
#endif

bool has(std::initializer_list<const char*> wanted) {
    static const auto features = probe();
    for (const char* name : wanted) {
        bool found = false;
        for (const auto& [feature, present] : features) found |= present && std::string(name) == feature;
        if (!found) return false;
    }
    return true;
}

bool supported(IsaLevel level) {
    if (level == IsaLevel::portable) return true;
    if (!has({"avx2", "fma", "f16c"})) return false;
    return level == IsaLevel::avx2 ||
           has({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "avx512bf16"});
}

const Isa& best() {
    if (supported(IsaLevel::avx512)) return kIsas[2];
    return supported(IsaLevel::avx2) ? kIsas[1] : kIsas[0];
}

const Isa& from_environment() {
    const char* forced = std::getenv("TENURE_ISA");
    if (forced == nullptr || *forced == '\0') return best();
    try {
        return isa_named(forced);
    } catch (const std::invalid_argument& error) {
        throw std::invalid_argument(std::string("TENURE_ISA: ") + error.what());
    }
}

}  // namespace

const Isa& isa() {
    static const Isa& chosen = from_environment();
    return chosen;
}

const Isa& isa_named(const std::string& name) {
    for (const Isa& candidate : kIsas) {
        if (name != candidate.name) continue;
        if (supported(candidate.level)) return candidate;
        throw std::invalid_argument("instruction set '" + name + "' is not supported by this processor");
    }
    throw std::invalid_argument("unknown instruction set '" + name + "' (portable, avx2 or avx512)");
}

std::vector<std::string> isas() {
    std::vector<std::string> names;
    for (const Isa& candidate : kIsas) {
        if (supported(candidate.level)) names.emplace_back(candidate.name);
    }
    return names;
}

std::vector<std::string> cpu_features() {
    std::vector<std::string> names;
    for (const auto& [feature, present] : probe()) {
        if (present) names.emplace_back(feature);
    }
    return names;
}

}  // namespace tenure
