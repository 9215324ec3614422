// log_sum_exp of rows of logits.
//
// Owns: nothing but the loop; token_row.h has the arithmetic. Invariant: a row's result depends on
// that row alone.
#include "common/scratch.h"
#include "cpu/kernels.h"
#include "cpu/token_row.h"

namespace tlt::TLT_ISA {

void log_sum_exp(const LogSumExpArgs& a) {
    for_each_row(a.num_rows, a.vocab, a.num_threads, [&](int64_t r, int threads) {
        auto* memory = static_cast<float*>(
            scratch(Scratch::sample,
                    static_cast<size_t>(TokenRow::scratch_floats(a.vocab)) * sizeof(float)));
        TokenRow row{a.logits + r * a.vocab, memory, nullptr, a.vocab};
        row.segment_sum = memory + row.blocks();
        parallel_tasks(row.segments(), threads, [&](int64_t s) { find_block_max(row, s); });
        a.out[r] = log_sum(row, row_max(row), Cut{}, threads);
    });
}

}  // namespace tlt::TLT_ISA
