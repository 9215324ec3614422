// attention: divides the work and gives it to threads.
//
// Owns: blocks of rows; which of them are computed as blocks of few queries (attention_few.cpp);
// for the others the choice between one task per (block, kv head) and, where those are too few for
// the threads, one per segment of keys. Does not know the arithmetic (attention_math.h) or masks
// (attention_block.h). Invariant: partial results of segments are merged in order in both cases, so
// both give the same bits.
#include "common/scratch.h"
#include "cpu/attention_block.h"
#include "cpu/attention_blocks.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace tlt::TLT_ISA {
namespace {

constexpr int64_t kBlockQueries = 96;  // of one kv head; what shares the conversion of a chunk

struct Sizes {
    int64_t value_cols, key_rows, rows_per_block, queries;  // queries: most in a block

    explicit Sizes(const AttentionArgs& a) {
        const int64_t group = a.num_q_heads / a.num_kv_heads;
        value_cols = round_up(a.head_dim, 16);
        key_rows = round_up(a.head_dim, 32);
        rows_per_block = greater(1, kBlockQueries / group);
        queries = rows_per_block * group;
    }
    int64_t partial(int64_t count) const { return count * value_cols + 2 * round_up(count, 16); }
};

// Cuts floats off a buffer, each array starting on a cache line.
struct Cutter {
    float* at;
    float* take(int64_t count) {
        float* taken = at;
        at += round_up(count, 16);
        return taken;
    }
    Partial partial(int64_t queries, int64_t value_cols) {
        float *max = take(queries), *sum = take(queries);
        return {max, sum, take(queries * value_cols)};
    }
};

Workspace workspace(const AttentionArgs& a, const Sizes& s) {
    const int64_t count = (s.key_rows + s.value_cols) * kChunk + s.key_rows +
                          round_up(s.queries * a.head_dim, 16) + kTile * kChunk + s.partial(kTile) +
                          2 * s.partial(s.queries);
    auto* memory = static_cast<float*>(
        scratch(Scratch::attention, static_cast<size_t>(count) * sizeof(float)));
    Cutter cut{memory};
    Workspace w;
    w.chunk = {cut.take(s.key_rows * kChunk), cut.take(kChunk * s.value_cols), cut.take(s.key_rows),
               a.head_dim, s.value_cols};
    __builtin_memset(w.chunk.zero_row, 0, static_cast<size_t>(s.key_rows) * sizeof(float));
    w.queries = cut.take(s.queries * a.head_dim);
    w.scores = cut.take(kTile * kChunk);
    w.one_chunk = cut.partial(kTile, s.value_cols);
    w.one_segment = cut.partial(s.queries, s.value_cols);
    w.total = cut.partial(s.queries, s.value_cols);
    return w;
}

// A block with the segments that its rows see, [begin, end), and how many segments the blocks
// before it see.
struct Planned {
    RowBlock rows;
    int64_t begin, end, before;
    int64_t segments() const { return end - begin; }
};

struct Plan {
    Planned* blocks;
    int64_t num_blocks, num_segments;
    RowBlocks few;  // blocks that are not among `blocks`
};

Planned plan_block(const AttentionArgs& a, const RowBlock& rows, int64_t before) {
    const Span all = block_span(a, rows);
    const int64_t begin = all.begin / kSegment, end = (all.end + kSegment - 1) / kSegment;
    return {rows, begin, greater(begin, end), before};
}

Plan plan(const AttentionArgs& a, int64_t rows_per_block) {
    const BatchView& b = a.batch;
    const int64_t group = a.num_q_heads / a.num_kv_heads;
    const int64_t most = b.num_rows / rows_per_block + b.num_seqs;
    auto* few = static_cast<RowBlock*>(
        scratch(Scratch::other, static_cast<size_t>(most) * (sizeof(RowBlock) + sizeof(Planned))));
    Plan plan{reinterpret_cast<Planned*>(few + most), 0, 0, {few, 0}};
    for (int64_t seq = 0; seq < b.num_seqs; seq++) {
        for (int64_t row = b.row_start[seq]; row < b.row_start[seq + 1]; row += rows_per_block) {
            const RowBlock rows{seq, row, lesser(row + rows_per_block, b.row_start[seq + 1])};
            if ((rows.row_end - rows.row_begin) * group <= kFewQueries) {
                few[plan.few.count++] = rows;
                continue;
            }
            plan.blocks[plan.num_blocks] = plan_block(a, rows, plan.num_segments);
            plan.num_segments += plan.blocks[plan.num_blocks++].segments();
        }
    }
    return plan;
}

// One task per (block, kv head); the last blocks, which see most keys, first.
template <class T>
void run_blocks(const AttentionArgs& a, const Plan& plan, const Sizes& sizes, int num_threads) {
    const int64_t heads = a.num_kv_heads, tasks = plan.num_blocks * heads;
    parallel_lanes(tasks, num_threads, [&](int64_t task, bool) {
        Workspace w = workspace(a, sizes);
        const auto planned = [&](int64_t t) {
            return plan.blocks[plan.num_blocks - 1 - t / heads];
        };
        const auto attention = [&](int64_t t) {
            return BlockAttention<T>(a, planned(t).rows, t % heads, w);
        };
        BlockAttention<T> current = attention(task);
        // most likely this thread's next task
        if (task + 1 < tasks) current.then(attention(task + 1).first_pages());
        current.load_queries();
        current.clear(w.total);
        for (int64_t s = planned(task).begin; s < planned(task).end; s++) {
            current.segment(s, w.one_segment);
            current.merge_all(w.total, w.one_segment);
        }
        current.finish(w.total);
    });
}

// One task per (segment, kv head), whose partial results wait in `memory`; then one per (block, kv
// head) to merge.
template <class T>
void run_segments(const AttentionArgs& a, const Plan& plan, const Sizes& sizes, int num_threads) {
    const int64_t heads = a.num_kv_heads, size = sizes.partial(sizes.queries);
    const int64_t count = plan.num_segments * heads;
    auto* memory = static_cast<float*>(
        scratch(Scratch::attention_split, static_cast<size_t>(count * size) * sizeof(float)));
    const auto partial = [&](int64_t segment, int64_t head) {
        return Cutter{memory + (segment * heads + head) * size}.partial(sizes.queries,
                                                                        sizes.value_cols);
    };
    parallel_tasks(count, num_threads, [&](int64_t task) {
        const int64_t segment = task / heads, head = task % heads;
        const Planned* block = plan.blocks;
        while (segment >= block->before + block->segments()) block++;
        Workspace w = workspace(a, sizes);
        BlockAttention<T> attention(a, block->rows, head, w);
        attention.load_queries();
        attention.segment(block->begin + segment - block->before, partial(segment, head));
    });
    parallel_tasks(plan.num_blocks * heads, num_threads, [&](int64_t task) {
        const Planned& block = plan.blocks[task / heads];
        const int64_t head = task % heads;
        Workspace w = workspace(a, sizes);
        BlockAttention<T> attention(a, block.rows, head, w);
        attention.clear(w.total);
        for (int64_t s = 0; s < block.segments(); s++) {
            attention.merge_all(w.total, partial(block.before + s, head));
        }
        attention.finish(w.total);
    });
}

template <class T>
void attend(const AttentionArgs& a) {
    const Sizes sizes(a);
    const Plan p = plan(a, sizes.rows_per_block);
    if (p.few.count > 0) attention_few(a, p.few);
    const int64_t tasks = p.num_blocks * a.num_kv_heads;
    if (tasks == 0) return;
    const int64_t keys = p.num_segments * kSegment / greater(p.num_blocks, 1);
    const int64_t queries = a.batch.num_rows * a.num_q_heads / tasks;
    const int64_t cost = keys * a.head_dim * (queries / 2 + 2);
    const int threads = worthwhile_threads(greater(tasks, p.num_segments), cost, a.num_threads);
    const bool few = threads > 1 && tasks < 4 * threads && p.num_segments > p.num_blocks;
    few ? run_segments<T>(a, p, sizes, threads) : run_blocks<T>(a, p, sizes, threads);
}

}  // namespace

void attention(const AttentionArgs& a) {
    a.cache_dtype == Dtype::bf16 ? attend<uint16_t>(a) : attend<float>(a);
}

}  // namespace tlt::TLT_ISA
