// Attention of a block of rows of one sequence, through one kv head, over one segment of their
// keys.
//
// Owns: which keys each row sees, and how rows share the chunks they have in common. Does not know
// threads. Invariant: a row meets its keys in chunks and segments at fixed logical positions, so
// its partial result is the same whatever rows share the block, and whether a key comes through the
// page table or through the row's tail.
#pragma once

#include <cstdint>

#include "cpu/attention_math.h"
#include "cpu/attention_rows.h"

namespace tlt::TLT_ISA {

// Work memory of one thread.
struct Workspace {
    Chunk chunk;
    float* queries;       // [block queries][D], times scale and log2(e)
    float* scores;        // [kTile][kChunk]
    Partial one_chunk;    // kTile queries
    Partial one_segment;  // block queries
    Partial total;        // block queries
};

template <class T>
class BlockAttention {
  public:
    BlockAttention(const AttentionArgs& a, const RowBlock& block, int64_t kv_head, Workspace& w)
        : a_(a),
          block_(block),
          w_(w),
          group_(a.num_q_heads / a.num_kv_heads),
          head_(kv_head),
          cache_{static_cast<const T*>(a.k_cache) + kv_head * a.head_dim,
                 static_cast<const T*>(a.v_cache) + kv_head * a.head_dim,
                 a.num_kv_heads * a.head_dim},
          pages_(a.batch.page_table + block.seq * a.batch.pages_per_seq) {}

    int64_t num_queries() const { return (block_.row_end - block_.row_begin) * group_; }

    // To be called before `segment`.
    void load_queries() const {
        const V16 scale = splat(a_.scale * 1.44269504088896341f);
        for (int64_t q = 0; q < num_queries(); q++) {
            const float* from = a_.q + query_offset(q);
            float* to = w_.queries + q * a_.head_dim;
            for_lanes(a_.head_dim,
                      [&](int64_t d, auto n) { store_n(to + d, load_n(from + d, n) * scale, n); });
        }
    }

    // The pages that its first chunk will read.
    Ahead<T> first_pages() const {
        const Span span = row_span(a_, block_.row_begin);
        return pages_from(span.begin / kChunk * kChunkPages, span.tail);
    }

    // What to fetch while the last chunk is computed.
    void then(const Ahead<T>& next) { next_ = next; }

    // Partial results of all queries over segment `segment`, into `into`.
    void segment(int64_t segment, Partial into) {
        clear(into);
        for (int64_t start = segment * kSegment; start < (segment + 1) * kSegment;
             start += kChunk) {
            chunk(start, into);
        }
    }

    void clear(Partial p) const {
        for (int64_t q = 0; q < num_queries(); q++) {
            p.max[q] = -__builtin_inff();
            p.sum[q] = 0.0f;
        }
        const auto bytes = static_cast<size_t>(num_queries() * w_.chunk.value_cols) * sizeof(float);
        __builtin_memset(p.values, 0, bytes);
    }

    void merge_all(Partial into, Partial from) const {
        const int64_t cols = w_.chunk.value_cols;
        for (int64_t q = 0; q < num_queries(); q += 16) {
            merge({into.max + q, into.sum + q, into.values + q * cols},
                  {from.max + q, from.sum + q, from.values + q * cols},
                  lesser(16, num_queries() - q), cols);
        }
    }

    // out = values / sum; a row that sees nothing gives 0.
    void finish(Partial total) const {
        for (int64_t q = 0; q < num_queries(); q++) {
            const V16 sum = splat(total.sum[q] == 0.0f ? 1.0f : total.sum[q]);
            const float* from = total.values + q * w_.chunk.value_cols;
            float* out = a_.out + query_offset(q);
            for_lanes(a_.head_dim,
                      [&](int64_t d, auto n) { store_n(out + d, load_n(from + d, n) / sum, n); });
        }
    }

  private:
    // At most a chunk of pages, the first `page`, of those that hold positions below `tail`.
    Ahead<T> pages_from(int64_t page, int64_t tail) const {
        const int64_t left = (tail + kPageTokens - 1) / kPageTokens - page;
        return {cache_, pages_ + page, greater(0, lesser(kChunkPages, left))};
    }

    int64_t query_offset(int64_t q) const {
        const int64_t row = block_.row_begin + q / group_, head = head_ * group_ + q % group_;
        return (row * a_.num_q_heads + head) * a_.head_dim;
    }

    void chunk(int64_t start, Partial into) {
        loaded_ = false;
        int64_t row = block_.row_begin;
        bool any_own = false;
        while (row < block_.row_end) {
            const Span span = row_span(a_, row);
            any_own = any_own || span.owns(start);
            int64_t run_end = row + 1;
            if (span.shares(start)) {
                load(start);
                while (run_end < block_.row_end && row_span(a_, run_end).shares(start)) run_end++;
                run(row, run_end, start, into);
            }
            row = run_end;
        }
        for (row = block_.row_begin; any_own && row < block_.row_end; row++) {
            if (row_span(a_, row).owns(start)) own_row(row, start, into);
        }
    }

    // Fills the chunk with what any row of the block reads of it through the page table, once.
    void load(int64_t start) {
        if (loaded_) return;
        int64_t begin = kChunk, end = 0, limit = 0, last_tail = 0;
        for (int64_t row = block_.row_begin; row < block_.row_end; row++) {
            const Span s = row_span(a_, row);
            limit = greater(limit, lesser(kChunk, s.end - start));
            const int64_t from = greater(s.begin - start, 0), to = lesser(s.tail - start, kChunk);
            last_tail = greater(last_tail, s.tail);
            if (from >= to) continue;
            begin = lesser(begin, from);
            end = greater(end, to);
        }
        const int64_t page = start / kPageTokens;
        const Ahead<T> more = pages_from(page + kChunkPages, last_tail);
        load_pages(w_.chunk, cache_, pages_ + page, begin, end, limit,
                   more.count > 0 ? more : next_);
        loaded_ = true;
        shared_end_ = end;
    }

    void own_row(int64_t row, int64_t start, Partial into) {
        const Span s = row_span(a_, row);
        if (s.tail - start > shared_end_)
            loaded_ = false;  // another row's tail lies over keys of this one
        load(start);
        const int32_t* slots = a_.batch.tail_slots + a_.batch.tail_start[row];
        const int64_t first = greater(greater(s.tail, s.begin), start);
        for (int64_t at = first; at < lesser(s.end, start + kChunk); at++) {
            patch(w_.chunk, cache_, slots[at - s.tail], at - start);
        }
        shared_end_ = lesser(shared_end_, greater(s.tail - start, 0));
        run(row, row + 1, start, into);
    }

    // Adds the chunk to the partials of rows [begin, end).
    void run(int64_t begin, int64_t end, int64_t start, Partial into) {
        const int64_t last = (end - block_.row_begin) * group_;
        for (int64_t q = (begin - block_.row_begin) * group_; q < last; q += kTile) {
            tile(q, lesser(kTile, last - q), start, into);
        }
    }

    void tile(int64_t q, int64_t count, int64_t start, Partial into) {
        const int64_t dim = a_.head_dim, cols = w_.chunk.value_cols;
        int64_t from[kTile], to[kTile], limit = 0;
        for (int64_t i = 0; i < count; i++) {
            const Span s = row_span(a_, block_.row_begin + (q + i) / group_);
            from[i] = greater(s.begin - start, 0);
            to[i] = lesser(s.end - start, kChunk);
            limit = greater(limit, to[i]);
        }
        const int64_t vectors = (limit + 15) / 16;
        product(count, w_.queries + q * dim, dim, w_.chunk.keys, kChunk, dim, w_.scores, kChunk,
                vectors);
        for (int64_t i = 0; i < count; i++) {
            const auto softmax =
                from[i] == 0 && to[i] == kChunk ? softmax_row<true> : softmax_row<false>;
            softmax(w_.scores + i * kChunk, from[i], to[i], w_.one_chunk.max + i,
                    w_.one_chunk.sum + i);
        }
        product(count, w_.scores, kChunk, w_.chunk.values, cols, limit, w_.one_chunk.values, cols,
                cols / 16);
        merge({into.max + q, into.sum + q, into.values + q * cols}, w_.one_chunk, count, cols);
    }

    const AttentionArgs& a_;
    const RowBlock block_;
    Workspace& w_;
    const int64_t group_, head_;
    const HeadCache<T> cache_;
    const int32_t* const pages_;
    Ahead<T> next_{{nullptr, nullptr, 0}, nullptr, 0};
    bool loaded_ = false;
    int64_t shared_end_ = 0;  // offsets of the chunk from here on may hold some row's tail
};

}  // namespace tlt::TLT_ISA
