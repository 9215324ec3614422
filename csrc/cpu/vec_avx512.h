// V16 as one zmm. See vec.h for the names, the semantics and the invariant. Needs avx512 f, bw, dq,
// vl and fma.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace tlt::TLT_ISA {

struct V16 {
    __m512 v;
};
struct I16 {
    __m512i v;
};
struct M16 {
    __mmask16 v;
};

static inline __mmask16 first_lanes(int64_t n) {
    return static_cast<__mmask16>(n >= 16 ? 0xffffu : (1u << n) - 1u);
}

static inline V16 splat(float x) { return {_mm512_set1_ps(x)}; }
static inline V16 zero() { return {_mm512_setzero_ps()}; }
static inline V16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline V16 load_n(const float* p, int64_t n) {
    return {_mm512_maskz_loadu_ps(first_lanes(n), p)};
}
static inline void store(float* p, V16 a) { _mm512_storeu_ps(p, a.v); }
static inline void store_n(float* p, V16 a, int64_t n) {
    _mm512_mask_storeu_ps(p, first_lanes(n), a.v);
}

static inline V16 operator+(V16 a, V16 b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline V16 operator-(V16 a, V16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline V16 operator*(V16 a, V16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline V16 operator/(V16 a, V16 b) { return {_mm512_div_ps(a.v, b.v)}; }
// a * b + c and c - a * b, rounded once
static inline V16 fma(V16 a, V16 b, V16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline V16 fnma(V16 a, V16 b, V16 c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
static inline V16 max(V16 a, V16 b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline V16 min(V16 a, V16 b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline V16 sqrt(V16 a) { return {_mm512_sqrt_ps(a.v)}; }
static inline V16 round_even(V16 a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

static inline M16 operator<(V16 a, V16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
static inline M16 operator<=(V16 a, V16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
static inline M16 operator>(V16 a, V16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)}; }
static inline M16 operator>=(V16 a, V16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ)}; }
static inline M16 operator==(V16 a, V16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
static inline M16 operator&(M16 a, M16 b) { return {static_cast<__mmask16>(a.v & b.v)}; }
static inline M16 operator|(M16 a, M16 b) { return {static_cast<__mmask16>(a.v | b.v)}; }
static inline M16 operator~(M16 a) { return {static_cast<__mmask16>(~a.v)}; }
static inline V16 select(M16 m, V16 a, V16 b) { return {_mm512_mask_blend_ps(m.v, b.v, a.v)}; }
static inline uint32_t bits(M16 m) { return m.v; }  // lane i is bit i

static inline I16 splat_i(int32_t x) { return {_mm512_set1_epi32(x)}; }
static inline I16 iota() {
    return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
}
static inline I16 load_i(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
static inline I16 load_i_n(const int32_t* p, int64_t n) {
    return {_mm512_maskz_loadu_epi32(first_lanes(n), p)};
}
static inline void store_i(int32_t* p, I16 a) { _mm512_storeu_si512(p, a.v); }
static inline void store_i_n(int32_t* p, I16 a, int64_t n) {
    _mm512_mask_storeu_epi32(p, first_lanes(n), a.v);
}
static inline I16 operator+(I16 a, I16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
static inline I16 operator-(I16 a, I16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
static inline I16 operator&(I16 a, I16 b) { return {_mm512_and_si512(a.v, b.v)}; }
static inline I16 operator|(I16 a, I16 b) { return {_mm512_or_si512(a.v, b.v)}; }
static inline I16 operator^(I16 a, I16 b) { return {_mm512_xor_si512(a.v, b.v)}; }
static inline I16 mul_lo(I16 a, I16 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
// the high words of the unsigned 64-bit products
static inline I16 mul_hi_u(I16 a, I16 b) {
    const __m512i even = _mm512_mul_epu32(a.v, b.v);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a.v, 32), _mm512_srli_epi64(b.v, 32));
    return {_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd)};
}
template <int n>
static inline I16 shl(I16 a) {
    return {_mm512_slli_epi32(a.v, n)};
}
template <int n>
static inline I16 shr(I16 a) {
    return {_mm512_srli_epi32(a.v, n)};
}
template <int n>
static inline I16 sar(I16 a) {
    return {_mm512_srai_epi32(a.v, n)};
}
static inline M16 eq_i(I16 a, I16 b) { return {_mm512_cmpeq_epi32_mask(a.v, b.v)}; }
static inline M16 lt_i(I16 a, I16 b) { return {_mm512_cmplt_epi32_mask(a.v, b.v)}; }
static inline I16 select_i(M16 m, I16 a, I16 b) { return {_mm512_mask_blend_epi32(m.v, b.v, a.v)}; }
static inline V16 to_float(I16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
static inline I16 to_int(V16 a) { return {_mm512_cvtps_epi32(a.v)}; }
static inline I16 as_int(V16 a) { return {_mm512_castps_si512(a.v)}; }
static inline V16 as_float(I16 a) { return {_mm512_castsi512_ps(a.v)}; }

static inline V16 widen_bf16(__m256i raw) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}
static inline V16 load_bf16(const uint16_t* p) {
    return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline V16 load_bf16_n(const uint16_t* p, int64_t n) {
    return widen_bf16(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
static inline __m256i narrow_bf16(V16 a) {  // nearest even; NaN stays NaN
    const __m512i x = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(x, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(x, _mm512_set1_epi32(0x00400000));
    const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(
        _mm512_srli_epi32(_mm512_mask_blend_epi32(nan, rounded, quiet), 16));
}
static inline void store_bf16(uint16_t* p, V16 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(a));
}
static inline void store_bf16_n(uint16_t* p, V16 a, int64_t n) {
    _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_bf16(a));
}

static inline __m256 upper_half(V16 a) { return _mm512_extractf32x8_ps(a.v, 1); }
static inline __m256 lower_half(V16 a) { return _mm512_castps512_ps256(a.v); }

}  // namespace tlt::TLT_ISA

#include "cpu/vec_fold_x86.h"  // IWYU pragma: export
