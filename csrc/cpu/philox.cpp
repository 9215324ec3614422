// philox_words and philox_uniform: the generator laid open for tests and for drafters' coupled
// noise.
//
// Owns: loops. See philox.h for the generator. Invariant: sample draws exactly these uniforms.
#include "cpu/philox.h"

#include "cpu/kernels.h"
#include "cpu/lanes.h"

namespace tlt::TLT_ISA {

void philox_words(const PhiloxWordsArgs& a) {
    for (int64_t i = 0; i < a.count; i++) {
        const int32_t *c = a.counters + 4 * i, *k = a.keys + 2 * i;
        I16 words[4] = {splat_i(c[0]), splat_i(c[1]), splat_i(c[2]), splat_i(c[3])};
        philox(words, static_cast<uint32_t>(k[0]), static_cast<uint32_t>(k[1]));
        for (int j = 0; j < 4; j++) store_i_n(a.out + 4 * i + j, words[j], 1);
    }
}

void philox_uniform(const PhiloxUniformArgs& a) {
    const NoiseKey key(a.seed, a.position);
    for (int64_t v = 0; v < a.vocab; v += kNoiseBlock) {
        I16 words[4];
        noise_words(key, v / kNoiseBlock, words);
        for (int i = 0; i < 4; i++) {
            const int64_t left = a.vocab - v - 16 * i;
            if (left > 0) store_n(a.out + v + 16 * i, uniform(words[i]), left);
        }
    }
}

}  // namespace tlt::TLT_ISA
