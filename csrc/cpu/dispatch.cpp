// See dispatch.h. Compiled once, for the baseline instruction set.
#include "cpu/dispatch.h"

#include <stdexcept>

namespace tlt {

#if defined(__x86_64__)
namespace avx2 {
extern const KernelTable table;
}
namespace avx512 {
extern const KernelTable table;
}
namespace avx512bf16 {
extern const KernelTable table;
}
#endif
namespace scalar {
extern const KernelTable table;
}

namespace {

struct Isa {
    std::string_view name;
    const KernelTable* table;
    bool (*machine_has)();
};

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif
bool always() { return true; }

// Worst first: "auto" is the last one that the machine has, and this list is the one place that
// says so. All give the same bits but avx512bf16, which rounds the activations of a bf16 weight to
// bf16 and is twice as fast for it; it comes last because every other engine for bf16 weights
// rounds them too. A neon entry belongs behind scalar.
const Isa kIsas[] = {
    {"scalar", &scalar::table, always},
#if defined(__x86_64__)
    {"avx2", &avx2::table, has_avx2},
    {"avx512", &avx512::table, has_avx512},
    {"avx512bf16", &avx512bf16::table, has_avx512bf16},
#endif
};

std::string joined(const std::vector<std::string>& names) {
    std::string text;
    for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
    return text;
}

}  // namespace

std::vector<std::string> usable_isas() {
    std::vector<std::string> names;
    for (const Isa& isa : kIsas) {
        if (isa.machine_has()) names.emplace_back(isa.name);
    }
    return names;
}

const KernelTable& kernel_table(std::string_view name) {
    const KernelTable* best = nullptr;
    for (const Isa& isa : kIsas) {
        if (name == isa.name && !isa.machine_has()) {
            throw std::invalid_argument("isa: this machine lacks " + std::string(name) +
                                        "; usable here: " + joined(usable_isas()));
        }
        if (name == isa.name) return *isa.table;
        if (isa.machine_has()) best = isa.table;
    }
    if (name != "auto") {
        throw std::invalid_argument("isa: expected auto or one of " + joined(usable_isas()) +
                                    ", got " + std::string(name));
    }
    return *best;
}

}  // namespace tlt
