// Attention of blocks of few queries: divides the keys and gives them to threads.
//
// Owns: units of work, each some chunks of one block, and the order in which their partial results
// are joined. A unit takes all kv heads, so that it reads whole pages, unless there are too few
// units for the threads. Does not know the arithmetic (attention_few.h) or masks
// (attention_few_block.h). Invariant: chunks are joined to segments and segments to the total in
// order, however units are cut, so the bits are those of attention.cpp's blocks.
#include "common/scratch.h"
#include "cpu/attention_blocks.h"
#include "cpu/attention_few_block.h"
#include "cpu/parallel.h"

namespace tlt::TLT_ISA {
namespace {

// A block, the segments that its rows see, and its first unit.
struct Planned {
    RowBlock rows;
    Span span;
    int64_t begin, end, first_unit;  // parts (of grain chunks)
};

struct Unit {
    int64_t block, part;
};

struct Plan {
    Planned* blocks;
    Unit* units;
    int64_t num_blocks, num_units;
    int64_t grain;       // chunks of a part: a segment's, or 1
    int64_t head_units;  // a part is cut into so many units
};

int64_t parts_of(const Span& s, int64_t keys) {
    return greater(0, (s.end + keys - 1) / keys - s.begin / keys);
}

Plan plan_parts(const AttentionArgs& a, const RowBlocks& few, int64_t grain, int64_t head_units) {
    const int64_t keys = grain * kChunk;
    int64_t num_units = 0;
    for (int64_t i = 0; i < few.count; i++)
        num_units += parts_of(block_span(a, few.blocks[i]), keys);
    const auto bytes = static_cast<size_t>(few.count) * sizeof(Planned) +
                       static_cast<size_t>(num_units) * sizeof(Unit);
    auto* blocks = static_cast<Planned*>(scratch(Scratch::attention_plan, bytes));
    auto* units = reinterpret_cast<Unit*>(blocks + few.count);
    Plan plan{blocks, units, few.count, 0, grain, head_units};
    for (int64_t i = 0; i < few.count; i++) {
        const Span s = block_span(a, few.blocks[i]);
        const int64_t begin = s.begin / keys, end = begin + parts_of(s, keys);
        blocks[i] = {few.blocks[i], s, begin, end, plan.num_units};
        for (int64_t part = begin; part < end; part++) units[plan.num_units++] = {i, part};
    }
    return plan;
}

template <class T>
class FewRun {
  public:
    FewRun(const AttentionArgs& a, const Plan& plan)
        : a_(a),
          plan_(plan),
          partial_(few_partial_floats(FewWorkspace::padded(a)) * a.num_kv_heads),
          partials_(static_cast<float*>(
              scratch(Scratch::attention_split,
                      static_cast<size_t>(partial_ * plan.num_units) * sizeof(float)))) {}

    void units(int threads) const {
        parallel_lanes(plan_.num_units * plan_.head_units, threads,
                       [&](int64_t task, bool fresh) { unit(task, fresh); });
    }

    // Joins the parts of blocks and writes their outputs, where that was left to do.
    void totals(int threads) const {
        const int64_t parts = plan_.num_units / greater(1, plan_.num_blocks);
        parallel_ranges(plan_.num_blocks, (parts + 1) * partial_, threads,
                        [&](int64_t begin, int64_t end) {
                            for (int64_t i = begin; i < end; i++) total(plan_.blocks[i]);
                        });
    }

  private:
    FewWorkspace workspace() const {
        const auto bytes = static_cast<size_t>(FewWorkspace::floats(a_)) * sizeof(float);
        return {a_, static_cast<float*>(scratch(Scratch::attention, bytes))};
    }
    const Unit& unit_of(int64_t task) const { return plan_.units[task / plan_.head_units]; }
    const Planned& block_of(int64_t task) const { return plan_.blocks[unit_of(task).block]; }
    Heads heads_of(int64_t task) const {
        const int64_t each = a_.num_kv_heads / plan_.head_units, i = task % plan_.head_units;
        return {i * each, (i + 1) * each};
    }
    bool alone(const Planned& block) const {  // its one unit writes the outputs
        return plan_.grain == kSegmentChunks && block.end - block.begin == 1;
    }
    float* partial(int64_t unit) const { return partials_ + unit * partial_; }
    // where a unit's first (begin) and last chunk begin
    Span starts(int64_t task) const {
        const Planned& b = block_of(task);
        const int64_t part = unit_of(task).part * plan_.grain;
        const int64_t first = greater(part, b.span.begin / kChunk);
        const int64_t last = lesser(part + plan_.grain - 1, (b.span.end - 1) / kChunk);
        return {first * kChunk, b.span.tail, last * kChunk};
    }
    FewAttention<T> attention_of(int64_t task, FewWorkspace& w) const {
        return {a_, block_of(task).rows, heads_of(task), w};
    }

    void unit(int64_t task, bool fresh) const {
        const Planned& block = block_of(task);
        FewWorkspace w = workspace();
        const FewAttention<T> attention = attention_of(task, w);
        attention.load_queries();
        float* into = alone(block) ? w.one_segment : partial(task / plan_.head_units);
        attention.clear(into);
        const Span at = starts(task);
        for (int64_t start = at.begin; start <= at.end; start += kChunk) {
            Prefetcher ahead;
            if (fresh && start == at.begin) {
                attention.foresee(a_.k_cache, start, at.tail, ahead);
                ahead.all();
                attention.foresee(a_.v_cache, start, at.tail, ahead);
            }
            foresee_next(task, start, attention, w, ahead);
            ahead.spread(steps(task, lesser(kChunk, at.tail - start)));
            attention.chunk(start, into, ahead);
        }
        if (!alone(block)) return;
        attention.clear(w.total);
        attention.join_all(w.total, into);
        attention.finish(w.total);
    }

    // The next chunk of this unit, or of the unit most likely to be this thread's next.
    void foresee_next(int64_t task, int64_t start, const FewAttention<T>& attention,
                      FewWorkspace& w, Prefetcher& ahead) const {
        const Span at = starts(task);
        if (start < at.end) {
            attention.foresee(a_.k_cache, start + kChunk, at.tail, ahead);
            attention.foresee(a_.v_cache, start + kChunk, at.tail, ahead);
        } else if (task + 1 < plan_.num_units * plan_.head_units) {
            const FewAttention<T> next = attention_of(task + 1, w);
            const Span then = starts(task + 1);
            next.foresee(a_.k_cache, then.begin, then.tail, ahead);
            next.foresee(a_.v_cache, then.begin, then.tail, ahead);
        }
    }

    // How often `chunk` steps, about.
    int64_t steps(int64_t task, int64_t keys) const {
        const Heads heads = heads_of(task);
        const int64_t words = (a_.head_dim / kWordValues<T> + 15) / 16;
        return (heads.end - heads.begin) * ((greater(keys, 1) + 15) / 16) * (words + 1);
    }

    void total(const Planned& block) const {
        if (alone(block)) return;
        FewWorkspace w = workspace();
        const FewAttention<T> attention(a_, block.rows, {0, a_.num_kv_heads}, w);
        attention.clear(w.total);
        for (int64_t part = block.begin; part < block.end;) {
            const auto of = [&](int64_t p) { return partial(block.first_unit + p - block.begin); };
            if (plan_.grain == kSegmentChunks) {
                attention.join_all(w.total, of(part++));
                continue;
            }
            attention.clear(w.one_segment);
            const int64_t stop = lesser(round_up(part + 1, kSegmentChunks), block.end);
            for (; part < stop; part++) attention.join_all(w.one_segment, of(part));
            attention.join_all(w.total, w.one_segment);
        }
        attention.finish(w.total);
    }

    const AttentionArgs& a_;
    const Plan& plan_;
    const int64_t partial_;  // floats of the partials [Hkv] of one unit
    float* const partials_;
};

template <class T>
void attend_few(const AttentionArgs& a, const RowBlocks& few) {
    int64_t segments = 0, chunks = 0;
    for (int64_t i = 0; i < few.count; i++) {
        const Span s = block_span(a, few.blocks[i]);
        segments += parts_of(s, kSegment);
        chunks += parts_of(s, kChunk);
    }
    // half of what parallel.h calls a step
    const int64_t queries = a.num_q_heads / a.num_kv_heads;
    const int64_t cost = kChunk * a.head_dim * (queries / 2 + 2) / 2;
    const int threads = worthwhile_threads(chunks * a.num_kv_heads, cost, a.num_threads);
    const int64_t enough = threads > 1 ? 4 * threads : 0;  // units, so that threads end together
    const Plan plan = plan_parts(a, few, segments >= enough ? kSegmentChunks : 1,
                                 chunks >= enough ? 1 : a.num_kv_heads);
    const FewRun<T> run(a, plan);
    run.units(threads);
    run.totals(threads);
}

}  // namespace

void attention_few(const AttentionArgs& a, const RowBlocks& few) {
    a.cache_dtype == Dtype::bf16 ? attend_few<uint16_t>(a, few) : attend_few<float>(a, few);
}

}  // namespace tlt::TLT_ISA
