// coupled_top_k: the tokens of a draft row that the sampler's noise favours, as `coupled_top_k` of
// engine/ops/reference.py.
//
// Owns: the ranking. Does not know drafters. Invariants: a row's result is a function of its own
// logits, parameters, seed and position; the first token is, with no map of ids, the one that
// `sample` draws, bit for bit in its score; pruning (token_race.h) leaves out only tokens that
// cannot be among the first.
//
// The last of the k best so far is the score to reach. Segments of one row tell it to each other;
// which of them is ahead changes the work, never the result.
#include "cpu/kernels.h"
#include "cpu/token_race.h"

namespace tlt::TLT_ISA {
namespace {

static_assert(kNoiseBlock == kTokenBlock);

// The best tokens so far, largest key first.
struct Ranking {
    uint64_t keys[kMostTopK];
    int64_t size, wanted;

    void add(uint64_t key) {
        if (size == wanted && key < keys[size - 1]) return;
        int64_t at = size < wanted ? size++ : size - 1;
        for (; at > 0 && keys[at - 1] < key; at--) keys[at] = keys[at - 1];
        keys[at] = key;
    }
    // What a token must reach to be taken.
    float floor() const { return size == wanted ? key_value(keys[size - 1]) : -kInf; }
};

// The highest floor that any segment has seen: a hint, so an update that gets lost does no harm.
class SharedFloor {
  public:
    float get() const {
        float value;
        __atomic_load(&value_, &value, __ATOMIC_RELAXED);
        return value;
    }
    void raise(float value) {
        if (value > get()) __atomic_store(&value_, &value, __ATOMIC_RELAXED);
    }

  private:
    float value_ = -kInf;
};

// Words of sixteen tokens wherever they are in the target's vocabulary, shifted right by one.
I16 words_of(const NoiseKey& key, I16 ids) {
    I16 words[4] = {shr<2>(ids), splat_i(static_cast<int32_t>(key.position)), splat_i(0),
                    splat_i(0)};
    philox(words, key.key0, key.key1);
    const I16 which = ids & splat_i(3);
    I16 word = words[0];
    for (int i = 1; i < 4; i++) word = select_i(eq_i(which, splat_i(i)), words[i], word);
    return shr<1>(word);
}

struct Race {
    const TokenRow& row;
    const Cut& cut;
    NoiseKey key;
    const int32_t* target_ids;  // or null
    bool noise, prune;

    I16 words_at(int64_t first) const {
        const int64_t left = row.vocab - first;
        return words_of(
            key, left >= 16 ? load_i(target_ids + first) : load_i_n(target_ids + first, left));
    }

    void take(V16 scores, int64_t first, Ranking& best) const {
        uint32_t lanes = bits((scores >= splat(best.floor())) & (scores > splat(-kInf)));
        if (lanes == 0) return;
        alignas(64) float values[16];
        store(values, scores);
        for (; lanes != 0; lanes &= lanes - 1) {
            const int lane = __builtin_ctz(lanes);
            best.add(token_key(values[lane], static_cast<int32_t>(first + lane)));
        }
    }

    void block(int64_t b, float floor, Ranking& best) const {
        V16 z[4];
        load_block(row.values, row.vocab, b, z);
        I16 words[4];
        const float margin = slack(floor);
        const bool bounded = prune && floor > -kInf;
        if (noise && target_ids == nullptr) noise_words(key, b, words);
        for (int i = 0; i < 4; i++) {
            const int64_t first = b * kTokenBlock + 16 * i;
            if (first >= row.vocab) break;
            if (!noise) {
                take(select(kept(cut, z[i], first), z[i], splat(-kInf)), first, best);
                continue;
            }
            if (target_ids != nullptr) {
                if (bounded && hmax(z[i]) + kMostNoise < floor - margin) continue;
                words[i] = words_at(first);
            }
            if (bounded && !any(may_reach(z[i], words[i], floor, margin))) continue;
            take(noisy_scores(cut, z[i], words[i], first), first, best);
        }
    }

    void segment(int64_t s, Ranking& best, SharedFloor& shared) const {
        const float reach = noise ? kMostNoise : 0.0f;
        for (int64_t b = row.first_block(s); b < row.last_block(s); b++) {
            if (row.block_max[b] < cut.value) continue;
            const float own = best.floor(), other = shared.get();
            const float floor = own > other ? own : other;
            if (prune && row.block_max[b] + reach < floor - slack(floor)) continue;
            block(b, floor, best);
        }
        shared.raise(best.floor());
    }
};

Ranking rank(const Race& race, int64_t wanted, int num_threads, Ranking* segment_best) {
    SharedFloor shared;
    parallel_tasks(race.row.segments(), num_threads, [&](int64_t s) {
        segment_best[s].size = 0;
        segment_best[s].wanted = wanted;
        race.segment(s, segment_best[s], shared);
    });
    Ranking best = segment_best[0];
    for (int64_t s = 1; s < race.row.segments(); s++) {
        for (int64_t i = 0; i < segment_best[s].size; i++) best.add(segment_best[s].keys[i]);
    }
    return best;
}

void rank_row(const CoupledTopKArgs& a, int64_t r, int num_threads) {
    const bool noise = a.temperature[r] != 0.0f;  // else the largest logits
    const float temperature = noise ? a.temperature[r] : 1.0f;
    const float* logits = a.logits + r * a.vocab;
    RaceMemory<Ranking> m(logits, a.vocab, noise && (a.top_k[r] > 0 || a.top_p[r] < 1.0f));
    parallel_tasks(m.row.segments(), num_threads,
                   [&](int64_t s) { scale_segment(logits, temperature, m.z, m.row, s); });
    m.row.values = m.z;
    const float top = row_max(m.row);
    int32_t* token_ids = a.token_ids + r * a.count;
    float* scores = a.scores + r * a.count;
    float* logprobs = a.logprobs + r * a.count;
    for (int64_t i = 0; i < a.count; i++) {
        token_ids[i] = -1;
        scores[i] = logprobs[i] = -kInf;
    }
    if (top == -kInf) return;
    Cut cut;
    if (noise) {
        cut = min_p_cut(top, a.min_p[r], cut);
        cut = top_k_cut(m.row, a.top_k[r], cut, m.keys);
        cut = top_p_cut(m.row, top, a.top_p[r], cut, m.keys);
    }
    const float log_total = log_sum(m.row, top, cut, num_threads);
    const Race race{m.row, cut, NoiseKey(a.seeds[r], a.positions[r]), a.target_ids, noise, a.prune};
    const Ranking best = rank(race, a.count, num_threads, m.segment_best);
    for (int64_t i = 0; i < best.size; i++) {
        const int32_t id = key_id(best.keys[i]);
        token_ids[i] = a.target_ids == nullptr ? id : a.target_ids[id];
        scores[i] = key_value(best.keys[i]);
        logprobs[i] = m.z[id] - log_total;
    }
}

}  // namespace

void coupled_top_k(const CoupledTopKArgs& a) {
    for_each_row(a.num_rows, a.vocab, a.num_threads,
                 [&](int64_t r, int threads) { rank_row(a, r, threads); });
}

}  // namespace tlt::TLT_ISA
