// The arithmetic of attention on one chunk: scores, softmax and weighted values of a few queries,
// and the merging of partial results.
//
// Owns: the order of every sum, on which bitwise batch invariance rests. Does not know caches,
// pages or rows. Invariant: each element of a product is one chain of fma over the inner index in
// order, whatever the tile; so a query's partial depends on its own keys alone. Masked keys have
// weight exactly 0, and the values they meet are finite, so they add nothing. Partials are merged
// in the order of their positions by `merge`.
#pragma once

#include <cstdint>

#include "cpu/attention_chunk.h"
#include "cpu/vec.h"

namespace tlt::TLT_ISA {

inline constexpr int64_t kTile = 6;  // queries computed together

// Partial softmax of some queries: maximum (in units of log2), sum of weights, weighted values
// [value_cols] each.
struct Partial {
    float *max, *sum, *values;
};

// 2^x for x <= 0 within 1 ulp; not below 2^-126. NaN for NaN.
static inline V16 exp2_negative(V16 x) {
    x = max(splat(-126.0f), x);
    const V16 n = round_even(x), r = x - n;
    V16 p = splat(1.535336188319500e-4f);
    p = fma(p, r, splat(1.339887440266574e-3f));
    p = fma(p, r, splat(9.618437357674640e-3f));
    p = fma(p, r, splat(5.550332471162809e-2f));
    p = fma(p, r, splat(2.402264791363012e-1f));
    p = fma(p, r, splat(6.931472028550421e-1f));
    p = fma(p, r, splat(1.0f));
    return p * as_float(shl<23>(to_int(n) + splat_i(127)));
}

// c [rows][16 cols] = a [rows][inner] * b [inner][16 cols], rows and cols known to the compiler
template <int rows, int cols>
static inline void product_tile(const float* a, int64_t lda, const float* b, int64_t ldb,
                                int64_t inner, float* c, int64_t ldc) {
    V16 sums[rows][cols];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < cols; j++) sums[i][j] = zero();
    }
    for (int64_t k = 0; k < inner; k++) {
#pragma GCC unroll 4
        for (int j = 0; j < cols; j++) {
            const V16 column = load(b + k * ldb + 16 * j);
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++) {
                sums[i][j] = fma(splat(a[i * lda + k]), column, sums[i][j]);
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < cols; j++) store(c + i * ldc + 16 * j, sums[i][j]);
    }
}

// How many vectors of columns a tile of `rows` keeps in registers; no effect on results.
template <int rows>
inline constexpr int kTileCols =
#if defined(TLT_ISA_AVX512)
    4;
#elif defined(TLT_ISA_AVX2)
    rows == 1 ? 4 : (rows <= 3 ? 2 : 1);
#else
    1;
#endif

template <int rows>
static inline void product_rows(const float* a, int64_t lda, const float* b, int64_t ldb,
                                int64_t inner, float* c, int64_t ldc, int64_t vectors) {
    constexpr int cols = kTileCols<rows>;
    int64_t j = 0;
    for (; j + cols <= vectors; j += cols) {
        product_tile<rows, cols>(a, lda, b + 16 * j, ldb, inner, c + 16 * j, ldc);
    }
    for (; j < vectors; j++) {
        product_tile<rows, 1>(a, lda, b + 16 * j, ldb, inner, c + 16 * j, ldc);
    }
}

// c [rows][16 vectors] = a [rows][inner] * b [inner][16 vectors], rows <= kTile
static inline void product(int64_t rows, const float* a, int64_t lda, const float* b, int64_t ldb,
                           int64_t inner, float* c, int64_t ldc, int64_t vectors) {
    switch (rows) {
        case 1:
            return product_rows<1>(a, lda, b, ldb, inner, c, ldc, vectors);
        case 2:
            return product_rows<2>(a, lda, b, ldb, inner, c, ldc, vectors);
        case 3:
            return product_rows<3>(a, lda, b, ldb, inner, c, ldc, vectors);
        case 4:
            return product_rows<4>(a, lda, b, ldb, inner, c, ldc, vectors);
        case 5:
            return product_rows<5>(a, lda, b, ldb, inner, c, ldc, vectors);
        default:
            return product_rows<6>(a, lda, b, ldb, inner, c, ldc, vectors);
    }
}

// Turns scores [kChunk], of which offsets [begin, end) are seen, into weights 2^(score - max);
// others become 0. `all` says that every offset is seen.
template <bool all>
static inline void softmax_row(float* scores, int64_t begin, int64_t end, float* max_out,
                               float* sum_out) {
    V16 s[4];
    M16 seen[4];
    const I16 first = splat_i(static_cast<int32_t>(begin));
    const I16 last = splat_i(static_cast<int32_t>(end));
    for (int j = 0; j < 4; j++) {
        s[j] = load(scores + 16 * j);
        if (all) continue;
        const I16 offset = iota() + splat_i(16 * j);
        seen[j] = ~lt_i(offset, first) & lt_i(offset, last);
        s[j] = select(seen[j], s[j], splat(-__builtin_inff()));
    }
    const float top = hmax(max(max(s[0], s[1]), max(s[2], s[3])));
    for (int j = 0; j < 4; j++) {
        s[j] = exp2_negative(s[j] - splat(top));
        if (!all) s[j] = select(seen[j], s[j], zero());
        store(scores + 16 * j, s[j]);
    }
    *max_out = top;
    *sum_out = hsum((s[0] + s[1]) + (s[2] + s[3]));
}

// into += from for `rows` <= 16 queries. A sum of 0 says that no key was seen: that partial changes
// nothing. (The maximum would not do: it is -inf as well where all scores are NaN.)
static inline void merge(Partial into, Partial from, int64_t rows, int64_t value_cols) {
    const V16 old_max = load_n(into.max, rows), from_max = load_n(from.max, rows);
    const V16 new_max = max(old_max, from_max);
    alignas(64) float keep[16], add[16];
    store(keep, exp2_negative(old_max - new_max));
    store(add, exp2_negative(from_max - new_max));
    for (int64_t i = 0; i < rows; i++) {
        if (from.sum[i] == 0.0f) continue;
        into.max[i] = into.max[i] > from.max[i] ? into.max[i] : from.max[i];
        into.sum[i] = __builtin_fmaf(from.sum[i], add[i], into.sum[i] * keep[i]);
        float* to = into.values + i * value_cols;
        const float* more = from.values + i * value_cols;
        const V16 a = splat(add[i]), k = splat(keep[i]);
        for (int64_t d = 0; d < value_cols; d += 16) {
            // + 0 turns -0 into 0: the sign of a zero would tell how many zeros were added
            store(to + d, fma(load(more + d) + zero(), a, load(to + d) * k));
        }
    }
}

}  // namespace tlt::TLT_ISA
