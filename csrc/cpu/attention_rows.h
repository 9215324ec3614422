// Which keys a row of attention sees, and where chunks and segments of them begin.
//
// Owns: spans of logical positions, and the rule by which rows share a chunk. Does not know caches
// or arithmetic. Invariant: chunks and segments lie at fixed logical positions, so how a row's keys
// are cut does not depend on the rows beside it.
#pragma once

#include <cstdint>

#include "cpu/kernels.h"

namespace tlt::TLT_ISA {

inline constexpr int64_t kChunk = 64;  // keys; chunk c holds logical positions [64 c, 64 c + 64)
inline constexpr int64_t kChunkPages = kChunk / kPageTokens;
inline constexpr int64_t kSegmentChunks = 4;
inline constexpr int64_t kSegment =
    kSegmentChunks * kChunk;  // keys merged before they join the total; the unit of work

// Rows [row_begin, row_end) of sequence `seq`.
struct RowBlock {
    int64_t seq, row_begin, row_end;
};

static inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Logical positions [begin, end) that a row sees; those from `tail` on are in its tail.
struct Span {
    int64_t begin, tail, end;

    bool meets(int64_t start) const { return begin < start + kChunk && start < end; }
    // A row reads this chunk through the page table alone, as others do, or has keys of its own in
    // it.
    bool shares(int64_t start) const {
        return meets(start) && (tail == end || start + kChunk <= tail);
    }
    bool owns(int64_t start) const { return meets(start) && !shares(start); }
};

static inline Span row_span(const AttentionArgs& a, int64_t row) {
    const int64_t tail = a.batch.ctx_len[row];
    const int64_t end = tail + a.batch.tail_start[row + 1] - a.batch.tail_start[row];
    return {a.window > 0 ? greater(0, end - a.window) : 0, tail, end};
}

// Logical positions that any row of the block sees; end <= begin if none.
static inline Span block_span(const AttentionArgs& a, const RowBlock& rows) {
    Span all{INT64_MAX, 0, 0};
    for (int64_t row = rows.row_begin; row < rows.row_end; row++) {
        const Span s = row_span(a, row);
        all = {lesser(all.begin, s.begin), greater(all.tail, s.tail), greater(all.end, s.end)};
    }
    return all;
}

}  // namespace tlt::TLT_ISA
