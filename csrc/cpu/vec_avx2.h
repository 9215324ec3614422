// V16 as two ymm. See vec.h for the names, the semantics and the invariant. Needs avx2 and fma.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace tlt::TLT_ISA {

struct V16 {
    __m256 lo, hi;
};
struct I16 {
    __m256i lo, hi;
};
struct M16 {
    __m256 lo, hi;  // all ones or all zeros
};

struct LaneMask {
    __m256i lo, hi;
};
static inline LaneMask first_lanes(int64_t n) {
    const __m256i count = _mm256_set1_epi32(static_cast<int>(n > 16 ? 16 : n));
    return {_mm256_cmpgt_epi32(count, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)),
            _mm256_cmpgt_epi32(count, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15))};
}

static inline V16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline V16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline V16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline V16 load_n(const float* p, int64_t n) {
    const LaneMask m = first_lanes(n);
    return {_mm256_maskload_ps(p, m.lo), _mm256_maskload_ps(p + 8, m.hi)};
}
static inline void store(float* p, V16 a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
static inline void store_n(float* p, V16 a, int64_t n) {
    const LaneMask m = first_lanes(n);
    _mm256_maskstore_ps(p, m.lo, a.lo);
    _mm256_maskstore_ps(p + 8, m.hi, a.hi);
}

static inline V16 operator+(V16 a, V16 b) {
    return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
static inline V16 operator-(V16 a, V16 b) {
    return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
static inline V16 operator*(V16 a, V16 b) {
    return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
static inline V16 operator/(V16 a, V16 b) {
    return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
// a * b + c and c - a * b, rounded once
static inline V16 fma(V16 a, V16 b, V16 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
static inline V16 fnma(V16 a, V16 b, V16 c) {
    return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
static inline V16 max(V16 a, V16 b) {
    return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
static inline V16 min(V16 a, V16 b) {
    return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
static inline V16 sqrt(V16 a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
static inline V16 round_even(V16 a) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}

static inline M16 operator<(V16 a, V16 b) {
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
static inline M16 operator<=(V16 a, V16 b) {
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LE_OQ)};
}
static inline M16 operator>(V16 a, V16 b) {
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ)};
}
static inline M16 operator>=(V16 a, V16 b) {
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ)};
}
static inline M16 operator==(V16 a, V16 b) {
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ)};
}
static inline M16 operator&(M16 a, M16 b) {
    return {_mm256_and_ps(a.lo, b.lo), _mm256_and_ps(a.hi, b.hi)};
}
static inline M16 operator|(M16 a, M16 b) {
    return {_mm256_or_ps(a.lo, b.lo), _mm256_or_ps(a.hi, b.hi)};
}
static inline M16 operator~(M16 a) {
    const __m256 ones = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
    return {_mm256_xor_ps(a.lo, ones), _mm256_xor_ps(a.hi, ones)};
}
static inline V16 select(M16 m, V16 a, V16 b) {
    return {_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi)};
}
static inline uint32_t bits(M16 m) {  // lane i is bit i
    return static_cast<uint32_t>(_mm256_movemask_ps(m.lo)) |
           static_cast<uint32_t>(_mm256_movemask_ps(m.hi)) << 8;
}

static inline I16 splat_i(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline I16 iota() {
    return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
            _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
static inline I16 load_i(const int32_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
static inline I16 load_i_n(const int32_t* p, int64_t n) {
    const LaneMask m = first_lanes(n);
    return {_mm256_maskload_epi32(p, m.lo), _mm256_maskload_epi32(p + 8, m.hi)};
}
static inline void store_i(int32_t* p, I16 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), a.hi);
}
static inline void store_i_n(int32_t* p, I16 a, int64_t n) {
    const LaneMask m = first_lanes(n);
    _mm256_maskstore_epi32(p, m.lo, a.lo);
    _mm256_maskstore_epi32(p + 8, m.hi, a.hi);
}
static inline I16 operator+(I16 a, I16 b) {
    return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
static inline I16 operator-(I16 a, I16 b) {
    return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)};
}
static inline I16 operator&(I16 a, I16 b) {
    return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
static inline I16 operator|(I16 a, I16 b) {
    return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}
static inline I16 operator^(I16 a, I16 b) {
    return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)};
}
static inline I16 mul_lo(I16 a, I16 b) {
    return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)};
}
static inline __m256i mul_hi_u8(__m256i a, __m256i b) {
    const __m256i even = _mm256_mul_epu32(a, b);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
    return _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}
// the high words of the unsigned 64-bit products
static inline I16 mul_hi_u(I16 a, I16 b) { return {mul_hi_u8(a.lo, b.lo), mul_hi_u8(a.hi, b.hi)}; }
template <int n>
static inline I16 shl(I16 a) {
    return {_mm256_slli_epi32(a.lo, n), _mm256_slli_epi32(a.hi, n)};
}
template <int n>
static inline I16 shr(I16 a) {
    return {_mm256_srli_epi32(a.lo, n), _mm256_srli_epi32(a.hi, n)};
}
template <int n>
static inline I16 sar(I16 a) {
    return {_mm256_srai_epi32(a.lo, n), _mm256_srai_epi32(a.hi, n)};
}
static inline M16 eq_i(I16 a, I16 b) {
    return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(a.lo, b.lo)),
            _mm256_castsi256_ps(_mm256_cmpeq_epi32(a.hi, b.hi))};
}
static inline M16 lt_i(I16 a, I16 b) {
    return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(b.lo, a.lo)),
            _mm256_castsi256_ps(_mm256_cmpgt_epi32(b.hi, a.hi))};
}
static inline V16 to_float(I16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
static inline I16 to_int(V16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
static inline I16 as_int(V16 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
static inline V16 as_float(I16 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
static inline I16 select_i(M16 m, I16 a, I16 b) {
    return as_int(select(m, as_float(a), as_float(b)));
}

static inline V16 load_bf16(const uint16_t* p) {
    const __m128i lo = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i hi = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8));
    return as_float(shl<16>(I16{_mm256_cvtepu16_epi32(lo), _mm256_cvtepu16_epi32(hi)}));
}
static inline V16 load_bf16_n(const uint16_t* p, int64_t n) {
    if (n >= 16) return load_bf16(p);
    alignas(32) uint16_t lanes[16] = {};
    for (int64_t i = 0; i < n; i++) lanes[i] = p[i];
    return load_bf16(lanes);
}
static inline __m256i narrow_bf16(
    __m256 a) {  // nearest even; NaN stays NaN; one value in each 32 bits
    const __m256i x = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(x, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(x, _mm256_set1_epi32(0x00400000));
    const __m256 nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
    return _mm256_srli_epi32(_mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rounded),
                                                                  _mm256_castsi256_ps(quiet), nan)),
                             16);
}
static inline void store_bf16(uint16_t* p, V16 a) {
    const __m256i packed = _mm256_packus_epi32(narrow_bf16(a.lo), narrow_bf16(a.hi));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
static inline void store_bf16_n(uint16_t* p, V16 a, int64_t n) {
    if (n >= 16) return store_bf16(p, a);
    alignas(32) uint16_t lanes[16];
    store_bf16(lanes, a);
    for (int64_t i = 0; i < n; i++) p[i] = lanes[i];
}

static inline __m256 upper_half(V16 a) { return a.hi; }
static inline __m256 lower_half(V16 a) { return a.lo; }

}  // namespace tlt::TLT_ISA

#include "cpu/vec_fold_x86.h"  // IWYU pragma: export
