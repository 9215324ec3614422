// One chunk of keys and values of one kv head as attention computes on it: fp32, keys transposed.
//
// Owns: the layout of a chunk and its filling from pages and from tails. Does not know queries,
// masks or softmax. Invariant: `keys` [D][kChunk] and `values` [kChunk][value_cols] hold at logical
// offset j of the chunk what the cache holds for that logical position, and zeros where nothing was
// asked for: memory that no query may see is never read.
#pragma once

#include <cstdint>

#include "cpu/attention_rows.h"
#include "cpu/lanes.h"
#include "cpu/transpose.h"

namespace tlt::TLT_ISA {

struct Chunk {
    float* keys;      // [round up D to 32][kChunk]
    float* values;    // [kChunk][value_cols]
    float* zero_row;  // [round up D to 32] zeros, what an absent key is read from
    int64_t head_dim, value_cols;
};

// Sixteen keys, one per lane: keys[d][column + lane] = row(lane)[d].
template <class T, class Row>
static inline void load_keys16(const Chunk& c, Row row, int64_t column) {
    if constexpr (sizeof(T) == sizeof(uint16_t)) {
        const I16 upper = splat_i(static_cast<int32_t>(0xffff0000u));
        for_lanes(c.head_dim / 2, [&](int64_t pair, auto n) {  // two bf16 travel as one element
            I16 t[16];
            for (int i = 0; i < 16; i++) {
                t[i] = load_i_n(reinterpret_cast<const int32_t*>(row(i)) + pair, n);
            }
            transpose16(t);
            float* to = c.keys + 2 * pair * kChunk + column;
            for (int i = 0; i < 16; i++) {
                store(to + 2 * i * kChunk, as_float(shl<16>(t[i])));
                store(to + (2 * i + 1) * kChunk, as_float(t[i] & upper));
            }
        });
    } else {
        for_lanes(c.head_dim, [&](int64_t d, auto n) {
            I16 t[16];
            for (int i = 0; i < 16; i++) t[i] = as_int(load_n(row(i) + d, n));
            transpose16(t);
            for (int i = 0; i < 16; i++) store(c.keys + (d + i) * kChunk + column, as_float(t[i]));
        });
    }
}

template <class T>
static inline void load_value(const Chunk& c, const T* row, int64_t column) {
    float* to = c.values + column * c.value_cols;
    for_lanes(c.head_dim, [&](int64_t d, auto n) { store(to + d, load_n(row + d, n)); });
}

// Rows of one head in a paged cache: slot s is at base + s * stride.
template <class T>
struct HeadCache {
    const T *k, *v;
    int64_t stride;
};

// Pages of a head that will be loaded next.
template <class T>
struct Ahead {
    HeadCache<T> cache;
    const int32_t* pages;
    int64_t count;

    // Asks for the keys (or values) of the i-th: rows of one head lie apart, where the hardware
    // foresees them badly. Half a page at a time, so that the requests do not fill every buffer.
    void prefetch(const T* base, int64_t i, int64_t head_dim) const {
        if (i >= count) return;
        asm volatile(
            "");  // or gcc 12 takes this for a function without effects and drops its calls
        const auto row_bytes = static_cast<int64_t>(sizeof(T)) * head_dim;
        for (int64_t token = 0; token < kPageTokens; token++) {
            const T* row = base + (pages[i] * kPageTokens + token) * cache.stride;
            for (int64_t byte = 0; byte < row_bytes; byte += 64) {
                __builtin_prefetch(reinterpret_cast<const char*>(row) + byte, 0, 2);
            }
        }
    }
};

// A page of which only some keys are present: those at offsets [begin, end) of the chunk; zeros for
// the others.
template <class T>
static inline void load_partial_page(const Chunk& c, const HeadCache<T>& cache,
                                     const int32_t* pages, int64_t column, int64_t begin,
                                     int64_t end) {
    const bool used = begin < column + kPageTokens && column < end;
    const int64_t slot = used ? pages[column / kPageTokens] * kPageTokens : 0;
    const T *k[kPageTokens], *v[kPageTokens], *zero_row = reinterpret_cast<const T*>(c.zero_row);
    for (int64_t i = 0; i < kPageTokens; i++) {
        const bool present = begin <= column + i && column + i < end;
        k[i] = present ? cache.k + (slot + i) * cache.stride : zero_row;
        v[i] = present ? cache.v + (slot + i) * cache.stride : zero_row;
    }
    load_keys16<T>(c, [&](int64_t i) { return k[i]; }, column);
    for (int64_t i = 0; i < kPageTokens; i++) load_value(c, v[i], column + i);
}

// Logical offsets [begin, end) of the chunk from `pages` (its first page first), zeros elsewhere
// below `limit`. Meanwhile pages ahead are fetched.
template <class T>
static inline void load_pages(const Chunk& c, const HeadCache<T>& cache, const int32_t* pages,
                              int64_t begin, int64_t end, int64_t limit, const Ahead<T>& ahead) {
    for (int64_t page = 0; page * kPageTokens < limit; page++) {
        const int64_t column = page * kPageTokens;
        ahead.prefetch(ahead.cache.k, page, c.head_dim);
        if (column < begin || end < column + kPageTokens) {
            ahead.prefetch(ahead.cache.v, page, c.head_dim);
            load_partial_page(c, cache, pages, column, begin, end);
            continue;
        }
        const int64_t at = pages[page] * kPageTokens * cache.stride;
        const T *k = cache.k + at, *v = cache.v + at;
        load_keys16<T>(c, [&](int64_t i) { return k + i * cache.stride; }, column);
        ahead.prefetch(ahead.cache.v, page, c.head_dim);
        for (int64_t i = 0; i < kPageTokens; i++) load_value(c, v + i * cache.stride, column + i);
    }
}

// Writes one key and value, of a tail, over what is at `column`.
template <class T>
static inline void patch(const Chunk& c, const HeadCache<T>& cache, int64_t slot, int64_t column) {
    const T* k = cache.k + slot * cache.stride;
    for_lanes(c.head_dim, [&](int64_t d, auto n) {
        alignas(64) float lanes[16];
        store(lanes, load_n(k + d, n));
        const int64_t count = c.head_dim - d < 16 ? c.head_dim - d : 16;
        for (int64_t i = 0; i < count; i++) c.keys[(d + i) * kChunk + column] = lanes[i];
    });
    load_value(c, cache.v + slot * cache.stride, column);
}

}  // namespace tlt::TLT_ISA
