// The machine's ceilings, as kernels: nothing but loads, nothing but multiply-adds. Benches print
// them beside results.
//
// Owns: the loops. Does not know: time (the caller measures it) or what the numbers are compared
// with. Invariant: out[0] is the work that was done, in bytes or FLOPs over all threads; out[1]
// depends on every operation, so that none can be left out.
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/vec.h"

#if defined(TLT_ISA_BF16_DOT)
#include <immintrin.h>
#endif

namespace tlt::TLT_ISA {
namespace {

// Enough independent chains to hide the latency of two units, few enough to stay in registers.
#if defined(TLT_ISA_AVX512)
constexpr int kChains = 12;
#elif defined(TLT_ISA_AVX2)
constexpr int kChains = 6;
#else
constexpr int kChains = 2;
#endif

constexpr int64_t kLine = 16;  // int32 values of a cache line
constexpr int kStreams = 2;  // each thread reads two places at once: one prefetcher alone is slower

int32_t read_part(const int32_t* data, int64_t count) {
    constexpr int kAhead = 4;
    const int64_t stream = count / kStreams / (kAhead * kLine) * (kAhead * kLine);
    I16 sum[kStreams][kAhead];
    for (auto& lines : sum) {
        for (I16& line : lines) line = splat_i(0);
    }
    for (int64_t i = 0; i < stream; i += kAhead * kLine) {
#pragma GCC unroll 2
        for (int s = 0; s < kStreams; s++) {
#pragma GCC unroll 4
            for (int j = 0; j < kAhead; j++) {
                sum[s][j] = sum[s][j] ^ load_i(data + s * stream + i + j * kLine);
            }
        }
    }
    I16 all = splat_i(0);
    for (const auto& lines : sum) {
        for (const I16& line : lines) all = all ^ line;
    }
    int32_t lanes[16], total = 0;
    store_i(lanes, all);
    for (const int32_t lane : lanes) total ^= lane;
    return total;
}

float fma_part(int64_t iterations) {
    V16 acc[kChains];
    for (int c = 0; c < kChains; c++) acc[c] = splat(1.0f + static_cast<float>(c));
    const V16 scale = splat(0.999f), step = splat(0.001f);
    for (int64_t i = 0; i < iterations; i++) {
#pragma GCC unroll 12
        for (int c = 0; c < kChains; c++) acc[c] = fma(acc[c], scale, step);
    }
    V16 total = acc[0];
    for (int c = 1; c < kChains; c++) total = total + acc[c];
    return hsum(total);
}

}  // namespace

void read_ceiling(const CeilingArgs& args) {
    const int threads = args.num_threads;
    const int64_t part = args.count / 4 / threads;
    int32_t total = 0;
    parallel_tasks(threads, threads, [&](int64_t t) {
        const int32_t sum = read_part(static_cast<const int32_t*>(args.data) + t * part, part);
        __atomic_fetch_xor(&total, sum, __ATOMIC_RELAXED);
    });
    constexpr int64_t kBlock = 4 * kLine * kStreams;
    args.out[0] = static_cast<double>(part / kBlock * kBlock * 4 * threads);
    args.out[1] = total;
}

void fma_ceiling(const CeilingArgs& args) {
    const int threads = args.num_threads;
    int32_t total = 0;
    parallel_tasks(threads, threads, [&](int64_t) {
        const float sum = fma_part(args.count);
        __atomic_fetch_add(&total, static_cast<int32_t>(sum), __ATOMIC_RELAXED);
    });
    args.out[0] = 2.0 * 16 * kChains * static_cast<double>(args.count) * threads;
    args.out[1] = total;
}

#if defined(TLT_ISA_BF16_DOT)
void bf16_dot_ceiling(const CeilingArgs& args) {
    const int threads = args.num_threads;
    int32_t total = 0;
    parallel_tasks(threads, threads, [&](int64_t) {
        V16 acc[kChains];
        for (int c = 0; c < kChains; c++) acc[c] = splat(static_cast<float>(c));
        const auto pairs = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3a80));  // 2^-10
        for (int64_t i = 0; i < args.count; i++) {
#pragma GCC unroll 12
            for (int c = 0; c < kChains; c++) {
                acc[c].v = _mm512_dpbf16_ps(acc[c].v, pairs, pairs);
            }
        }
        V16 all = acc[0];
        for (int c = 1; c < kChains; c++) all = all + acc[c];
        __atomic_fetch_add(&total, static_cast<int32_t>(hsum(all)), __ATOMIC_RELAXED);
    });
    args.out[0] = 2.0 * 32 * kChains * static_cast<double>(args.count) * threads;
    args.out[1] = total;
}
#endif

}  // namespace tlt::TLT_ISA
