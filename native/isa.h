// Instruction sets: which ones this machine has, and which one the process uses.
#pragma once

#include <string>
#include <vector>

namespace tenure {

// Ascending: a level includes everything below it. `avx2` needs avx2+fma+f16c; `avx512` needs f, bw, vl, dq,
// vnni and bf16 (Zen 4 and later, Cooper Lake / Sapphire Rapids and later).
enum class IsaLevel : int { portable = 0, avx2 = 1, avx512 = 2 };

// Kernel tables are kept by each kernel family (linear_kernels(isa), attention_kernels(isa), …); an Isa is only the name
// of a row in them, so the families stay strangers to each other.
struct Isa {
    IsaLevel level;
    const char* name;
};

// Picks a table row: one of three per-ISA tables.
template <class Table>
const Table& choose(const Isa& isa, const Table& portable, const Table& avx2, const Table& avx512) {
    if (isa.level == IsaLevel::avx512) return avx512;
    return isa.level == IsaLevel::avx2 ? avx2 : portable;
}

// The instruction set of this process: TENURE_ISA when set, else the best one supported. Chosen once.
// Throws std::invalid_argument when TENURE_ISA is unknown or not supported here.
const Isa& isa();

// By name ("portable", "avx2", "avx512"); throws std::invalid_argument when unknown or not supported here.
const Isa& isa_named(const std::string& name);

// Every supported instruction set, ascending.
std::vector<std::string> isas();

// The processor features that matter to the kernels and are present, by their Linux names.
std::vector<std::string> cpu_features();

}  // namespace tenure
