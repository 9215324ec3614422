// rms_norm and add_rms_norm.
//
// Owns: the order in which a row's squares are summed (lane_sum). Does not know other rows.
// Invariant: a row's result depends on that row, the weight and eps alone.
#include "cpu/kernels.h"
#include "cpu/lanes.h"
#include "cpu/parallel.h"
#include "cpu/rms.h"

namespace tlt::TLT_ISA {
namespace {

void norm_row(const float* x, const float* weight, float scale, int64_t width, float* out) {
    const V16 s = splat(scale);
    for_lanes(width, [&](int64_t i, auto n) {
        store_n(out + i, load_n(x + i, n) * s * load_n(weight + i, n), n);
    });
}

}  // namespace

void rms_norm(const RmsNormArgs& a) {
    parallel_ranges(a.num_rows, a.width, a.num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            const float* x = a.x + r * a.width;
            norm_row(x, a.weight, rms_scale(x, a.width, a.eps), a.width, a.out + r * a.width);
        }
    });
}

void add_rms_norm(const AddRmsNormArgs& a) {
    parallel_ranges(a.num_rows, 2 * a.width, a.num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            const float* x = a.x + r * a.width;
            float* residual = a.residual + r * a.width;
            for_lanes(a.width, [&](int64_t i, auto n) {
                store_n(residual + i, load_n(residual + i, n) + load_n(x + i, n), n);
            });
            const float scale = rms_scale(residual, a.width, a.eps);
            norm_row(residual, a.weight, scale, a.width, a.out + r * a.width);
        }
    });
}

}  // namespace tlt::TLT_ISA
