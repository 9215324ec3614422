// V16 as an array of sixteen floats: the definition of every operation, and the fallback on any
// machine. See vec.h for the names, the semantics and the invariant.
#pragma once

#include <cstdint>

namespace tlt::TLT_ISA {

struct V16 {
    float v[16];
};
struct I16 {
    uint32_t v[16];
};
struct M16 {
    bool v[16];
};

template <class Result, class F>
static inline Result each_lane(F f) {
    Result r;
    for (int i = 0; i < 16; i++) r.v[i] = f(i);
    return r;
}

static inline V16 splat(float x) {
    return each_lane<V16>([&](int) { return x; });
}
static inline V16 zero() { return splat(0.0f); }
static inline V16 load_n(const float* p, int64_t n) {
    return each_lane<V16>([&](int i) { return i < n ? p[i] : 0.0f; });
}
static inline V16 load(const float* p) { return load_n(p, 16); }
static inline void store_n(float* p, V16 a, int64_t n) {
    for (int i = 0; i < 16 && i < n; i++) p[i] = a.v[i];
}
static inline void store(float* p, V16 a) { store_n(p, a, 16); }

static inline V16 operator+(V16 a, V16 b) {
    return each_lane<V16>([&](int i) { return a.v[i] + b.v[i]; });
}
static inline V16 operator-(V16 a, V16 b) {
    return each_lane<V16>([&](int i) { return a.v[i] - b.v[i]; });
}
static inline V16 operator*(V16 a, V16 b) {
    return each_lane<V16>([&](int i) { return a.v[i] * b.v[i]; });
}
static inline V16 operator/(V16 a, V16 b) {
    return each_lane<V16>([&](int i) { return a.v[i] / b.v[i]; });
}
// a * b + c and c - a * b, rounded once
static inline V16 fma(V16 a, V16 b, V16 c) {
    return each_lane<V16>([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
}
static inline V16 fnma(V16 a, V16 b, V16 c) {
    return each_lane<V16>([&](int i) { return __builtin_fmaf(-a.v[i], b.v[i], c.v[i]); });
}
static inline V16 max(V16 a, V16 b) {
    return each_lane<V16>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
static inline V16 min(V16 a, V16 b) {
    return each_lane<V16>([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
static inline V16 sqrt(V16 a) {
    return each_lane<V16>([&](int i) { return __builtin_sqrtf(a.v[i]); });
}
static inline V16 round_even(V16 a) {
    return each_lane<V16>([&](int i) { return __builtin_nearbyintf(a.v[i]); });
}

static inline M16 operator<(V16 a, V16 b) {
    return each_lane<M16>([&](int i) { return a.v[i] < b.v[i]; });
}
static inline M16 operator<=(V16 a, V16 b) {
    return each_lane<M16>([&](int i) { return a.v[i] <= b.v[i]; });
}
static inline M16 operator>(V16 a, V16 b) { return b < a; }
static inline M16 operator>=(V16 a, V16 b) { return b <= a; }
static inline M16 operator==(V16 a, V16 b) {
    return each_lane<M16>([&](int i) { return a.v[i] == b.v[i]; });
}
static inline M16 operator&(M16 a, M16 b) {
    return each_lane<M16>([&](int i) { return a.v[i] && b.v[i]; });
}
static inline M16 operator|(M16 a, M16 b) {
    return each_lane<M16>([&](int i) { return a.v[i] || b.v[i]; });
}
static inline M16 operator~(M16 a) {
    return each_lane<M16>([&](int i) { return !a.v[i]; });
}
static inline V16 select(M16 m, V16 a, V16 b) {
    return each_lane<V16>([&](int i) { return m.v[i] ? a.v[i] : b.v[i]; });
}
static inline uint32_t bits(M16 m) {  // lane i is bit i
    uint32_t r = 0;
    for (int i = 0; i < 16; i++) r |= static_cast<uint32_t>(m.v[i]) << i;
    return r;
}
static inline bool any(M16 m) { return bits(m) != 0; }
static inline bool all(M16 m) { return bits(m) == 0xffffu; }

static inline I16 splat_i(int32_t x) {
    return each_lane<I16>([&](int) { return static_cast<uint32_t>(x); });
}
static inline I16 iota() {
    return each_lane<I16>([&](int i) { return static_cast<uint32_t>(i); });
}
static inline I16 load_i_n(const int32_t* p, int64_t n) {
    return each_lane<I16>([&](int i) { return i < n ? static_cast<uint32_t>(p[i]) : 0u; });
}
static inline I16 load_i(const int32_t* p) { return load_i_n(p, 16); }
static inline void store_i_n(int32_t* p, I16 a, int64_t n) {
    for (int i = 0; i < 16 && i < n; i++) p[i] = static_cast<int32_t>(a.v[i]);
}
static inline void store_i(int32_t* p, I16 a) { store_i_n(p, a, 16); }
static inline I16 operator+(I16 a, I16 b) {
    return each_lane<I16>([&](int i) { return a.v[i] + b.v[i]; });
}
static inline I16 operator-(I16 a, I16 b) {
    return each_lane<I16>([&](int i) { return a.v[i] - b.v[i]; });
}
static inline I16 operator&(I16 a, I16 b) {
    return each_lane<I16>([&](int i) { return a.v[i] & b.v[i]; });
}
static inline I16 operator|(I16 a, I16 b) {
    return each_lane<I16>([&](int i) { return a.v[i] | b.v[i]; });
}
static inline I16 operator^(I16 a, I16 b) {
    return each_lane<I16>([&](int i) { return a.v[i] ^ b.v[i]; });
}
static inline I16 mul_lo(I16 a, I16 b) {
    return each_lane<I16>([&](int i) { return a.v[i] * b.v[i]; });
}
// the high words of the unsigned 64-bit products
static inline I16 mul_hi_u(I16 a, I16 b) {
    return each_lane<I16>(
        [&](int i) { return static_cast<uint32_t>(static_cast<uint64_t>(a.v[i]) * b.v[i] >> 32); });
}
template <int n>
static inline I16 shl(I16 a) {
    return each_lane<I16>([&](int i) { return a.v[i] << n; });
}
template <int n>
static inline I16 shr(I16 a) {
    return each_lane<I16>([&](int i) { return a.v[i] >> n; });
}
template <int n>
static inline I16 sar(I16 a) {
    return each_lane<I16>(
        [&](int i) { return static_cast<uint32_t>(static_cast<int32_t>(a.v[i]) >> n); });
}
static inline M16 eq_i(I16 a, I16 b) {
    return each_lane<M16>([&](int i) { return a.v[i] == b.v[i]; });
}
static inline M16 lt_i(I16 a, I16 b) {
    return each_lane<M16>(
        [&](int i) { return static_cast<int32_t>(a.v[i]) < static_cast<int32_t>(b.v[i]); });
}
static inline I16 select_i(M16 m, I16 a, I16 b) {
    return each_lane<I16>([&](int i) { return m.v[i] ? a.v[i] : b.v[i]; });
}
static inline V16 to_float(I16 a) {
    return each_lane<V16>([&](int i) { return static_cast<float>(static_cast<int32_t>(a.v[i])); });
}
static inline I16 to_int(V16 a) {  // out of range and NaN give 0x80000000, as on x86
    return each_lane<I16>([&](int i) {
        const float x = __builtin_nearbyintf(a.v[i]);
        if (!(x >= -2147483648.0f && x < 2147483648.0f)) return 0x80000000u;
        return static_cast<uint32_t>(static_cast<int32_t>(x));
    });
}
static inline I16 as_int(V16 a) {
    I16 r;
    __builtin_memcpy(&r, &a, sizeof r);
    return r;
}
static inline V16 as_float(I16 a) {
    V16 r;
    __builtin_memcpy(&r, &a, sizeof r);
    return r;
}

static inline V16 load_bf16_n(const uint16_t* p, int64_t n) {
    return as_float(
        each_lane<I16>([&](int i) { return i < n ? static_cast<uint32_t>(p[i]) << 16 : 0u; }));
}
static inline V16 load_bf16(const uint16_t* p) { return load_bf16_n(p, 16); }
static inline void store_bf16_n(uint16_t* p, V16 a, int64_t n) {  // nearest even; NaN stays NaN
    const I16 x = as_int(a);
    for (int i = 0; i < 16 && i < n; i++) {
        const bool nan = (x.v[i] & 0x7fffffffu) > 0x7f800000u;
        const uint32_t rounded = x.v[i] + 0x7fff + (x.v[i] >> 16 & 1);
        p[i] = static_cast<uint16_t>((nan ? x.v[i] | 0x00400000u : rounded) >> 16);
    }
}
static inline void store_bf16(uint16_t* p, V16 a) { store_bf16_n(p, a, 16); }

template <class F>
static inline float fold(V16 a, F f) {
    for (int width = 8; width > 0; width /= 2) {
        for (int i = 0; i < width; i++) a.v[i] = f(a.v[i], a.v[i + width]);
    }
    return a.v[0];
}
static inline float hsum(V16 a) {
    return fold(a, [](float x, float y) { return x + y; });
}
static inline float hmax(V16 a) {
    return fold(a, [](float x, float y) { return x > y ? x : y; });
}
static inline float hmin(V16 a) {
    return fold(a, [](float x, float y) { return x < y ? x : y; });
}

}  // namespace tlt::TLT_ISA
