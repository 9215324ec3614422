// Scores and weighted values of few queries on one chunk, straight from the cache's own rows.
//
// Owns: how sixteen keys become one key per lane in registers, and how values are met row by row;
// what shares that work is all queries of the tile, and nothing is written but results. For many
// queries a chunk is converted once instead (attention_chunk.h). Does not know pages, masks or
// threads. Invariant: every score and every weighted value is the same chain of fma, over the head
// in order and over the keys in order, as in attention_math.h: the same bits.
#pragma once

#include <cstdint>

#include "cpu/attention_blocks.h"
#include "cpu/attention_math.h"
#include "cpu/attention_prefetch.h"
#include "cpu/lanes.h"
#include "cpu/transpose.h"

namespace tlt::TLT_ISA {

// Queries of a tile whose sums fit in registers; no effect on results.
#if defined(TLT_ISA_AVX512)
inline constexpr int kScoreQueries = 8, kValueQueries = 6;
#else
inline constexpr int kScoreQueries = 4, kValueQueries = 2;
#endif

// The cache is read as 32-bit words: one fp32, or a pair of bf16.
template <class T>
inline constexpr int64_t kWordValues = 4 / static_cast<int64_t>(sizeof(T));

template <class T>
static inline const int32_t* words(const T* row) {
    return reinterpret_cast<const int32_t*>(row);
}

// f(0, value), and for bf16 f(1, value of the upper half)
template <class T, class F>
static inline void for_halves(I16 word, F f) {
    if constexpr (kWordValues<T> == 2) {
        f(0, as_float(shl<16>(word)));
        f(1, as_float(word & splat_i(static_cast<int32_t>(0xffff0000u))));
    } else {
        f(0, as_float(word));
    }
}

// Adds the products over the values of 16 words (from `q` on) to scores of 16 * cols keys. Columns
// take turns, or few queries would wait for their own sums.
template <class T, int queries, int cols>
static inline void score_words(const I16 keys[cols][16], const float* q, int64_t ldq, bool first,
                               float* scores) {
    V16 sums[cols][queries];
#pragma GCC unroll 2
    for (int c = 0; c < cols; c++) {
#pragma GCC unroll 8
        for (int i = 0; i < queries; i++) {
            sums[c][i] = first ? zero() : load(scores + i * kChunk + 16 * c);
        }
    }
#pragma GCC unroll 16
    for (int w = 0; w < 16; w++) {
#pragma GCC unroll 2
        for (int c = 0; c < cols; c++) {
            for_halves<T>(keys[c][w], [&](int half, V16 key) {
#pragma GCC unroll 8
                for (int i = 0; i < queries; i++) {
                    const V16 query = splat(q[i * ldq + w * kWordValues<T> + half]);
                    sums[c][i] = fma(query, key, sums[c][i]);
                }
            });
        }
    }
#pragma GCC unroll 2
    for (int c = 0; c < cols; c++) {
#pragma GCC unroll 8
        for (int i = 0; i < queries; i++) store(scores + i * kChunk + 16 * c, sums[c][i]);
    }
}

// As score_words, of keys that are not loaded yet: row i is `rows[i]`, from its `word` on.
template <class T, int queries, int cols, class Lanes>
static inline void score_columns(const T* const* rows, int64_t offset, int64_t word, Lanes n,
                                 const float* q, int64_t ldq, float* scores) {
    I16 keys[cols][16];
#pragma GCC unroll 2
    for (int c = 0; c < cols; c++) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            keys[c][i] = load_i_n(words(rows[16 * c + i] + offset) + word, n);
        }
        transpose16(keys[c]);
    }
    constexpr int tile = queries < kScoreQueries ? queries : kScoreQueries;
    q += word * kWordValues<T>;
    score_words<T, tile, cols>(keys, q, ldq, word == 0, scores);
    if constexpr (tile < queries) {
        score_words<T, queries - tile, cols>(keys, q + tile * ldq, ldq, word == 0,
                                             scores + tile * kChunk);
    }
}

// scores [queries][kChunk] of the keys at offsets [begin, end), multiples of 16: `rows` [kChunk],
// each `offset` before the head's key. Queries are padded with zeros to whole vectors of words.
template <class T, int queries>
static inline void score_keys(const T* const* rows, int64_t offset, int64_t head_dim, int64_t begin,
                              int64_t end, const float* q, int64_t ldq, float* scores,
                              Prefetcher& ahead) {
    constexpr int cols = queries <= 2 ? 2 : 1;
    for_lanes(head_dim / kWordValues<T>, [&](int64_t word, auto n) {
        int64_t at = begin;
        for (; at + 16 * cols <= end; at += 16 * cols) {
            score_columns<T, queries, cols>(rows + at, offset, word, n, q, ldq, scores + at);
            ahead.step(cols);
        }
        if (at < end) {
            score_columns<T, queries, 1>(rows + at, offset, word, n, q, ldq, scores + at);
            ahead.step(1);
        }
    });
}

// out [queries][ldo] = weights [queries][kChunk] * values at offsets [begin, end), over 16 * cols
// words. The lower halves of 16 words come first, then their upper halves (`in_order` undoes it).
// -0 becomes 0: the sign of a zero would tell how many zeros were added.
template <class T, int queries, int cols, class Lanes>
static inline void weigh_words(const T* const* rows, int64_t offset, int64_t word, Lanes n,
                               int64_t begin, int64_t end, const float* weights, float* out,
                               int64_t ldo, Prefetcher& ahead) {
    constexpr int vectors = cols * kWordValues<T>;
    V16 sums[queries][vectors];
#pragma GCC unroll 8
    for (int i = 0; i < queries; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) sums[i][j] = zero();
    }
    for (int64_t key = begin; key < end;) {
        for (const int64_t stop = lesser(key + 16, end); key < stop; key++) {
            const int32_t* from = words(rows[key] + offset) + word;
#pragma GCC unroll 2
            for (int c = 0; c < cols; c++) {
                for_halves<T>(load_i_n(from + 16 * c, n), [&](int half, V16 value) {
#pragma GCC unroll 8
                    for (int i = 0; i < queries; i++) {
                        V16& sum = sums[i][c * kWordValues<T> + half];
                        sum = fma(splat(weights[i * kChunk + key]), value, sum);
                    }
                });
            }
        }
        ahead.step(1);
    }
    float* to = out + word * kWordValues<T>;
#pragma GCC unroll 8
    for (int i = 0; i < queries; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) store(to + i * ldo + 16 * j, sums[i][j] + zero());
    }
}

template <class T, int queries>
static inline void weigh_tile(const T* const* rows, int64_t offset, int64_t head_dim, int64_t begin,
                              int64_t end, const float* weights, float* out, int64_t ldo,
                              Prefetcher& ahead) {
#if defined(TLT_ISA_AVX512)
    constexpr int cols = 2;
#else
    constexpr int cols = queries == 1 ? 2 : 1;
#endif
    const int64_t count = head_dim / kWordValues<T>;
    int64_t word = 0;
    for (; word + 16 * cols <= count; word += 16 * cols) {
        weigh_words<T, queries, cols>(rows, offset, word, Full{}, begin, end, weights, out, ldo,
                                      ahead);
    }
    for (; word < count; word += 16) {
        weigh_words<T, queries, 1>(rows, offset, word, count - word, begin, end, weights, out, ldo,
                                   ahead);
    }
}

template <class T, int queries>
static inline void weigh_values(const T* const* rows, int64_t offset, int64_t head_dim,
                                int64_t begin, int64_t end, const float* weights, float* out,
                                int64_t ldo, Prefetcher& ahead) {
    constexpr int tiles = (queries + kValueQueries - 1) / kValueQueries;
    constexpr int tile = (queries + tiles - 1) / tiles;
    weigh_tile<T, tile>(rows, offset, head_dim, begin, end, weights, out, ldo, ahead);
    if constexpr (tile < queries) {
        weigh_values<T, queries - tile>(rows, offset, head_dim, begin, end, weights + tile * kChunk,
                                        out + tile * ldo, ldo, ahead);
    }
}

// f(d, vector of values [d, d + 16)) of what weigh_values wrote.
template <class T, class F>
static inline void in_order(const float* values, int64_t head_dim, F f) {
    constexpr int64_t step = 16 * kWordValues<T>;
    for (int64_t d = 0; d < head_dim; d += step) {
        V16 part[2] = {load(values + d), load(values + d + step - 16)};
        if (kWordValues<T> == 2) interleave2(part);
        f(d, part[0]);
        if (kWordValues<T> == 2 && d + 16 < head_dim) f(d + 16, part[1]);
    }
}

// into += from. A sum of 0 says that no key was met and values were not written.
static inline void join(Partial into, Partial from, int64_t count, int64_t cols) {
    bool fresh = true;
    for (int64_t i = 0; i < count; i++) fresh = fresh && into.sum[i] == 0.0f;
    if (!fresh) {
        for (int64_t i = 0; i < count; i++) {
            if (into.sum[i] != 0.0f) continue;
            __builtin_memset(into.values + i * cols, 0, static_cast<size_t>(cols) * sizeof(float));
        }
        return merge(into, from, count, cols);
    }
    for (int64_t i = 0; i < count; i++) {  // what merge gives
        into.max[i] = from.max[i];
        into.sum[i] = from.sum[i];
    }
    for (int64_t d = 0; d < count * cols; d += 16) {
        store(into.values + d, load(from.values + d) + zero());
    }
}

}  // namespace tlt::TLT_ISA
