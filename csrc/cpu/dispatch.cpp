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
    // Chosen by "auto"? avx512bf16 rounds activations to bf16, so it gives other bits than all the others and
    // is taken only by name. This list is the one place that decides.
    bool automatic;
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

const Isa kIsas[] = {
    // worst first; a neon entry belongs between scalar and the end of the list on aarch64
    {"scalar", &scalar::table, always, true},
#if defined(__x86_64__)
    {"avx2", &avx2::table, has_avx2, true},
    {"avx512", &avx512::table, has_avx512, true},
    {"avx512bf16", &avx512bf16::table, has_avx512bf16, false},
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
        if (isa.automatic && isa.machine_has()) best = isa.table;
    }
    if (name != "auto") {
        throw std::invalid_argument("isa: expected auto or one of " + joined(usable_isas()) +
                                    ", got " + std::string(name));
    }
    return *best;
}

}  // namespace tlt
