// How kernels use threads: one region over contiguous ranges, or one over tasks taken as they come.
//
// Owns: the rule that work too small to pay for a region (about 1 us) runs on the caller. Does not
// know what the work is. Invariant: which thread runs what never changes a result, so callers give
// each index its own output.
#pragma once

#include <cstdint>

#include "common/thread_pool.h"

namespace tlt::TLT_ISA {

// Threads worth using for `count` items of `cost` elementary steps each, at least 16k steps a
// thread.
static inline int worthwhile_threads(int64_t count, int64_t cost, int num_threads) {
    constexpr int64_t min_steps = 16384;
    const int64_t by_cost = count * cost / min_steps;
    const int64_t limit = by_cost < count ? by_cost : count;
    return static_cast<int>(limit < num_threads ? (limit < 1 ? 1 : limit) : num_threads);
}

// f(i) for each i in [0, count), in any order, each on the next free thread.
template <class F>
static inline void parallel_tasks(int64_t count, int num_threads, F f) {
    run_tasks(
        num_threads, count, [](void* context, int64_t i) { (*static_cast<F*>(context))(i); }, &f);
}

// f(begin, end) over a partition of [0, count) into contiguous ranges, a few for each thread.
template <class F>
static inline void parallel_ranges(int64_t count, int64_t cost, int num_threads, F f) {
    constexpr int64_t ranges_per_thread =
        2;  // a thread that comes late leaves the other more than half
    const int threads = worthwhile_threads(count, cost, num_threads);
    if (threads <= 1) {
        if (count > 0) f(int64_t{0}, count);
        return;
    }
    const int64_t wanted = threads * ranges_per_thread, ranges = wanted < count ? wanted : count;
    parallel_tasks(ranges, threads,
                   [&](int64_t i) { f(count * i / ranges, count * (i + 1) / ranges); });
}

// f(i, fresh) for each i in [0, count), where neighbouring i share data: each thread walks a
// contiguous range of its own, and when that is done takes from the others what they have not
// begun. fresh: this thread has not just done i - 1.
template <class F>
static inline void parallel_lanes(int64_t count, int num_threads, F f) {
    struct alignas(64) Lane {
        int64_t next, end;
    };
    constexpr int max_lanes = 64;
    const int64_t wanted = num_threads < max_lanes ? num_threads : max_lanes;
    const int64_t lanes = wanted < count ? wanted : count;
    if (lanes <= 1) {
        for (int64_t i = 0; i < count; i++) f(i, i == 0);
        return;
    }
    Lane lane[max_lanes];
    for (int64_t t = 0; t < lanes; t++) lane[t] = {count * t / lanes, count * (t + 1) / lanes};
    parallel_tasks(lanes, num_threads, [&](int64_t own) {
        int64_t last = -1;
        for (int64_t t = 0; t < lanes; t++) {
            Lane& from = lane[(own + t) % lanes];
            for (;;) {
                const int64_t i = __atomic_fetch_add(&from.next, 1, __ATOMIC_RELAXED);
                if (i >= from.end) break;
                f(i, last < 0 || i != last + 1);
                last = i;
            }
        }
    });
}

}  // namespace tlt::TLT_ISA
