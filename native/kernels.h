// Which of the per-ISA tables exist in this build: only x86-64 has more than the portable one.
#pragma once

#include "isa.h"

#if defined(__x86_64__)
#define TENURE_CHOOSE(isa, table) choose(isa, portable::table, avx2::table, avx512::table)
#else
#define TENURE_CHOOSE(isa, table) choose(isa, portable::table, portable::table, portable::table)
#endif
