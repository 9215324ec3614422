// sample: one token for each row, by the Gumbel-max rule of engine/ops/reference.py.
//
// Owns: the race of scores z + noise and its pruning. Does not know where rows come from.
// Invariants: a row's token is a function of its own logits, parameters, seed and position; pruning
// leaves out only tokens that cannot win.
//
// Pruning (token_race.h): the winner's score is distributed as log_sum_exp(z) plus a Gumbel
// variable: it is below log_sum_exp(z) - 2.5 once in 200,000 draws. Starting from there, some ten
// tokens are left to be scored exactly. Should none reach the start, the race is run again without
// pruning.
#include "cpu/kernels.h"
#include "cpu/token_race.h"

namespace tlt::TLT_ISA {
namespace {

static_assert(kNoiseBlock == kTokenBlock);

constexpr float kStart = 2.5f;  // how far below log_sum_exp the pruned race starts

struct Best {
    float score;
    int32_t id;  // -1: none reached it yet
};

// The exact scores of sixteen tokens.
void score_tokens(const Cut& cut, V16 z, I16 words, int64_t first_id, Best& best) {
    const V16 scores = noisy_scores(cut, z, words, first_id);
    const float top = hmax(scores);
    if (!(top > best.score)) return;
    best.score = top;
    best.id = static_cast<int32_t>(first_id + __builtin_ctz(bits(scores == splat(top))));
}

void race_block(const TokenRow& row, const Cut& cut, const NoiseKey& key, int64_t block, bool prune,
                Best& best) {
    V16 z[4];
    I16 words[4];
    load_block(row.values, row.vocab, block, z);
    noise_words(key, block, words);
    M16 close[4];
    if (prune) {
        const float margin = slack(best.score);
        for (int i = 0; i < 4; i++) close[i] = may_reach(z[i], words[i], best.score, margin);
        if (!any(close[0] | close[1] | close[2] | close[3])) return;
    }
    for (int i = 0; i < 4; i++) {
        if (prune && !any(close[i])) continue;
        score_tokens(cut, z[i], words[i], block * kTokenBlock + 16 * i, best);
    }
}

Best race(const TokenRow& row, const Cut& cut, const NoiseKey& key, float start, bool prune,
          int num_threads, Best* segment_best) {
    parallel_tasks(row.segments(), num_threads, [&](int64_t s) {
        Best best{start, -1};
        for (int64_t b = row.first_block(s); b < row.last_block(s); b++) {
            if (row.block_max[b] < cut.value) continue;
            if (prune && row.block_max[b] + kMostNoise < best.score - slack(best.score)) continue;
            race_block(row, cut, key, b, prune, best);
        }
        segment_best[s] = best;
    });
    Best best{start, -1};
    for (int64_t s = 0; s < row.segments(); s++) {
        if (segment_best[s].id >= 0 && segment_best[s].score > best.score) best = segment_best[s];
    }
    return best;
}

// Lowest id of the largest logit.
int32_t greedy(const TokenRow& row, int num_threads) {
    parallel_tasks(row.segments(), num_threads, [&](int64_t s) { find_block_max(row, s); });
    const float top = row_max(row);
    for (int64_t b = 0; b < row.blocks(); b++) {
        if (row.block_max[b] != top) continue;
        for (int64_t id = b * kTokenBlock; id < row.vocab && id < (b + 1) * kTokenBlock; id++) {
            if (row.values[id] == top) return static_cast<int32_t>(id);
        }
    }
    return 0;  // nothing but NaN
}

void sample_row(const SampleArgs& a, int64_t r, int num_threads) {
    const float* logits = a.logits + r * a.vocab;
    const float temperature = a.temperature[r];
    RaceMemory<Best> m(logits, a.vocab, a.top_k[r] > 0 || a.top_p[r] < 1.0f);
    a.logprobs[r] = 0.0f;
    if (temperature == 0.0f) {
        const int32_t id = greedy(m.row, num_threads);
        const bool finite = logits[id] > -kInf && logits[id] < kInf;
        a.token_ids[r] = id;
        if (!finite) a.logprobs[r] = __builtin_nanf("");
        return;
    }
    parallel_tasks(m.row.segments(), num_threads,
                   [&](int64_t s) { scale_segment(logits, temperature, m.z, m.row, s); });
    m.row.values = m.z;
    const float top = row_max(m.row);
    if (top == -kInf) {  // everything is forbidden
        a.token_ids[r] = 0;
        a.logprobs[r] = __builtin_nanf("");
        return;
    }
    Cut cut = min_p_cut(top, a.min_p[r], Cut{});
    cut = top_k_cut(m.row, a.top_k[r], cut, m.keys);
    cut = top_p_cut(m.row, top, a.top_p[r], cut, m.keys);

    const float log_total = log_sum(m.row, top, cut, num_threads);
    const NoiseKey key(a.seeds[r], a.positions[r]);
    Best best{-kInf, -1};
    if (a.prune) {
        best = race(m.row, cut, key, log_total - kStart, true, num_threads, m.segment_best);
    }
    if (best.id < 0) best = race(m.row, cut, key, -kInf, false, num_threads, m.segment_best);
    a.token_ids[r] = best.id;
    a.logprobs[r] = m.z[best.id] - log_total;
}

}  // namespace

void sample(const SampleArgs& a) {
    for_each_row(a.num_rows, a.vocab, a.num_threads,
                 [&](int64_t r, int threads) { sample_row(a, r, threads); });
}

}  // namespace tlt::TLT_ISA
