// `linear` on the CPU: out [R, N] = x [R, K] @ weight^T + bias, fp32 accumulation.
//
// Owns: how rows, panels and threads are cut. Does not know: what a tile computes (cpu/linear_tile.h).
// Rows are cut into even groups of at most kMaxRows and repacked as x[k][row of group]. A thread takes a range of
// panels (and, where there are more threads than panels feed, a range of groups) and keeps a block of panels in its
// L2 cache while all its groups pass over it, so that the weight is read from memory once whatever the number of rows.
// Invariant: cutting changes which tile computes an element, never the order in which it is accumulated.
#include <omp.h>

#include "common/scratch.h"
#include "cpu/kernels.h"
#include "cpu/linear_pack.h"
#include "cpu/linear_tile.h"
#include "cpu/vec.h"

namespace tlt::TLT_ISA {
namespace {

constexpr int64_t kBlockBytes = 256 << 10;  // of weights, in a thread's L2

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows in even groups: the first `num_rows % num_groups` groups have one row more than the others.
struct RowGroups {
    int64_t num_rows, num_groups;

    explicit RowGroups(int64_t rows) : num_rows(rows), num_groups(ceil_div(rows, kMaxRows)) {}
    int64_t first(int64_t g) const {
        return g * (num_rows / num_groups) + smaller(g, num_rows % num_groups);
    }
    int size(int64_t g) const { return static_cast<int>(first(g + 1) - first(g)); }
};

// What a thread computes: panels [panel, panel_end) of groups [group, group_end).
struct Part {
    int64_t panel, panel_end, group, group_end;
};

// Threads as a grid of `across` ranges of panels by `num_threads / across` ranges of groups, by the least work of the
// busiest thread; on equal terms fewer ranges of groups, since each of those reads the weight again.
Part part_of(int64_t panels, int64_t groups, int num_threads, int thread) {
    int best = num_threads;
    int64_t least = INT64_MAX;
    for (int across = num_threads; across >= 1; across--) {
        if (num_threads % across != 0) continue;
        const int64_t work = ceil_div(panels, across) * ceil_div(groups, num_threads / across);
        if (work < least) best = across, least = work;
    }
    const int down = num_threads / best;
    const int64_t i = thread % best, j = thread / best;
    return {panels * i / best, panels * (i + 1) / best, groups * j / down, groups * (j + 1) / down};
}

// Rows [first, first + size) of x as packed[step][size], steps [step, step_end). A step is one k.
void pack_group(const float* x, int64_t k, int64_t first, int size, int64_t step, int64_t step_end,
                float* packed) {
    for (int m = 0; m < size; m++) {
        const float* row = x + (first + m) * k;
        for (int64_t i = step; i < step_end; i++) packed[i * size + m] = row[i];
    }
}

// The same in bf16, a step being a pair of k; K is padded with zero.
[[maybe_unused]] void pack_group(const float* x, int64_t k, int64_t first, int size, int64_t step,
                                 int64_t step_end, uint32_t* packed) {
    for (int m = 0; m < size; m++) {
        const float* row = x + (first + m) * k;
        for (int64_t i = step; i < step_end; i++) {
            const uint32_t low = float_to_bf16(row[2 * i]);
            const uint32_t high = 2 * i + 1 < k ? float_to_bf16(row[2 * i + 1]) : 0;
            packed[i * size + m] = low | high << 16;
        }
    }
}

template <class Kind>
struct Problem {
    using X = typename Kind::X;
    const LinearArgs& args;
    const LinearWeight& weight;
    RowGroups groups;
    int64_t steps;    // of packed x
    const X* packed;  // group g at packed + steps * groups.first(g)
};

template <class Kind, int M, int P>
void run_tile(const Problem<Kind>& q, int64_t group, int64_t panel) {
    const LinearWeight& w = q.weight;
    const int64_t first = q.groups.first(group);
    const TileOut to{q.args.out + first * w.n + panel * 16, w.n,
                     w.bias == nullptr ? nullptr : w.bias + panel * 16, w.n - panel * 16};
    tile<Kind, M, P>(q.packed + q.steps * first, w.data + panel * w.panel_bytes, w,
                     P * w.panel_bytes, to);
}

// Panels [panel, panel_end) of one group, of M rows.
template <class Kind, int M>
void sweep(const Problem<Kind>& q, int64_t group, int64_t panel, int64_t panel_end) {
    constexpr int kPanels = tile_panels(M);
    for (; panel + kPanels <= panel_end; panel += kPanels) {
        run_tile<Kind, M, kPanels>(q, group, panel);
    }
    for (; panel < panel_end; panel++) run_tile<Kind, M, 1>(q, group, panel);
}

template <class Kind>
void sweep_rows(const Problem<Kind>& q, int64_t group, int64_t panel, int64_t panel_end) {
    switch (q.groups.size(group)) {
        case 1: return sweep<Kind, 1>(q, group, panel, panel_end);
        case 2: return sweep<Kind, 2>(q, group, panel, panel_end);
        case 3: return sweep<Kind, 3>(q, group, panel, panel_end);
        case 4: return sweep<Kind, 4>(q, group, panel, panel_end);
#if defined(TLT_ISA_AVX2) || defined(TLT_ISA_AVX512)
        case 5: return sweep<Kind, 5>(q, group, panel, panel_end);
        case 6: return sweep<Kind, 6>(q, group, panel, panel_end);
#endif
#if defined(TLT_ISA_AVX512)
        case 7: return sweep<Kind, 7>(q, group, panel, panel_end);
        case 8: return sweep<Kind, 8>(q, group, panel, panel_end);
#endif
    }
}

template <class Kind>
void run_part(const Problem<Kind>& q, const Part& part) {
    int64_t block = part.panel_end - part.panel;
    if (part.group_end - part.group > 1) {
        const int64_t unit = tile_panels(kMaxRows);
        const int64_t units = kBlockBytes / (unit * q.weight.panel_bytes);
        block = unit * (units > 0 ? units : 1);
    }
    for (int64_t p = part.panel; p < part.panel_end; p += block) {
        const int64_t end = smaller(p + block, part.panel_end);
        for (int64_t g = part.group; g < part.group_end; g++) sweep_rows<Kind>(q, g, p, end);
    }
}

// This thread's share of the packing: its range of steps, of every group.
template <class Kind>
void pack_share(const Problem<Kind>& q, typename Kind::X* packed, int thread, int num_threads) {
    const int64_t step = q.steps * thread / num_threads;
    const int64_t step_end = q.steps * (thread + 1) / num_threads;
    for (int64_t g = 0; g < q.groups.num_groups; g++) {
        const int64_t first = q.groups.first(g);
        pack_group(q.args.x, q.weight.k, first, q.groups.size(g), step, step_end,
                   packed + q.steps * first);
    }
}

template <class Kind>
void linear_of(const LinearArgs& args) {
    const LinearWeight& w = *args.weight;
    using X = typename Kind::X;
    Problem<Kind> q{args, w, RowGroups(args.num_rows), Kind::kPairs ? (w.k + 1) / 2 : w.k,
                    nullptr};
    X* packed = nullptr;
    if (args.num_rows == 1 && !Kind::kPairs) {
        q.packed = reinterpret_cast<const X*>(args.x);  // one row is packed as it is
    } else {
        const size_t bytes = static_cast<size_t>(q.steps * args.num_rows) * sizeof(X);
        q.packed = packed = static_cast<X*>(scratch(Scratch::linear_x, bytes));
    }
#pragma omp parallel num_threads(args.num_threads)
    {
        const int thread = omp_get_thread_num(), num_threads = omp_get_num_threads();
        if (packed != nullptr) {
            pack_share<Kind>(q, packed, thread, num_threads);
#pragma omp barrier
        }
        run_part<Kind>(q, part_of(w.panels, q.groups.num_groups, num_threads, thread));
    }
}

}  // namespace

void linear(const LinearArgs& args) {
    if (args.num_rows == 0) return;
    if (args.weight->dtype == Dtype::f32) return linear_of<Fp32Fma>(args);
#if defined(TLT_ISA_BF16_DOT)
    return linear_of<Bf16Dot>(args);
#else
    return linear_of<Bf16Fma>(args);
#endif
}

}  // namespace tlt::TLT_ISA
