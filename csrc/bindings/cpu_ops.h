// The ops of one instruction set and thread count, as Python calls them.
//
// Owns: checking arguments and handing them to the kernel table. Does not know: how kernels work.
// Invariant: a kernel is called only with arguments that agree with each other; every index that a
// kernel will follow into memory was compared with its bound. The GIL is held throughout: calls are
// short, and giving it up 270 times a step would let other threads hold a step for their 5 ms
// switch interval.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "cpu/dispatch.h"
#include "cpu/linear_pack.h"

namespace tlt {

class CpuOps {
  public:
    using H = nanobind::handle;

    CpuOps(const std::string& isa, int num_threads);

    const char* isa() const { return table_.isa; }
    int num_threads() const { return num_threads_; }

    // Each as ReferenceOps in engine/ops/reference.py.
    PackedLinear* pack_linear(H weight, H bias) const;
    void linear(H x, const PackedLinear& weight, H out) const;
    void embedding(H ids, H table, H out) const;
    void rms_norm(H x, H weight, float eps, H out) const;
    void add_rms_norm(H x, H residual, H weight, float eps, H out) const;
    void silu_mul(H gate_up, H out) const;
    void rope_store(H qkv, H batch, H cos, H sin, H q_norm, H k_norm, float eps, H k_cache,
                    H v_cache, H q_out) const;
    void attention(H q, H k_cache, H v_cache, H batch, float scale, int window, H out) const;
    void kv_move(H kv_cache, H source, H target) const;
    void log_sum_exp(H logits, H out) const;
    void sample(H logits, H temperature, H top_k, H top_p, H min_p, H seeds, H positions,
                H token_ids, H logprobs, bool prune) const;
    void coupled_top_k(H logits, H temperature, H top_k, H top_p, H min_p, H seeds, H positions,
                       H target_ids, H token_ids, H scores, H logprobs, bool prune) const;

    // The noise that sample draws, for tests: words of a counter-based generator, and `uniform` of
    // reference.py.
    void philox_words(H counters, H keys, H out) const;
    void philox_uniform(int64_t seed, int position, H out) const;

  private:
    const KernelTable& table_;
    int num_threads_;
};

}  // namespace tlt
