// A row of logits, walked in blocks of 64 tokens and segments of 4096: maxima, and sums of
// exponentials.
//
// Owns: the order of the sums. Does not know sampling. Invariant: a segment's sum is made of four
// vectors of partial sums, and segments are added in order, so that a row gives the same bits on
// one thread or on many.
#pragma once

#include <cstdint>

#include "cpu/lanes.h"
#include "cpu/parallel.h"
#include "cpu/vec.h"

namespace tlt::TLT_ISA {

inline constexpr int64_t kTokenBlock = 64, kTokenSegment = 4096;
inline constexpr float kInf = __builtin_inff();

// What may be sampled: tokens above `value`, and those equal to it up to `id`. Never -inf.
struct Cut {
    float value = -3.40282347e38f;
    int32_t id = INT32_MAX;
    bool everything() const { return value == -3.40282347e38f; }
};

struct TokenRow {
    const float* values;  // [vocab]
    float* block_max;     // [blocks]; -inf where all are -inf or NaN
    float* segment_sum;   // [segments]
    int64_t vocab;

    int64_t blocks() const { return (vocab + kTokenBlock - 1) / kTokenBlock; }
    int64_t segments() const { return (vocab + kTokenSegment - 1) / kTokenSegment; }
    int64_t first_block(int64_t segment) const { return segment * (kTokenSegment / kTokenBlock); }
    int64_t last_block(int64_t segment) const {
        const int64_t end = first_block(segment + 1);
        return end < blocks() ? end : blocks();
    }
    // The row's floats of scratch memory.
    static int64_t scratch_floats(int64_t vocab) {
        return vocab / kTokenBlock + vocab / kTokenSegment + 2;
    }
};

// Four vectors; lanes past the vocabulary are -inf.
static inline void load_block(const float* values, int64_t vocab, int64_t block, V16 x[4]) {
    const int64_t begin = block * kTokenBlock;
    for (int i = 0; i < 4; i++) {
        const int64_t at = begin + 16 * i, left = vocab - at;
        if (left >= 16) {
            x[i] = load(values + at);
        } else if (left <= 0) {
            x[i] = splat(-kInf);
        } else {
            const M16 inside = lt_i(iota(), splat_i(static_cast<int32_t>(left)));
            x[i] = select(inside, load_n(values + at, left), splat(-kInf));
        }
    }
}

// Largest of the four vectors, NaN left aside.
static inline float largest(const V16 x[4]) {
    V16 top = splat(-kInf);
    for (int i = 0; i < 4; i++) top = max(x[i], top);
    return hmax(top);
}

static inline M16 kept(const Cut& cut, V16 x, int64_t first_id) {
    const I16 ids = iota() + splat_i(static_cast<int32_t>(first_id));
    const V16 value = splat(cut.value);
    return (x > value) | ((x == value) & ~lt_i(splat_i(cut.id), ids));
}

static inline float row_max(const TokenRow& row) {
    float top = -kInf;
    for (int64_t b = 0; b < row.blocks(); b++)
        top = row.block_max[b] > top ? row.block_max[b] : top;
    return top;
}

static inline void find_block_max(const TokenRow& row, int64_t segment) {
    for (int64_t b = row.first_block(segment); b < row.last_block(segment); b++) {
        V16 x[4];
        load_block(row.values, row.vocab, b, x);
        row.block_max[b] = largest(x);
    }
}

// Sum of exp(x - top) over the kept tokens of a segment.
template <bool cuts>
static inline float segment_sum(const TokenRow& row, int64_t segment, float top, const Cut& cut) {
    V16 sums[4] = {zero(), zero(), zero(), zero()};
    for (int64_t b = row.first_block(segment); b < row.last_block(segment); b++) {
        if (cuts && row.block_max[b] < cut.value) continue;
        V16 x[4];
        load_block(row.values, row.vocab, b, x);
        for (int i = 0; i < 4; i++) {
            V16 e = exp(x[i] - splat(top));
            if (cuts) e = select(kept(cut, x[i], b * kTokenBlock + 16 * i), e, zero());
            sums[i] = sums[i] + e;
        }
    }
    return hsum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// log of the sum of exp(x) over the kept tokens; `top` is the row's maximum.
static inline float log_sum(const TokenRow& row, float top, const Cut& cut, int num_threads) {
    if (top == -kInf || top == kInf) return top;
    parallel_tasks(row.segments(), num_threads, [&](int64_t s) {
        row.segment_sum[s] = cut.everything() ? segment_sum<false>(row, s, top, cut)
                                              : segment_sum<true>(row, s, top, cut);
    });
    double total = 0.0;
    for (int64_t s = 0; s < row.segments(); s++) total += static_cast<double>(row.segment_sum[s]);
    return top + hmax(log(splat(static_cast<float>(total))));
}

// f(row, threads for that row) for each row: rows side by side if that fills the threads, one after
// another if not.
template <class F>
static inline void for_each_row(int64_t num_rows, int64_t vocab, int num_threads, F f) {
    const int useful = worthwhile_threads(num_rows * vocab / 1024 + 1, 4096, num_threads);
    if (num_rows >= 2 * useful || useful <= 1) {
        parallel_tasks(num_rows, useful, [&](int64_t r) { f(r, 1); });
    } else {
        for (int64_t r = 0; r < num_rows; r++) f(r, useful);
    }
}

}  // namespace tlt::TLT_ISA
