// See ceiling.h.
#include "bindings/ceiling.h"

#include <stdexcept>

#include "common/tensor.h"
#include "cpu/dispatch.h"

namespace nb = nanobind;

namespace tlt {

double ceiling_work(const std::string& isa, const std::string& kind, int num_threads, int64_t count,
                    nb::handle buffer) {
    const KernelTable& table = kernel_table(isa);
    if (num_threads < 1 || num_threads > 1024 || count < 0) {
        throw std::invalid_argument("ceiling: num_threads must be in 1..1024, count at least 0");
    }
    double out[2] = {0.0, 0.0};
    CeilingArgs args{nullptr, count, out, num_threads};
    void (*run)(const CeilingArgs&) = nullptr;
    if (kind == "read") {
        const Tensor data = take(buffer, {"ceiling", "buffer"}, Element::i32, {kAny});
        args.data = data.data;
        args.count = data.shape[0] * 4;
        run = table.read_ceiling;
    } else if (kind == "fma") {
        run = table.fma_ceiling;
    } else if (kind == "bf16_dot") {
        run = table.bf16_dot_ceiling;
    }
    if (run == nullptr) {
        throw std::invalid_argument("ceiling: " + isa + " has no " + kind);
    }
    run(args);
    return out[0];
}

}  // namespace tlt
