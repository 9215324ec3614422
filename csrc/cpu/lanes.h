// Walking over an array of any length in vectors of sixteen lanes, and loads and stores that fit
// its element type.
//
// Owns: the treatment of the last, partial vector. Does not know any kernel. Invariant: memory
// outside the n lanes of a partial vector is not touched, and its other lanes read as +0.
#pragma once

#include <cstdint>

#include "cpu/vec.h"

namespace tlt::TLT_ISA {

struct Full {};  // all sixteen lanes

static inline V16 load_n(const float* p, Full) { return load(p); }
static inline V16 load_n(const uint16_t* p, Full) { return load_bf16(p); }
static inline V16 load_n(const uint16_t* p, int64_t n) { return load_bf16_n(p, n); }
static inline I16 load_i_n(const int32_t* p, Full) { return load_i(p); }
static inline void store_n(float* p, V16 a, Full) { store(p, a); }
static inline void store_n(uint16_t* p, V16 a, Full) { store_bf16(p, a); }
static inline void store_n(uint16_t* p, V16 a, int64_t n) { store_bf16_n(p, a, n); }

// f(i, lanes) for i = 0, 16, 32, ... below `count`; lanes is Full or, for the last one, how many
// are left.
template <class F>
static inline void for_lanes(int64_t count, F f) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) f(i, Full{});
    if (i < count) f(i, count - i);
}

// Sum where f(i, lanes, sum) returns sum plus its terms, in a fixed order that depends on `count`
// alone: four vectors of partial sums, then their tree.
template <class F>
static inline float lane_sum(int64_t count, F f) {
    V16 sums[4] = {zero(), zero(), zero(), zero()};
    int64_t i = 0;
    for (; i + 64 <= count; i += 64) {
        for (int j = 0; j < 4; j++) sums[j] = f(i + 16 * j, Full{}, sums[j]);
    }
    for (int j = 0; i < count; i += 16, j++) {
        sums[j] = i + 16 <= count ? f(i, Full{}, sums[j]) : f(i, count - i, sums[j]);
    }
    return hsum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

}  // namespace tlt::TLT_ISA
