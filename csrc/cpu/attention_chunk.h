// One chunk of keys and values of one kv head as attention computes on it: fp32, keys transposed.
//
// Owns: the layout of a chunk and its filling from pages and from tails. Does not know queries, masks or softmax.
// Invariant: `keys` [D][kChunk] and `values` [kChunk][value_cols] hold at logical offset j of the chunk what the
// cache holds for that logical position, and zeros where nothing was asked for: memory that no query may see is
// never read.
#pragma once

#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/lanes.h"
#include "cpu/transpose.h"

namespace tlt::TLT_ISA {

inline constexpr int64_t kChunk = 64;  // keys; chunk c holds logical positions [64 c, 64 c + 64)

struct Chunk {
    float* keys;      // [round up D to 32][kChunk]
    float* values;    // [kChunk][value_cols]
    float* zero_row;  // [round up D to 32] zeros, what an absent key is read from
    int64_t head_dim, value_cols;
};

// Sixteen keys, one per lane: keys[d][column + lane] = rows[lane][d].
static inline void load_keys16(const Chunk& c, const uint16_t* const rows[16], int64_t column) {
    const I16 upper = splat_i(static_cast<int32_t>(0xffff0000u));
    for_lanes(c.head_dim / 2, [&](int64_t pair, auto n) {  // two bf16 travel as one 32-bit element
        I16 t[16];
        for (int i = 0; i < 16; i++) {
            const auto* from = reinterpret_cast<const int32_t*>(rows[i]) + pair;
            t[i] = load_i_n(from, n);
        }
        transpose16(t);
        float* to = c.keys + 2 * pair * kChunk + column;
        for (int i = 0; i < 16; i++) {
            store(to + 2 * i * kChunk, as_float(shl<16>(t[i])));
            store(to + (2 * i + 1) * kChunk, as_float(t[i] & upper));
        }
    });
}

static inline void load_keys16(const Chunk& c, const float* const rows[16], int64_t column) {
    for_lanes(c.head_dim, [&](int64_t d, auto n) {
        I16 t[16];
        for (int i = 0; i < 16; i++) t[i] = as_int(load_n(rows[i] + d, n));
        transpose16(t);
        for (int i = 0; i < 16; i++) store(c.keys + (d + i) * kChunk + column, as_float(t[i]));
    });
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

// Logical offsets [begin, end) of the chunk from `pages` (its first page first), zeros elsewhere below `limit`.
template <class T>
static inline void load_pages(const Chunk& c, const HeadCache<T>& cache, const int32_t* pages,
                              int64_t begin, int64_t end, int64_t limit) {
    const T* zero_row = reinterpret_cast<const T*>(c.zero_row);
    for (int64_t column = 0; column < limit; column += kPageTokens) {
        const bool used = begin < column + kPageTokens && column < end;
        const int64_t slot = used ? pages[column / kPageTokens] * kPageTokens : 0;
        const T *k[kPageTokens], *v[kPageTokens];
        for (int64_t i = 0; i < kPageTokens; i++) {
            const bool present = begin <= column + i && column + i < end;
            k[i] = present ? cache.k + (slot + i) * cache.stride : zero_row;
            v[i] = present ? cache.v + (slot + i) * cache.stride : zero_row;
        }
        load_keys16(c, k, column);
        for (int64_t i = 0; i < kPageTokens; i++) load_value(c, v[i], column + i);
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
