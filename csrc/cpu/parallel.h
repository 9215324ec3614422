// How kernels use threads: one region over contiguous ranges, or one over tasks taken as they come.
//
// Owns: the rule that work too small to pay for a region (about 1 us) runs on the caller. Does not know what the
// work is. Invariant: which thread runs what never changes a result, so callers give each index its own output.
#pragma once

#include <omp.h>

#include <cstdint>

namespace tlt::TLT_ISA {

// Threads worth using for `count` items of `cost` elementary steps each, at least 16k steps a thread.
static inline int worthwhile_threads(int64_t count, int64_t cost, int num_threads) {
    constexpr int64_t min_steps = 16384;
    const int64_t by_cost = count * cost / min_steps;
    const int64_t limit = by_cost < count ? by_cost : count;
    return static_cast<int>(limit < num_threads ? (limit < 1 ? 1 : limit) : num_threads);
}

// f(begin, end) over a partition of [0, count) into one contiguous range per thread.
template <class F>
static inline void parallel_ranges(int64_t count, int64_t cost, int num_threads, F f) {
    const int threads = worthwhile_threads(count, cost, num_threads);
    if (threads <= 1) {
        if (count > 0) f(int64_t{0}, count);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
        const int64_t begin = count * me / team, end = count * (me + 1) / team;
        if (begin < end) f(begin, end);
    }
}

// f(i) for each i in [0, count), in any order, each on the next free thread.
template <class F>
static inline void parallel_tasks(int64_t count, int num_threads, F f) {
    const int threads = static_cast<int>(count < num_threads ? count : num_threads);
    if (threads <= 1) {
        for (int64_t i = 0; i < count; i++) f(i);
        return;
    }
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t i = 0; i < count; i++) f(i);
}

}  // namespace tlt::TLT_ISA
