// min-p, top-k and top-p: which tokens of a row may be sampled, as one Cut.
//
// Owns: the order of tokens (value, then lower id first) and what each filter keeps of it, as
// `kept_mask` of engine/ops/reference.py. Does not know noise. Invariant: the kept tokens are a
// prefix of that order, hence a Cut.
#pragma once

#include <cstdint>

#include "cpu/token_heap.h"
#include "cpu/token_row.h"

namespace tlt::TLT_ISA {

static inline Cut min_p_cut(float top, float min_p, Cut cut) {
    if (!(min_p > 0.0f)) return cut;
    const float value = top + static_cast<float>(__builtin_log(static_cast<double>(min_p)));
    if (!(value > cut.value)) return cut;
    return {value < top ? value : top, INT32_MAX};  // the largest is always kept
}

// Keys of the kept tokens with value >= `low`, in no order that matters; returns how many. `keys`
// [vocab].
static inline int64_t gather(const TokenRow& row, const Cut& cut, float low, uint64_t* keys) {
    int64_t count = 0;
    for (int64_t b = 0; b < row.blocks(); b++) {
        if (row.block_max[b] < low) continue;
        V16 x[4];
        load_block(row.values, row.vocab, b, x);
        for (int i = 0; i < 4; i++) {
            const int64_t first = b * kTokenBlock + 16 * i;
            uint32_t lanes = bits((x[i] >= splat(low)) & kept(cut, x[i], first));
            for (; lanes != 0; lanes &= lanes - 1) {
                const int64_t id = first + __builtin_ctz(lanes);
                keys[count++] = token_key(row.values[id], static_cast<int32_t>(id));
            }
        }
    }
    return count;
}

static inline Cut top_k_cut(const TokenRow& row, int64_t k, const Cut& cut, uint64_t* keys) {
    if (k <= 0 || k >= row.vocab) return cut;
    float low = cut.value;
    if (k <=
        row.blocks()) {  // at least k tokens are not below the k-th largest of the blocks' maxima
        for (int64_t b = 0; b < row.blocks(); b++) {
            keys[b] = token_key(row.block_max[b], static_cast<int32_t>(b));
        }
        const float bound = key_value(pop_kth(keys, row.blocks(), k));
        low = bound > low ? bound : low;
    }
    const int64_t count = gather(row, cut, low, keys);
    if (count <= k && low == cut.value) return cut;
    const uint64_t last = pop_kth(keys, count, k < count ? k : count);
    return {key_value(last), key_id(last)};
}

// e^x for x in [-700, 0] in double precision, the same bits for every instruction set.
static inline double exp_double(double x) {
    const double magic = 0x1.8p52;
    const double shifted = __builtin_fma(x, 1.4426950408889634, magic), n = shifted - magic;
    const double r = __builtin_fma(n, -1.90821492927058770002e-10,
                                   __builtin_fma(n, -6.93147180369123816490e-01, x));
    double p = 1.0 / 479001600;  // Taylor to degree 12: below 2^-52 for |r| < 0.35
    p = __builtin_fma(p, r, 1.0 / 39916800);
    p = __builtin_fma(p, r, 1.0 / 3628800);
    p = __builtin_fma(p, r, 1.0 / 362880);
    p = __builtin_fma(p, r, 1.0 / 40320);
    p = __builtin_fma(p, r, 1.0 / 5040);
    p = __builtin_fma(p, r, 1.0 / 720);
    p = __builtin_fma(p, r, 1.0 / 120);
    p = __builtin_fma(p, r, 1.0 / 24);
    p = __builtin_fma(p, r, 1.0 / 6);
    p = __builtin_fma(p, r, 0.5);
    p = __builtin_fma(p, r, 1.0);
    p = __builtin_fma(p, r, 1.0);
    const auto exponent = __builtin_bit_cast(uint64_t, shifted) << 52;
    return __builtin_bit_cast(double, __builtin_bit_cast(uint64_t, p) + exponent);
}

// Weights e^(x - top) of the kept tokens, summed by how far x is below top: bin i holds
// [i, i + 1) / kBinsPerNat, and what is `reach` nats or more below goes into `far` together.
// Tokens further than kMostReach below weigh less than 1e-20 together: no top_p < 1 in fp32 can
// want them.
struct WeightBins {
    static constexpr int kBinsPerNat = 8, kMostReach = 60, kCount = kBinsPerNat * kMostReach;
    double weight[kCount + 1] = {};
    double far = 0.0;

    static int bin_of(float below) { return static_cast<int>(below * kBinsPerNat); }

    WeightBins(const TokenRow& row, const Cut& cut, float top, int reach) {
        const float low = top - kMostReach > cut.value ? top - kMostReach : cut.value;
        const V16 near = splat(static_cast<float>(reach)), nowhere = splat(700.0f);
        double far_sums[8] = {};
        for (int64_t b = 0; b < row.blocks(); b++) {
            if (row.block_max[b] < low) continue;
            V16 x[4];
            alignas(64) float below[kTokenBlock];
            alignas(64) double weights[kTokenBlock];
            uint64_t lanes = 0;
            load_block(row.values, row.vocab, b, x);
            for (int i = 0; i < 4; i++) {
                const M16 wanted = (x[i] >= splat(low)) & kept(cut, x[i], b * kTokenBlock + 16 * i);
                const V16 distance = select(wanted, splat(top) - x[i], nowhere);
                lanes |= static_cast<uint64_t>(bits(distance < near)) << (16 * i);
                store(below + 16 * i, distance);
            }
            for (int i = 0; i < kTokenBlock; i++) {
                weights[i] = exp_double(-static_cast<double>(below[i]));
            }
            for (; lanes != 0; lanes &= lanes - 1) {
                const int i = __builtin_ctzll(lanes);
                weight[bin_of(below[i])] += weights[i];
                weights[i] = 0.0;
            }
            for (int i = 0; i < kTokenBlock; i++) far_sums[i % 8] += weights[i];
        }
        for (double sum : far_sums) far += sum;
    }

    double total() const {
        double sum = far;
        for (double w : weight) sum += w;
        return sum;
    }

    // The bin whose weight, after that of the bins before it, reaches `wanted`; or the last that
    // is not empty, with *before the weight of the bins before it.
    int find(double wanted, double* before) const {
        int bin = 0, last = 0;
        for (int i = 0; i <= kCount; i++) last = weight[i] > 0.0 ? i : last;
        *before = 0.0;
        while (bin < last && *before + weight[bin] < wanted) *before += weight[bin++];
        return bin;
    }
};

// The fewest tokens, largest first, whose weight reaches top_p of all kept ones.
static inline Cut top_p_cut(const TokenRow& row, float top, float top_p, const Cut& cut,
                            uint64_t* keys) {
    if (!(top_p < 1.0f)) return cut;
    constexpr int kNear = 12;  // nats: in most rows the tokens that matter, and few others
    WeightBins bins(row, cut, top, kNear);
    double before, wanted = static_cast<double>(top_p) * bins.total();
    int bin = bins.find(wanted, &before);
    if (before + bins.weight[bin] < wanted) {
        bins = WeightBins(row, cut, top, WeightBins::kMostReach + 1);
        wanted = static_cast<double>(top_p) * bins.total();
        bin = bins.find(wanted, &before);
    }

    // inside the bin that reaches it, in order
    const float low = top - static_cast<float>(bin + 2) / WeightBins::kBinsPerNat;
    int64_t count = 0;
    const int64_t gathered = gather(row, cut, low > cut.value ? low : cut.value, keys);
    for (int64_t i = 0; i < gathered; i++) {
        if (WeightBins::bin_of(top - key_value(keys[i])) == bin) keys[count++] = keys[i];
    }
    TokenHeap heap(keys, count);
    uint64_t key = heap.pop();
    while (heap.size() > 0) {
        before += exp_double(-static_cast<double>(top - key_value(key)));
        if (!(before < wanted)) break;
        key = heap.pop();
    }
    return {key_value(key), key_id(key)};
}

}  // namespace tlt::TLT_ISA
