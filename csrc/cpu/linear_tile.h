// The inner loops of `linear`: a tile of M rows by P panels of 16 columns, over all of K, in
// registers.
//
// Owns: the order of accumulation and the shapes of tiles. Does not know: threads, blocks, where
// rows come from. Three kinds of arithmetic. Each says how many steps K takes, gives the words of
// steps [step, step + 16) of one row, and multiplies a line; each with the packed weight of
// cpu/linear_pack.h and activations packed as x[step][M]:
//   Bf16Fma: bf16 weights, fp32 activations. A line of 64 bytes holds two steps.
//   Fp32Fma: fp32 weights, fp32 activations. A line is one step.
//   Bf16Dot: bf16 weights, activations rounded to bf16, pairs of them in 32 bits. A line is one
//   step of vdpbf16ps.
// Invariant: an output element is ((+0 + x0 w0) + x1 w1) + ... by fused multiply-add, whatever M
// and P are, so its bits do not depend on the rows around it; and (but for Bf16Dot) not on the
// instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/linear_pack.h"
#include "cpu/vec.h"

namespace tlt::TLT_ISA {

// Rows of the largest tile, and panels that a tile of m rows takes: all m * p accumulators, the
// weights of p panels, one activation and one constant fit in the registers (32 zmm; 16 ymm, two to
// a vector).
#if defined(TLT_ISA_AVX512)
constexpr int kMaxRows = 8;
constexpr int tile_panels(int m) { return m <= 0 ? 4 : 3; }
#elif defined(TLT_ISA_AVX2)
constexpr int kMaxRows = 6;
constexpr int tile_panels(int m) { return m == 1 ? 3 : m == 2 ? 2 : 1; }
#else
constexpr int kMaxRows = 4;
constexpr int tile_panels(int) { return 1; }
#endif

template <int M, int P>
struct Accumulators {
    V16 at[M][P];
};

// Hides where a pointer came from, so that the second read of a line stays a memory operand and
// needs no register.
template <class T>
static inline T* opaque(T* p) {
    asm("" : "+r"(p));
    return p;
}

// The two bf16 of each 32-bit word of a line, as fp32.
static inline V16 first_of_pairs(const std::byte* line) {
    return as_float(shl<16>(load_i(reinterpret_cast<const int32_t*>(line))));
}
static inline V16 second_of_pairs(const std::byte* line) {
    const I16 words = load_i(reinterpret_cast<const int32_t*>(line));
#if defined(TLT_ISA_AVX2)
    // The mask stays in memory: with twelve accumulators there is no register for it, and the
    // compiler would spill an accumulator to make one.
    alignas(32) static const uint32_t mask[8] = {0xffff0000u, 0xffff0000u, 0xffff0000u,
                                                 0xffff0000u, 0xffff0000u, 0xffff0000u,
                                                 0xffff0000u, 0xffff0000u};
    const auto& memory = reinterpret_cast<const __m256i&>(mask);
    I16 odd;
    asm("vpand %2, %1, %0" : "=x"(odd.lo) : "x"(words.lo), "m"(memory));
    asm("vpand %2, %1, %0" : "=x"(odd.hi) : "x"(words.hi), "m"(memory));
    return as_float(odd);
#else
    return as_float(words & splat_i(static_cast<int32_t>(0xffff0000u)));
#endif
}

template <int M, int P>
static inline void multiply_add(Accumulators<M, P>& acc, const float* x, const V16 (&w)[P]) {
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
        const V16 b = splat(x[m]);
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) acc.at[m][p] = fma(b, w[p], acc.at[m][p]);
    }
}

// Activations as they are: fp32, one step for each k.
struct Fp32Activations {
    using X = float;
    static constexpr bool kOneRowIsPacked = true;

    static inline int64_t steps(int64_t k) { return k; }
    static inline I16 words(const float* row, int64_t step, int64_t k) {
        return as_int(load_n(row + step, k - step));
    }
};

struct Bf16Fma : Fp32Activations {
    static constexpr int kStepsPerLine = 2;

    template <int M, int P, int steps>
    static inline void line(Accumulators<M, P>& acc, const X* x, const std::byte* w,
                            int64_t stride) {
        V16 b[P];
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) b[p] = first_of_pairs(w + p * stride);
        multiply_add<M, P>(acc, x, b);
        if constexpr (steps == 2) {
            w = opaque(w);
#pragma GCC unroll 8
            for (int p = 0; p < P; p++) b[p] = second_of_pairs(w + p * stride);
            multiply_add<M, P>(acc, x + M, b);
        }
    }
};

struct Fp32Fma : Fp32Activations {
    static constexpr int kStepsPerLine = 1;

    template <int M, int P, int steps>
    static inline void line(Accumulators<M, P>& acc, const X* x, const std::byte* w,
                            int64_t stride) {
        V16 b[P];
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) b[p] = load(reinterpret_cast<const float*>(w + p * stride));
        multiply_add<M, P>(acc, x, b);
    }
};

#if defined(TLT_ISA_BF16_DOT)
struct Bf16Dot {
    using X = uint32_t;
    static constexpr bool kOneRowIsPacked = false;  // it has to be rounded
    static constexpr int kStepsPerLine = 1;

    static inline int64_t steps(int64_t k) { return (k + 1) / 2; }
    static inline I16 words(const float* row, int64_t step, int64_t k) {
        const V16 low = load_n(row + 2 * step, k - 2 * step);
        const int64_t left = k - 2 * step - 16;
        const V16 high = left > 0 ? load_n(row + 2 * step + 16, left) : zero();
        return {reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high.v, low.v))};
    }

    template <int M, int P, int steps>
    static inline void line(Accumulators<M, P>& acc, const X* x, const std::byte* w,
                            int64_t stride) {
        __m512bh b[P];
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) {
            b[p] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(w + p * stride));
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const auto a = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(x[m])));
#pragma GCC unroll 8
            for (int p = 0; p < P; p++) {
                acc.at[m][p].v = _mm512_dpbf16_ps(acc.at[m][p].v, a, b[p]);
            }
        }
    }
};
#endif

// Where a tile's results go: out + m * row_stride, `columns` of them (the last panel of a weight
// may be partial).
struct TileOut {
    float* out;
    int64_t row_stride;
    const float* bias;  // of the tile's first column, or null
    int64_t columns;
};

template <int M, int P>
static inline void store_tile(Accumulators<M, P>& acc, const TileOut& to) {
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) {
        const int64_t columns = to.columns - p * 16;
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            V16 y = acc.at[m][p];
            if (to.bias != nullptr) y = y + load(to.bias + p * 16);
            float* out = to.out + m * to.row_stride + p * 16;
            if (columns >= 16) {
                store(out, y);
            } else {
                store_n(out, y, columns);
            }
        }
    }
}

// w: first panel of the tile. ahead: bytes from a line to the line to prefetch while reading it.
template <class Kind, int M, int P>
[[gnu::noinline]] static void tile(const typename Kind::X* x, const std::byte* w,
                                   const LinearWeight& weight, int64_t ahead, const TileOut& to) {
    constexpr int kSteps = Kind::kStepsPerLine;
    const int64_t stride = weight.panel_bytes;
    const int64_t whole_lines = kSteps == 2 ? weight.k / 2 : stride / 64;
    Accumulators<M, P> acc;
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) acc.at[m][p] = zero();
    }
    for (int64_t i = 0; i < whole_lines; i++) {
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) __builtin_prefetch(w + p * stride + ahead, 0, 2);
        Kind::template line<M, P, kSteps>(acc, x, w, stride);
        x += kSteps * M;
        w += 64;
    }
    if (kSteps == 2 && weight.k % 2 != 0) Kind::template line<M, P, 1>(acc, x, w, stride);
    store_tile<M, P>(acc, to);
}

}  // namespace tlt::TLT_ISA
