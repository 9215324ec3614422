// Horizontal operations of V16 on x86: fold lanes i and i + 8, then i + 4, i + 2, i + 1. Shared by
// avx2 and avx512, which give the two halves. See vec.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace tlt::TLT_ISA {

static inline bool any(M16 m) { return bits(m) != 0; }
static inline bool all(M16 m) { return bits(m) == 0xffffu; }

static inline float hsum(V16 a) {
    const __m256 x8 = _mm256_add_ps(lower_half(a), upper_half(a));
    const __m128 x4 = _mm_add_ps(_mm256_castps256_ps128(x8), _mm256_extractf128_ps(x8, 1));
    const __m128 x2 = _mm_add_ps(x4, _mm_movehl_ps(x4, x4));
    return _mm_cvtss_f32(_mm_add_ss(x2, _mm_movehdup_ps(x2)));
}

static inline float hmax(V16 a) {
    const __m256 x8 = _mm256_max_ps(lower_half(a), upper_half(a));
    const __m128 x4 = _mm_max_ps(_mm256_castps256_ps128(x8), _mm256_extractf128_ps(x8, 1));
    const __m128 x2 = _mm_max_ps(x4, _mm_movehl_ps(x4, x4));
    return _mm_cvtss_f32(_mm_max_ss(x2, _mm_movehdup_ps(x2)));
}

static inline float hmin(V16 a) {
    const __m256 x8 = _mm256_min_ps(lower_half(a), upper_half(a));
    const __m128 x4 = _mm_min_ps(_mm256_castps256_ps128(x8), _mm256_extractf128_ps(x8, 1));
    const __m128 x2 = _mm_min_ps(x4, _mm_movehl_ps(x4, x4));
    return _mm_cvtss_f32(_mm_min_ss(x2, _mm_movehdup_ps(x2)));
}

}  // namespace tlt::TLT_ISA
