// rope_store: split qkv, normalise heads if asked, rotate q and k, store k and v in the cache.
//
// Owns: the rotation's arithmetic. Does not know who reads the cache. Invariant: what is written
// for a row depends on that row alone; slots are distinct, so rows may go to any thread.
#include "cpu/kernels.h"
#include "cpu/lanes.h"
#include "cpu/parallel.h"
#include "cpu/rms.h"

namespace tlt::TLT_ISA {
namespace {

// out = rotation of (x scale weight); weight null: of x.
template <class T>
void rotate_head(const float* x, const float* weight, float scale, const float* cos,
                 const float* sin, int64_t half, T* out) {
    const V16 s = splat(scale);
    for_lanes(half, [&](int64_t i, auto n) {
        V16 x1 = load_n(x + i, n), x2 = load_n(x + half + i, n);
        if (weight != nullptr) {
            x1 = x1 * s * load_n(weight + i, n);
            x2 = x2 * s * load_n(weight + half + i, n);
        }
        const V16 c = load_n(cos + i, n), d = load_n(sin + i, n);
        store_n(out + i, fnma(x2, d, x1 * c), n);
        store_n(out + half + i, fma(x1, d, x2 * c), n);
    });
}

template <class T>
void rotate_heads(const RopeStoreArgs& a, const float* x, int64_t heads, const float* weight,
                  int64_t position, T* out) {
    const int64_t half = a.head_dim / 2;
    const float *cos = a.cos + position * half, *sin = a.sin + position * half;
    for (int64_t h = 0; h < heads; h++, x += a.head_dim, out += a.head_dim) {
        const float scale = weight != nullptr ? rms_scale(x, a.head_dim, a.eps) : 1.0f;
        rotate_head(x, weight, scale, cos, sin, half, out);
    }
}

template <class T>
void store_row(const RopeStoreArgs& a, T* k_cache, T* v_cache, int64_t row) {
    const int64_t q_width = a.num_q_heads * a.head_dim, kv_width = a.num_kv_heads * a.head_dim;
    const float* q = a.qkv + row * (q_width + 2 * kv_width);
    const float *k = q + q_width, *v = k + kv_width;
    const int64_t position = a.batch.positions[row];
    const int64_t slot = static_cast<int64_t>(a.batch.slots[row]) * kv_width;
    rotate_heads(a, q, a.num_q_heads, a.q_norm, position, a.q_out + row * q_width);
    rotate_heads(a, k, a.num_kv_heads, a.k_norm, position, k_cache + slot);
    T* to = v_cache + slot;
    for_lanes(kv_width, [&](int64_t i, auto n) { store_n(to + i, load_n(v + i, n), n); });
}

// Asks for the lines of the cache that a row will be stored to: they lie anywhere, and a store that
// misses holds up those behind it.
void foresee_row(const RopeStoreArgs& a, int64_t row) {
    asm volatile("");  // or gcc 12 takes this for a function without effects and drops its calls
    const int64_t bytes = a.num_kv_heads * a.head_dim * (a.cache_dtype == Dtype::bf16 ? 2 : 4);
    const int64_t at = a.batch.slots[row] * bytes;
    for (int64_t byte = 0; byte < bytes; byte += 64) {
        __builtin_prefetch(static_cast<char*>(a.k_cache) + at + byte, 1);
        __builtin_prefetch(static_cast<char*>(a.v_cache) + at + byte, 1);
    }
}

}  // namespace

void rope_store(const RopeStoreArgs& a) {
    constexpr int64_t ahead = 8;  // rows
    const int64_t cost = 4 * (a.num_q_heads + 2 * a.num_kv_heads) * a.head_dim;
    parallel_ranges(a.batch.num_rows, cost, a.num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end && r < begin + ahead; r++) foresee_row(a, r);
        for (int64_t r = begin; r < end; r++) {
            if (r + ahead < end) foresee_row(a, r + ahead);
            if (a.cache_dtype == Dtype::bf16) {
                auto *k = static_cast<uint16_t*>(a.k_cache), *v = static_cast<uint16_t*>(a.v_cache);
                store_row(a, k, v, r);
            } else {
                auto *k = static_cast<float*>(a.k_cache), *v = static_cast<float*>(a.v_cache);
                store_row(a, k, v, r);
            }
        }
    });
}

}  // namespace tlt::TLT_ISA
