// embedding and silu_mul.
//
// Owns: nothing but these loops. Invariant: an output element depends on its own inputs alone.
#include "cpu/kernels.h"
#include "cpu/lanes.h"
#include "cpu/parallel.h"

namespace tlt::TLT_ISA {
namespace {

template <class T>
void embed_rows(const EmbeddingArgs& a, const T* table, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
        const T* from = table + static_cast<int64_t>(a.ids[r]) * a.width;
        float* to = a.out + r * a.width;
        for_lanes(a.width, [&](int64_t i, auto n) { store_n(to + i, load_n(from + i, n), n); });
    }
}

}  // namespace

void embedding(const EmbeddingArgs& a) {
    parallel_ranges(a.num_rows, a.width / 2, a.num_threads, [&](int64_t begin, int64_t end) {
        if (a.table_dtype == Dtype::bf16) {
            embed_rows(a, static_cast<const uint16_t*>(a.table), begin, end);
        } else {
            embed_rows(a, static_cast<const float*>(a.table), begin, end);
        }
    });
}

void silu_mul(const SiluMulArgs& a) {
    const V16 one = splat(1.0f);
    parallel_ranges(a.num_rows, 4 * a.width, a.num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            const float* gate = a.gate_up + r * 2 * a.width;
            const float* up = gate + a.width;
            float* out = a.out + r * a.width;
            for_lanes(a.width, [&](int64_t i, auto n) {
                const V16 g = load_n(gate + i, n);
                store_n(out + i, g / (one + exp(neg(g))) * load_n(up + i, n), n);
            });
        }
    });
}

}  // namespace tlt::TLT_ISA
