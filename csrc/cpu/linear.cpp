// `linear` on the CPU: out [R, N] = x [R, K] @ weight^T + bias, fp32 accumulation.
//
// Owns: how rows, panels and threads are cut. Does not know: what a tile computes
// (cpu/linear_tile.h). Rows are cut into even groups of at most kMaxRows and repacked as
// x[step][row of group]. A unit of work is a block of panels that fits in a thread's L2 cache with
// a range of groups passing over it, so that the weight is read from memory once whatever the
// number of rows. Threads walk contiguous ranges of units. Invariant: cutting changes which tile
// computes an element, never the order in which it is accumulated.
#include "common/scratch.h"
#include "cpu/kernels.h"
#include "cpu/linear_pack.h"
#include "cpu/linear_tile.h"
#include "cpu/parallel.h"
#include "cpu/transpose.h"
#include "cpu/vec.h"

namespace tlt::TLT_ISA {
namespace {

constexpr int64_t kStreamBytes =
    48 << 10;  // of a block that one group passes over: a few microseconds
constexpr int64_t kCacheBytes = 256 << 10;  // of a block that several groups pass over: in L2
constexpr int64_t kUnitsPerThread = 8;
constexpr int64_t kSmallWork =
    32 << 10;  // multiply-adds that are done before a thread has woken up
constexpr int64_t kSmallPack = 16 << 10;  // elements that the caller repacks alone

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
    int largest() const { return size(0); }
};

template <class Kind>
struct Problem {
    using X = typename Kind::X;
    const LinearArgs& args;
    const LinearWeight& weight;
    RowGroups groups;
    int64_t steps;    // of packed x
    const X* packed;  // group g at packed + steps * groups.first(g)
};

// Rows of a group as packed[step][size]. Whole vectors are stored, so that the end of one step is
// overwritten by the next; only the last ones are cut to size.
template <class Kind>
void pack_group(const Problem<Kind>& q, int64_t group, typename Kind::X* packed) {
    const int64_t k = q.weight.k, first = q.groups.first(group);
    const int size = q.groups.size(group);
    auto* to = reinterpret_cast<int32_t*>(packed + q.steps * first);
    const int32_t* const end = to + q.steps * size;
    for (int64_t step = 0; step < q.steps; step += 16) {
        const int64_t count = smaller(16, q.steps - step);
        I16 words[16];
        for (int m = 0; m < size; m++) words[m] = Kind::words(q.args.x + (first + m) * k, step, k);
        if (size == 1) {
            store_i_n(to, words[0], count);
            to += count;
            continue;
        }
        for (int m = size; m < 16; m++) words[m] = splat_i(0);
        transpose16(words);
        for (int64_t i = 0; i < count; i++, to += size) {
            if (to + 16 <= end) {
                store_i(to, words[i]);
            } else {
                store_i_n(to, words[i], size);  // behind `end` another thread packs another group
            }
        }
    }
}

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
        case 1:
            return sweep<Kind, 1>(q, group, panel, panel_end);
        case 2:
            return sweep<Kind, 2>(q, group, panel, panel_end);
        case 3:
            return sweep<Kind, 3>(q, group, panel, panel_end);
        case 4:
            return sweep<Kind, 4>(q, group, panel, panel_end);
#if defined(TLT_ISA_AVX2) || defined(TLT_ISA_AVX512)
        case 5:
            return sweep<Kind, 5>(q, group, panel, panel_end);
        case 6:
            return sweep<Kind, 6>(q, group, panel, panel_end);
#endif
#if defined(TLT_ISA_AVX512)
        case 7:
            return sweep<Kind, 7>(q, group, panel, panel_end);
        case 8:
            return sweep<Kind, 8>(q, group, panel, panel_end);
#endif
    }
}

// Panels by groups, cut into units; unit i has block i / num_chunks and range of groups i %
// num_chunks.
struct Units {
    int64_t block;  // panels
    int64_t num_blocks, num_chunks;
};

Units units_of(const LinearWeight& w, const RowGroups& groups, int num_threads) {
    const int64_t width = tile_panels(groups.largest());
    const int64_t bytes = groups.num_groups == 1 ? kStreamBytes : kCacheBytes;
    const int64_t tiles = bytes / (width * w.panel_bytes + 1);
    const int64_t block = width * (tiles > 0 ? tiles : 1), num_blocks = ceil_div(w.panels, block);
    const int64_t chunks = ceil_div(kUnitsPerThread * num_threads, num_blocks);
    return {block, num_blocks, smaller(chunks, groups.num_groups)};
}

template <class Kind>
void run_unit(const Problem<Kind>& q, const Units& units, int64_t i) {
    const int64_t panel = i / units.num_chunks * units.block, chunk = i % units.num_chunks;
    const int64_t panel_end = smaller(panel + units.block, q.weight.panels);
    const int64_t group = q.groups.num_groups * chunk / units.num_chunks;
    const int64_t group_end = q.groups.num_groups * (chunk + 1) / units.num_chunks;
    for (int64_t g = group; g < group_end; g++) sweep_rows<Kind>(q, g, panel, panel_end);
}

template <class Kind>
void linear_of(const LinearArgs& args) {
    using X = typename Kind::X;
    const LinearWeight& w = *args.weight;
    const int threads = args.num_rows * w.n * w.k < kSmallWork ? 1 : args.num_threads;
    Problem<Kind> q{args, w, RowGroups(args.num_rows), Kind::steps(w.k), nullptr};
    if (args.num_rows == 1 && Kind::kOneRowIsPacked) {
        q.packed = reinterpret_cast<const X*>(args.x);
    } else {
        const int64_t count = q.steps * args.num_rows;
        auto* packed =
            static_cast<X*>(scratch(Scratch::linear_x, static_cast<size_t>(count) * sizeof(X)));
        parallel_tasks(q.groups.num_groups, count < kSmallPack ? 1 : threads,
                       [&](int64_t group) { pack_group<Kind>(q, group, packed); });
        q.packed = packed;
    }
    const Units units = units_of(w, q.groups, threads);
    parallel_lanes(units.num_blocks * units.num_chunks, threads,
                   [&](int64_t i, bool) { run_unit<Kind>(q, units, i); });
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
