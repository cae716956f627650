// Chooses the instruction set once per process.
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "grace/loops.h"

namespace grace {

#define GRACE_TABLES(isa)                        \
    extern const Loops<float> float_loops_##isa;   \
    extern const Loops<double> double_loops_##isa; \
    extern const IntegerLoops integer_loops_##isa;
GRACE_TABLES(baseline)
#if defined(__x86_64__)
GRACE_TABLES(avx2)
GRACE_TABLES(avx512)
#endif

namespace {

struct Tables {
    int index;
    const char* name;
    const Loops<float>* of_float;
    const Loops<double>* of_double;
    const IntegerLoops* of_integers;
};

#define GRACE_ROW(index, isa) \
    { index, #isa, &float_loops_##isa, &double_loops_##isa, &integer_loops_##isa }

#if defined(__x86_64__)
// Conversions to and from float16 have their own CPU flag, which a virtual machine may hide.
bool has_f16c() {
    // Not all compilers support its name in __builtin_cpu_supports.
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

Tables choose() {
    const char* wanted = std::getenv("GRACE_ISA");
    const auto fits = [&](const char* name) { return wanted == nullptr || std::strcmp(wanted, name) == 0; };
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
                      __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt") && has_f16c();
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512 && fits("avx512")) return GRACE_ROW(2, avx512);
    if (avx2 && (fits("avx2") || fits("avx512"))) return GRACE_ROW(1, avx2);
#endif
    return GRACE_ROW(0, baseline);
}

const Tables& tables() {
    static const Tables chosen = choose();
    return chosen;
}

}  // namespace

template <> const Loops<float>& loops<float>() { return *tables().of_float; }
template <> const Loops<double>& loops<double>() { return *tables().of_double; }
const IntegerLoops& integer_loops() { return *tables().of_integers; }
const char* isa() { return tables().name; }
int isa_index() { return tables().index; }

}  // namespace grace
