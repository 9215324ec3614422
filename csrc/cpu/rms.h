// The scale of a root-mean-square norm, shared by the norms of rows and of heads.
//
// Owns: its arithmetic. Does not know whose row it is. Invariant: the same values give the same
// bits.
#pragma once

#include <cstdint>

#include "cpu/lanes.h"

namespace tlt::TLT_ISA {

// 1 / sqrt(mean of squares + eps)
static inline float rms_scale(const float* x, int64_t count, float eps) {
    const float squares = lane_sum(count, [&](int64_t i, auto n, V16 sum) {
        const V16 v = load_n(x + i, n);
        return fma(v, v, sum);
    });
    const float mean = squares / static_cast<float>(count);
    return 1.0f / __builtin_sqrtf(mean + eps);
}

}  // namespace tlt::TLT_ISA
