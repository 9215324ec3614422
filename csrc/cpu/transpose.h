// Rearranging whole vectors: the 16 x 16 transpose of attention's keys, the interleaving of its
// values and of Philox words.
//
// Owns: the shuffles, one implementation per instruction set. Does not know what moves. transpose16
// is always inlined: called, its rows would travel through memory. Invariant: bits are moved, never
// computed, so the implementations agree by construction (tests compare the kernels that use them).
#pragma once

#include <cstdint>

#include "cpu/vec.h"

namespace tlt::TLT_ISA {

#if defined(TLT_ISA_AVX512)

// rows[i] lane j becomes rows[j] lane i
[[gnu::always_inline]] static inline void transpose16(I16 rows[16]) {
    __m512i t[16], u[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(rows[i].v, rows[i + 1].v);
        t[i + 1] = _mm512_unpackhi_epi32(rows[i].v, rows[i + 1].v);
    }
    for (int i = 0; i < 16; i += 4) {
        u[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        u[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        u[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        u[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4;
         i++) {  // u[4 g + i]: quarter q holds column 4 q + i of rows 4 g .. 4 g + 3
        const __m512i a = _mm512_shuffle_i32x4(u[i], u[4 + i], 0x88);
        const __m512i b = _mm512_shuffle_i32x4(u[i], u[4 + i], 0xdd);
        const __m512i c = _mm512_shuffle_i32x4(u[8 + i], u[12 + i], 0x88);
        const __m512i d = _mm512_shuffle_i32x4(u[8 + i], u[12 + i], 0xdd);
        rows[i].v = _mm512_shuffle_i32x4(a, c, 0x88);
        rows[4 + i].v = _mm512_shuffle_i32x4(b, d, 0x88);
        rows[8 + i].v = _mm512_shuffle_i32x4(a, c, 0xdd);
        rows[12 + i].v = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
}

// w[j] lane i becomes element 4 i + j of the 64 elements w[0], w[1], w[2], w[3]
static inline void interleave4(I16 w[4]) {
    const __m512i a = _mm512_unpacklo_epi32(w[0].v, w[1].v);
    const __m512i b = _mm512_unpackhi_epi32(w[0].v, w[1].v);
    const __m512i c = _mm512_unpacklo_epi32(w[2].v, w[3].v);
    const __m512i d = _mm512_unpackhi_epi32(w[2].v, w[3].v);
    const __m512i t0 = _mm512_unpacklo_epi64(a, c), t1 = _mm512_unpackhi_epi64(a, c);
    const __m512i t2 = _mm512_unpacklo_epi64(b, d), t3 = _mm512_unpackhi_epi64(b, d);
    const __m512i u0 = _mm512_shuffle_i32x4(t0, t1, 0x44), u1 = _mm512_shuffle_i32x4(t0, t1, 0xee);
    const __m512i u2 = _mm512_shuffle_i32x4(t2, t3, 0x44), u3 = _mm512_shuffle_i32x4(t2, t3, 0xee);
    w[0].v = _mm512_shuffle_i32x4(u0, u2, 0x88);
    w[1].v = _mm512_shuffle_i32x4(u0, u2, 0xdd);
    w[2].v = _mm512_shuffle_i32x4(u1, u3, 0x88);
    w[3].v = _mm512_shuffle_i32x4(u1, u3, 0xdd);
}

// w[j] lane i becomes element 2 i + j of the 32 elements w[0], w[1]
static inline void interleave2(V16 w[2]) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512 first = _mm512_permutex2var_ps(w[0].v, low, w[1].v);
    w[1].v = _mm512_permutex2var_ps(w[0].v, _mm512_add_epi32(low, _mm512_set1_epi32(8)), w[1].v);
    w[0].v = first;
}

#elif defined(TLT_ISA_AVX2)

[[gnu::always_inline]] static inline void transpose8(const __m256i in[8], __m256i out[8]) {
    __m256i t[8], u[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(in[i], in[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(in[i], in[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        u[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        u[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        u[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        u[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        out[i] = _mm256_permute2x128_si256(u[i], u[4 + i], 0x20);
        out[4 + i] = _mm256_permute2x128_si256(u[i], u[4 + i], 0x31);
    }
}

// rows[i] lane j becomes rows[j] lane i
[[gnu::always_inline]] static inline void transpose16(I16 rows[16]) {
    __m256i in[4][8], out[4][8];
    for (int i = 0; i < 8; i++) {
        in[0][i] = rows[i].lo, in[1][i] = rows[i].hi;
        in[2][i] = rows[8 + i].lo, in[3][i] = rows[8 + i].hi;
    }
    for (int i = 0; i < 4; i++) transpose8(in[i], out[i]);
    for (int i = 0; i < 8; i++) {
        rows[i] = {out[0][i], out[2][i]};
        rows[8 + i] = {out[1][i], out[3][i]};
    }
}

// two vectors of 8 elements from each of four vectors: counters c0, c1 and so on
static inline void interleave4_half(__m256i a, __m256i b, __m256i c, __m256i d, I16* first,
                                    I16* second) {
    const __m256i ab_lo = _mm256_unpacklo_epi32(a, b), ab_hi = _mm256_unpackhi_epi32(a, b);
    const __m256i cd_lo = _mm256_unpacklo_epi32(c, d), cd_hi = _mm256_unpackhi_epi32(c, d);
    const __m256i t0 = _mm256_unpacklo_epi64(ab_lo, cd_lo);
    const __m256i t1 = _mm256_unpackhi_epi64(ab_lo, cd_lo);
    const __m256i t2 = _mm256_unpacklo_epi64(ab_hi, cd_hi);
    const __m256i t3 = _mm256_unpackhi_epi64(ab_hi, cd_hi);
    *first = {_mm256_permute2x128_si256(t0, t1, 0x20), _mm256_permute2x128_si256(t2, t3, 0x20)};
    *second = {_mm256_permute2x128_si256(t0, t1, 0x31), _mm256_permute2x128_si256(t2, t3, 0x31)};
}

// w[j] lane i becomes element 4 i + j of the 64 elements w[0], w[1], w[2], w[3]
static inline void interleave4(I16 w[4]) {
    I16 out[4];
    interleave4_half(w[0].lo, w[1].lo, w[2].lo, w[3].lo, &out[0], &out[1]);
    interleave4_half(w[0].hi, w[1].hi, w[2].hi, w[3].hi, &out[2], &out[3]);
    for (int i = 0; i < 4; i++) w[i] = out[i];
}

static inline V16 interleave2_half(__m256 a, __m256 b) {
    const __m256 low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
    return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
}

// w[j] lane i becomes element 2 i + j of the 32 elements w[0], w[1]
static inline void interleave2(V16 w[2]) {
    const V16 first = interleave2_half(w[0].lo, w[1].lo);
    w[1] = interleave2_half(w[0].hi, w[1].hi);
    w[0] = first;
}

#else

// rows[i] lane j becomes rows[j] lane i
[[gnu::always_inline]] static inline void transpose16(I16 rows[16]) {
    for (int i = 0; i < 16; i++) {
        for (int j = 0; j < i; j++) {
            const uint32_t kept = rows[i].v[j];
            rows[i].v[j] = rows[j].v[i];
            rows[j].v[i] = kept;
        }
    }
}

// w[j] lane i becomes element 4 i + j of the 64 elements w[0], w[1], w[2], w[3]
static inline void interleave4(I16 w[4]) {
    I16 out[4];
    for (int i = 0; i < 64; i++) out[i / 16].v[i % 16] = w[i % 4].v[i / 4];
    for (int i = 0; i < 4; i++) w[i] = out[i];
}

// w[j] lane i becomes element 2 i + j of the 32 elements w[0], w[1]
static inline void interleave2(V16 w[2]) {
    V16 out[2];
    for (int i = 0; i < 32; i++) out[i / 16].v[i % 16] = w[i % 2].v[i / 2];
    for (int i = 0; i < 2; i++) w[i] = out[i];
}

#endif

}  // namespace tlt::TLT_ISA
