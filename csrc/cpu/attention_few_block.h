// Attention of a block of few queries (of each kv head) over chunks of their keys.
//
// Owns: where the keys of a chunk lie, through the page table and through tails, and which rows of
// the block meet them together. Does not know threads, or how scores are computed
// (attention_few.h). Invariant: as BlockAttention's: a row meets its keys in chunks at fixed
// logical positions, and what a chunk gives depends on the row's own keys alone, to the same bits
// as there.
#pragma once

#include <cstdint>

#include "cpu/attention_few.h"
#include "cpu/attention_rows.h"

namespace tlt::TLT_ISA {

// Floats of a partial of one block and kv head: [16] max, [16] sum, [kFewQueries][value_cols].
static inline int64_t few_partial_floats(int64_t value_cols) {
    return 32 + kFewQueries * value_cols;
}
static inline Partial few_partial(float* memory) { return {memory, memory + 16, memory + 32}; }

// Work memory of one thread.
struct FewWorkspace {
    int64_t cols;        // head size, padded: of queries and of values
    float* queries;      // [Hkv][kFewQueries][cols], times scale and log2(e), zeros behind D
    float* scores;       // [kFewQueries][kChunk]
    float* one_chunk;    // partial
    float* one_segment;  // [Hkv] partials
    float* total;        // [Hkv] partials

    static int64_t padded(const AttentionArgs& a) { return round_up(a.head_dim, 32); }
    static int64_t floats(const AttentionArgs& a) {
        const int64_t partial = few_partial_floats(padded(a));
        return kFewQueries * (a.num_kv_heads * padded(a) + kChunk) +
               (1 + 2 * a.num_kv_heads) * partial;
    }
    FewWorkspace(const AttentionArgs& a, float* memory) : cols(padded(a)) {
        const int64_t partial = few_partial_floats(cols);
        queries = memory;
        scores = queries + a.num_kv_heads * kFewQueries * cols;
        one_chunk = scores + kFewQueries * kChunk;
        one_segment = one_chunk + partial;
        total = one_segment + a.num_kv_heads * partial;
    }
};

// Rows of the cache at the offsets of a chunk, for kv head 0. Offsets outside [begin, end), up to
// whole vectors, repeat one that is inside: their scores are masked.
template <class T>
struct ChunkRows {
    int64_t begin, end;
    const T *k[kChunk], *v[kChunk];
};

struct Heads {
    int64_t begin, end;
};

template <class T>
class FewAttention {
  public:
    FewAttention(const AttentionArgs& a, const RowBlock& block, Heads heads, FewWorkspace& w)
        : a_(a),
          block_(block),
          heads_(heads),
          w_(w),
          group_(a.num_q_heads / a.num_kv_heads),
          stride_(a.num_kv_heads * a.head_dim),
          pages_(a.batch.page_table + block.seq * a.batch.pages_per_seq) {}

    // To be called before `chunk`.
    void load_queries() const {
        const V16 scale = splat(a_.scale * 1.44269504088896341f);
        each_query([&](int64_t head, int64_t q, int64_t offset) {
            float* to = w_.queries + (head * kFewQueries + q) * w_.cols;
            for (int64_t d = greater(0, w_.cols - 32); d < w_.cols; d += 16) store(to + d, zero());
            for_lanes(a_.head_dim, [&](int64_t d, auto n) {
                store_n(to + d, load_n(a_.q + offset + d, n) * scale, n);
            });
        });
    }

    // The keys (values) of chunk `start` that lie in pages below position `tail`.
    void foresee(const void* cache, int64_t start, int64_t tail, Prefetcher& ahead) const {
        const T* base = static_cast<const T*>(cache) + heads_.begin * a_.head_dim;
        const bool whole = heads_.end - heads_.begin == a_.num_kv_heads;
        const auto row_bytes = (heads_.end - heads_.begin) * a_.head_dim * int64_t{sizeof(T)};
        for (int64_t at = start; at < lesser(start + kChunk, tail); at += kPageTokens) {
            const int64_t tokens = lesser(kPageTokens, tail - at);
            const T* page = base + pages_[at / kPageTokens] * kPageTokens * stride_;
            whole ? ahead.add(page, 1, tokens * row_bytes, 0)
                  : ahead.add(page, tokens, row_bytes, stride_ * int64_t{sizeof(T)});
        }
    }

    // Adds the chunk that begins at `start` to partial `into` [Hkv] of all queries.
    void chunk(int64_t start, float* into, Prefetcher& ahead) const {
        for (int64_t row = block_.row_begin; row < block_.row_end;) {
            const Span span = row_span(a_, row);
            int64_t end = row + 1;
            while (span.shares(start) && end < block_.row_end && row_span(a_, end).shares(start)) {
                end++;
            }
            if (span.meets(start)) run({block_.seq, row, end}, start, into, ahead);
            row = end;
        }
    }

    void clear(float* partial) const {
        for (int64_t head = heads_.begin; head < heads_.end; head++) {
            const Partial p = at(partial, head);
            store(p.max, splat(-__builtin_inff()));
            store(p.sum, zero());
        }
    }

    void join_all(float* into, float* from) const {
        for (int64_t head = heads_.begin; head < heads_.end; head++) {
            join(at(into, head), at(from, head), num_queries(), w_.cols);
        }
    }

    // out = values / sum; a row that sees nothing gives 0.
    void finish(float* total) const {
        each_query([&](int64_t head, int64_t q, int64_t offset) {
            const Partial p = at(total, head);
            float* out = a_.out + offset;
            if (p.sum[q] == 0.0f) {
                for_lanes(a_.head_dim, [&](int64_t d, auto n) { store_n(out + d, zero(), n); });
                return;
            }
            const V16 sum = splat(p.sum[q]);
            in_order<T>(p.values + q * w_.cols, a_.head_dim, [&](int64_t d, V16 values) {
                const int64_t left = a_.head_dim - d;
                left >= 16 ? store(out + d, values / sum) : store_n(out + d, values / sum, left);
            });
        });
    }

  private:
    Partial at(float* partials, int64_t head) const {
        return few_partial(partials + head * few_partial_floats(w_.cols));
    }
    int64_t num_queries() const { return (block_.row_end - block_.row_begin) * group_; }

    // f(kv head, query of it, where the query begins in q and out)
    template <class F>
    void each_query(F f) const {
        for (int64_t row = block_.row_begin, q = 0; row < block_.row_end; row++, q += group_) {
            for (int64_t head = heads_.begin; head < heads_.end; head++) {
                const int64_t first = row * a_.num_q_heads + head * group_;
                for (int64_t i = 0; i < group_; i++) f(head, q + i, (first + i) * a_.head_dim);
            }
        }
    }

    // Rows that share the chunk, or one row whose tail reaches into it.
    void locate(const RowBlock& rows, int64_t start, ChunkRows<T>& c) const {
        const Span all = block_span(a_, rows);
        c.begin = greater(all.begin - start, 0);
        c.end = lesser(all.end - start, kChunk);
        const T *k = static_cast<const T*>(a_.k_cache), *v = static_cast<const T*>(a_.v_cache);
        const int64_t paged = lesser(all.tail - start, c.end);
        int64_t at = c.begin;
        while (at < paged) {
            int64_t row =
                (pages_[(start + at) / kPageTokens] * int64_t{kPageTokens} + at % kPageTokens) *
                stride_;
            const int64_t stop = lesser(round_up(at + 1, kPageTokens), paged);
            for (; at < stop; at++, row += stride_) c.k[at] = k + row, c.v[at] = v + row;
        }
        const int32_t* slots = a_.batch.tail_slots + a_.batch.tail_start[rows.row_begin];
        for (; at < c.end; at++) {
            const int64_t row = slots[start + at - all.tail] * stride_;
            c.k[at] = k + row, c.v[at] = v + row;
        }
        for (; at % 16 != 0; at++) c.k[at] = c.k[c.begin];
        for (at = c.begin / 16 * 16; at < c.begin; at++) c.k[at] = c.k[c.begin];
    }

    void run(const RowBlock& rows, int64_t start, float* into, Prefetcher& ahead) const {
        ChunkRows<T> c;
        locate(rows, start, c);
        const int64_t q = (rows.row_begin - block_.row_begin) * group_;
        for (int64_t head = heads_.begin; head < heads_.end; head++) {
            Partial p = at(into, head);
            p = {p.max + q, p.sum + q, p.values + q * w_.cols};
            const float* queries = w_.queries + (head * kFewQueries + q) * w_.cols;
            const int64_t count = (rows.row_end - rows.row_begin) * group_;
            const auto tile = [&]<int n>() {
                this->template tile<n>(c, head, rows, queries, start, p, ahead);
            };
            static_assert(kFewQueries == 8);
            switch (count) {
                case 1:
                    tile.template operator()<1>();
                    break;
                case 2:
                    tile.template operator()<2>();
                    break;
                case 3:
                    tile.template operator()<3>();
                    break;
                case 4:
                    tile.template operator()<4>();
                    break;
                case 5:
                    tile.template operator()<5>();
                    break;
                case 6:
                    tile.template operator()<6>();
                    break;
                case 7:
                    tile.template operator()<7>();
                    break;
                default:
                    tile.template operator()<8>();
                    break;
            }
        }
    }

    template <int queries>
    void tile(const ChunkRows<T>& c, int64_t head, const RowBlock& rows, const float* q,
              int64_t start, Partial into, Prefetcher& ahead) const {
        const int64_t offset = head * a_.head_dim;
        score_keys<T, queries>(c.k, offset, a_.head_dim, c.begin / 16 * 16, round_up(c.end, 16), q,
                               w_.cols, w_.scores, ahead);
        bool fresh = true;
        for (int i = 0; i < queries; i++) fresh = fresh && into.sum[i] == 0.0f;
        const Partial chunk = fresh ? into : few_partial(w_.one_chunk);
        for (int i = 0; i < queries; i++) {
            const Span s = row_span(a_, rows.row_begin + i / group_);
            const int64_t from = greater(s.begin - start, 0), to = lesser(s.end - start, kChunk);
            float *scores = w_.scores + i * kChunk, *max = chunk.max + i, *sum = chunk.sum + i;
            from == 0 && to == kChunk ? softmax_row<true>(scores, from, to, max, sum)
                                      : softmax_row<false>(scores, from, to, max, sum);
        }
        weigh_values<T, queries>(c.v, offset, a_.head_dim, c.begin, c.end, w_.scores, chunk.values,
                                 w_.cols, ahead);
        if (!fresh) join(into, chunk, queries, w_.cols);
    }

    const AttentionArgs& a_;
    const RowBlock block_;
    const Heads heads_;
    FewWorkspace& w_;
    const int64_t group_, stride_;
    const int32_t* const pages_;
};

}  // namespace tlt::TLT_ISA
