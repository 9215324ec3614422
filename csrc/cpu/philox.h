// Philox4x32-10 (Salmon et al., SC'11), sixteen counters at a time, and the noise that sampling
// draws from it.
//
// Owns: what word belongs to which token, and the map from words to uniforms and to Gumbel noise,
// bit for bit as `uniform` of engine/ops/reference.py. Does not know logits. Invariant: the noise
// of a token is a function of the seed, the position and the token id alone.
#pragma once

#include <cstdint>

#include "cpu/transpose.h"
#include "cpu/vec.h"

namespace tlt::TLT_ISA {

inline constexpr int64_t kNoiseBlock =
    64;  // tokens whose noise is made together: sixteen counters, four words each

// c[0..3], sixteen counters: replaced by their random words.
static inline void philox(I16 c[4], uint32_t key0, uint32_t key1) {
    const I16 m0 = splat_i(static_cast<int32_t>(0xD2511F53u));
    const I16 m1 = splat_i(static_cast<int32_t>(0xCD9E8D57u));
    for (int round = 0; round < 10; round++) {
        const I16 hi0 = mul_hi_u(c[0], m0), lo0 = mul_lo(c[0], m0);
        const I16 hi1 = mul_hi_u(c[2], m1), lo1 = mul_lo(c[2], m1);
        c[0] = hi1 ^ c[1] ^ splat_i(static_cast<int32_t>(key0));
        c[1] = lo1;
        c[2] = hi0 ^ c[3] ^ splat_i(static_cast<int32_t>(key1));
        c[3] = lo0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

// The noise stream of one sampled token.
struct NoiseKey {
    uint32_t key0, key1, position;
    NoiseKey(int64_t seed, int32_t at)
        : key0(static_cast<uint32_t>(static_cast<uint64_t>(seed))),
          key1(static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32)),
          position(static_cast<uint32_t>(at)) {}
};

// words[i] lane j: the word of token 64 block + 16 i + j, shifted right by one.
static inline void noise_words(const NoiseKey& key, int64_t block, I16 words[4]) {
    words[0] = iota() + splat_i(static_cast<int32_t>(block * (kNoiseBlock / 4)));
    words[1] = splat_i(static_cast<int32_t>(key.position));
    words[2] = words[3] = splat_i(0);
    philox(words, key.key0, key.key1);
    interleave4(words);
    for (int i = 0; i < 4; i++) words[i] = shr<1>(words[i]);
}

// (float(word >> 1) + 0.5) * 2^-31, at most 1 - 2^-24
static inline V16 uniform(I16 shifted_word) {
    const V16 x = (to_float(shifted_word) + splat(0.5f)) * splat(0x1p-31f);
    return min(x, splat(1.0f - 0x1p-24f));
}

// -log(-log(1 - x))
static inline V16 gumbel(V16 x) { return neg(log(neg(log1p(neg(x))))); }

}  // namespace tlt::TLT_ISA
