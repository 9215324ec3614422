// The Python module engine.ops._native. Owns: names and signatures of what Python sees. Does not
// know: checks (cpu_ops) or kernels. Invariant: argument names are those of ReferenceOps.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/batch.h"
#include "bindings/ceiling.h"
#include "bindings/cpu_ops.h"
#include "common/tensor.h"

namespace nb = nanobind;
using namespace nb::literals;
using tlt::CpuOps;
using tlt::PackedLinear;

NB_MODULE(_native, m) {
    tlt::init_batch_names();
    m.def("init_tensors", &tlt::init_tensors, "tensor_type"_a, "elements"_a, "want_exchange"_a,
          "Tell the module what torch.Tensor is; true if torch's exchange API is in use.");
    m.def("usable_isas", &tlt::usable_isas, "Instruction sets compiled in and usable here.");

    m.def("ceiling_work", &tlt::ceiling_work, "isa"_a, "kind"_a, "num_threads"_a, "count"_a,
          "buffer"_a.none(), "Run one measuring loop; the bytes or FLOPs that it did.");

    nb::class_<PackedLinear>(m, "PackedLinear", "A weight [N, K] packed for linear.")
        .def_prop_ro("shape",
                     [](const PackedLinear& w) { return nb::make_tuple(w.view().n, w.view().k); })
        .def_prop_ro("num_bytes", &PackedLinear::bytes);

    nb::class_<CpuOps>(m, "CpuOps", "ReferenceOps for one instruction set and thread count.")
        .def(nb::init<const std::string&, int>(), "isa"_a, "num_threads"_a)
        .def_prop_ro("isa", &CpuOps::isa)
        .def_prop_ro("num_threads", &CpuOps::num_threads)
        .def("pack_linear", &CpuOps::pack_linear, "weight"_a, "bias"_a.none() = nb::none(),
             nb::rv_policy::take_ownership)
        .def("linear", &CpuOps::linear, "x"_a, "weight"_a, "out"_a)
        .def("embedding", &CpuOps::embedding, "ids"_a, "table"_a, "out"_a)
        .def("rms_norm", &CpuOps::rms_norm, "x"_a, "weight"_a, "eps"_a, "out"_a)
        .def("add_rms_norm", &CpuOps::add_rms_norm, "x"_a, "residual"_a, "weight"_a, "eps"_a,
             "out"_a)
        .def("silu_mul", &CpuOps::silu_mul, "gate_up"_a, "out"_a)
        .def("rope_store", &CpuOps::rope_store, "qkv"_a, "batch"_a, "cos"_a, "sin"_a,
             "q_norm"_a.none(), "k_norm"_a.none(), "eps"_a, "k_cache"_a, "v_cache"_a, "q_out"_a)
        .def("attention", &CpuOps::attention, "q"_a, "k_cache"_a, "v_cache"_a, "batch"_a, "scale"_a,
             "window"_a, "out"_a)
        .def("kv_move", &CpuOps::kv_move, "kv_cache"_a, "source"_a, "target"_a)
        .def("log_sum_exp", &CpuOps::log_sum_exp, "logits"_a, "out"_a)
        .def("sample", &CpuOps::sample, "logits"_a, "temperature"_a, "top_k"_a, "top_p"_a,
             "min_p"_a, "seeds"_a, "positions"_a, "token_ids"_a, "logprobs"_a, "prune"_a = true)
        .def("coupled_top_k", &CpuOps::coupled_top_k, "logits"_a, "temperature"_a, "top_k"_a,
             "top_p"_a, "min_p"_a, "seeds"_a, "positions"_a, "target_ids"_a.none(), "token_ids"_a,
             "scores"_a, "logprobs"_a, "prune"_a = true)
        .def("philox_words", &CpuOps::philox_words, "counters"_a, "keys"_a, "out"_a)
        .def("philox_uniform", &CpuOps::philox_uniform, "seed"_a, "position"_a, "out"_a);
}
