// A race of tokens by z + noise: the scaled row, its memory, and the bound that spares most of the
// noise.
//
// Owns: what `sample` and `coupled_top_k` share, so that both score a token with the same bits.
// Does not know who wins. Invariant: a token that is left out cannot reach the score asked for.
//
// The bound: with E = -log(1 - x) the score of a token is z - log(E), and E >= x. So a token that
// reaches `best` has x <= exp(z - best), which costs no logarithm to check.
#pragma once

#include <cstdint>

#include "common/scratch.h"
#include "cpu/philox.h"
#include "cpu/sample_filter.h"
#include "cpu/token_row.h"

namespace tlt::TLT_ISA {

inline constexpr float kMostNoise = 22.2f;  // the Gumbel noise of the smallest x, 2^-32, is 22.18

// How much rounding may have raised a score of about `score` above its bound, generously.
static inline float slack(float score) {
    return 1e-3f + (score < 0.0f ? -score : score) * 0x1p-20f;
}

// Lanes whose x may be small enough for `best`: x 2^31 <= 2^31 exp(z - best), with 2^f <= 1 + f in
// place of the exponential's mantissa, so that its bits are a linear function of z.
static inline M16 may_reach(V16 z, I16 words, float best, float margin) {
    constexpr float log2e = 1.44269504f, mantissa = 0x1p23f;
    const V16 distance = max(splat(-80.0f), min(z - splat(best - margin), splat(8.0f)));
    const V16 bound = fma(distance, splat(log2e * mantissa), splat((127.0f + 31.0f) * mantissa));
    return to_float(words) <= as_float(to_int(bound));
}

// The exact scores of sixteen tokens, -inf for those that are cut off.
static inline V16 noisy_scores(const Cut& cut, V16 z, I16 words, int64_t first_id) {
    return select(kept(cut, z, first_id), z + gumbel(uniform(words)), splat(-kInf));
}

// z = logits / temperature, what is not finite as -inf; and the maxima of its blocks.
static inline void scale_segment(const float* logits, float temperature, float* z,
                                 const TokenRow& row, int64_t segment) {
    const V16 t = splat(temperature), inf = splat(kInf);
    for (int64_t b = row.first_block(segment); b < row.last_block(segment); b++) {
        V16 x[4];
        load_block(logits, row.vocab, b, x);
        for (int i = 0; i < 4; i++) {
            const int64_t at = b * kTokenBlock + 16 * i, left = row.vocab - at;
            x[i] = x[i] / t;
            x[i] = select(x[i] < inf, x[i], neg(inf));
            if (left >= 16) {
                store(z + at, x[i]);
            } else if (left > 0) {
                store_n(z + at, x[i], left);
            }
        }
        row.block_max[b] = largest(x);
    }
}

// Memory of one row: its z, one Best for each segment, and keys for the filters.
template <class Best>
struct RaceMemory {
    float* z;
    Best* segment_best;
    uint64_t* keys = nullptr;
    TokenRow row;  // of `logits` at first

    RaceMemory(const float* logits, int64_t vocab, bool filters) {
        const int64_t segments = vocab / kTokenSegment + 1;
        const auto floats = static_cast<size_t>(vocab + TokenRow::scratch_floats(vocab));
        const size_t best_bytes = static_cast<size_t>(segments) * sizeof(Best);
        auto* memory =
            static_cast<char*>(scratch(Scratch::sample, floats * sizeof(float) + best_bytes));
        segment_best = reinterpret_cast<Best*>(memory);
        z = reinterpret_cast<float*>(memory + best_bytes);
        row = {logits, z + vocab, nullptr, vocab};
        row.segment_sum = row.block_max + row.blocks();
        if (filters) {
            keys = static_cast<uint64_t*>(
                scratch(Scratch::sample_rows, static_cast<size_t>(vocab) * sizeof(uint64_t)));
        }
    }
};

}  // namespace tlt::TLT_ISA
