// V16: sixteen fp32 lanes, the one vector type that the kernels are written in. I16: sixteen 32-bit
// integers. M16: sixteen truth values.
//
// Owns: the choice of implementation (one zmm, two ymm, or an array) and the operations that are
// the same in all of them: fixed-order helpers, exp, log, log1p. The primitive operations are in
// vec_{scalar,avx2,avx512}.h and have the same names there:
//   V16: load load_n store store_n load_bf16 load_bf16_n store_bf16 store_bf16_n splat zero + - * /
//   fma fnma max
//        min sqrt round_even hsum hmax hmin          (the _n forms touch n lanes only; other lanes
//        load as +0)
//   M16: < <= > >= == on V16 (ordered: false on NaN), eq_i lt_i on I16, & | ~, select, any, all,
//   bits I16: load_i load_i_n store_i store_i_n splat_i iota + - & | ^ mul_lo mul_hi_u shl<n>
//   shr<n> sar<n> select_i
//        to_float (signed) to_int (nearest even) as_int as_float
// Does not know: any kernel.
// Invariant: every operation gives the same bits in every implementation. So: max(a, b) is a > b ?
// a : b and min(a, b) is a < b ? a : b as on x86 (the second operand when unordered); fma rounds
// once; horizontal operations fold lanes i and i + 8, then i + 4, then i + 2, then i + 1; nothing
// is contracted (-ffp-contract=off).
#pragma once

#include <cstddef>
#include <cstdint>

#ifndef TLT_ISA
#error "compile with -DTLT_ISA=<name>: see CMakeLists.txt"
#endif

#if defined(TLT_ISA_AVX512)
#include "cpu/vec_avx512.h"  // IWYU pragma: export
#elif defined(TLT_ISA_AVX2)
#include "cpu/vec_avx2.h"  // IWYU pragma: export
#else
#include "cpu/vec_scalar.h"  // IWYU pragma: export
#endif

namespace tlt::TLT_ISA {

static inline V16 neg(V16 a) { return as_float(as_int(a) ^ splat_i(INT32_MIN)); }
static inline V16 abs(V16 a) { return as_float(as_int(a) & splat_i(INT32_MAX)); }

// One value, rounded to bf16 and back as the vectors do.
static inline float bf16_to_float(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float y;
    __builtin_memcpy(&y, &bits, 4);
    return y;
}

static inline uint16_t float_to_bf16(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// e^x within 1 ulp; 0 below -104, inf above 88.73, NaN for NaN. Cody-Waite reduction and a
// polynomial of degree 7.
static inline V16 exp(V16 x) {
    x = min(splat(89.0f), max(splat(-104.0f), x));
    const V16 n = round_even(x * splat(1.44269504088896341f));
    V16 r = fnma(n, splat(0.693145751953125f), x);
    r = fnma(n, splat(1.42860682030941723e-6f), r);
    V16 p = splat(1.98412698e-4f);
    p = fma(p, r, splat(1.38888889e-3f));
    p = fma(p, r, splat(8.33333333e-3f));
    p = fma(p, r, splat(4.16666667e-2f));
    p = fma(p, r, splat(1.66666667e-1f));
    p = fma(p, r, splat(0.5f));
    p = fma(p, r * r, r);
    p = p + splat(1.0f);
    // 2^n in two factors, so that results below 2^-126 and n = 128 come out right
    const I16 whole = to_int(n), half = sar<1>(whole);
    const V16 scale1 = as_float(shl<23>(half + splat_i(127)));
    const V16 scale2 = as_float(shl<23>(whole - half + splat_i(127)));
    return p * scale1 * scale2;
}

// ln x within 1 ulp; -inf for 0, NaN below 0, inf for inf. x = m 2^e with m in [sqrt(1/2),
// sqrt(2)).
static inline V16 log(V16 x) {
    const M16 tiny = x < splat(1.17549435e-38f);  // subnormal (or below 0): scale up first
    const V16 scaled = select(tiny, x * splat(8388608.0f), x);
    I16 e = shr<23>(as_int(scaled)) - splat_i(126);
    V16 m = as_float((as_int(scaled) & splat_i(0x007fffff)) | splat_i(0x3f000000));  // [0.5, 1)
    const M16 low = m < splat(0.707106781186547524f);
    e = e - select_i(low, splat_i(1), splat_i(0)) - select_i(tiny, splat_i(23), splat_i(0));
    m = select(low, m + m, m) - splat(1.0f);
    const V16 exponent = to_float(e), z = m * m;
    V16 p = splat(7.0376836292e-2f);
    p = fma(p, m, splat(-1.1514610310e-1f));
    p = fma(p, m, splat(1.1676998740e-1f));
    p = fma(p, m, splat(-1.2420140846e-1f));
    p = fma(p, m, splat(1.4249322787e-1f));
    p = fma(p, m, splat(-1.6668057665e-1f));
    p = fma(p, m, splat(2.0000714765e-1f));
    p = fma(p, m, splat(-2.4999993993e-1f));
    p = fma(p, m, splat(3.3333331174e-1f));
    V16 y = m * z * p;
    y = fma(exponent, splat(-2.12194440e-4f), y);
    y = fnma(splat(0.5f), z, y);
    V16 result = fma(exponent, splat(0.693359375f), m + y);
    const V16 inf = splat(__builtin_inff());
    result = select(x == inf, inf, result);
    result = select(x == zero(), neg(inf), result);
    return select(x >= zero(), result, splat(__builtin_nanf("")));
}

// ln(1 + x) for x > -1, accurate near 0 (Kahan's correction for the rounding of 1 + x).
static inline V16 log1p(V16 x) {
    const V16 one = splat(1.0f), u = one + x;
    const M16 same = u == one;
    const V16 corrected = log(u) * (x / select(same, one, u - one));
    return select(same, x, corrected);
}

}  // namespace tlt::TLT_ISA
