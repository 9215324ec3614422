// The suffix index against a search of the texts: random prompts, requests, cuts, endings and
// evictions over a small alphabet. Meant for a build with sanitizers (TLT_SANITIZE). Owns: the
// search, written from the definition in engine/spec/suffix.py. Does not know: automata. Invariant:
// a run makes its choices from its seed alone.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "suffix/index.h"

namespace tlt::suffix {
namespace {

// What one prompt's index may count.
struct Texts {
    Tokens prompt;
    std::vector<Tokens> outputs;
};

Tokens joined(const Tokens& a, const Tokens& b) {
    Tokens all = a;
    all.insert(all.end(), b.begin(), b.end());
    return all;
}

using Counts = std::map<int32_t, uint32_t>;

void count_in(const Tokens& text, size_t from, const Tokens& context, Counts& counts) {
    for (size_t i = std::max(from, context.size()); i < text.size(); i++) {
        const auto start = text.begin() + static_cast<ptrdiff_t>(i - context.size());
        if (std::equal(context.begin(), context.end(), start)) counts[text[i]]++;
    }
}

Counts count(const Texts& texts, const Tokens& context) {
    Counts counts;
    count_in(texts.prompt, 0, context, counts);
    for (const Tokens& output : texts.outputs) {
        count_in(joined(texts.prompt, output), texts.prompt.size(), context, counts);
    }
    return counts;
}

bool comes_first(const Guess& a, const Guess& b) {
    return a.score != b.score ? a.score > b.score : a.token < b.token;
}

std::vector<Guess> guesses(const Texts& texts, const Tokens& text, uint32_t max_match) {
    std::map<int32_t, double> scores;
    double rest = 1.0;
    uint32_t above = 0;
    int num_levels = 0;
    for (size_t n = std::min<size_t>(text.size(), max_match); n > 0; n--) {
        const Counts counts =
            count(texts, Tokens(text.end() - static_cast<ptrdiff_t>(n), text.end()));
        uint32_t total = 0;
        std::vector<std::pair<int64_t, int32_t>> order;
        for (const auto& [token, times] : counts) {
            total += times;
            order.push_back({-static_cast<int64_t>(times), token});
        }
        if (total <= above) continue;
        if (num_levels++ == kMaxLevels || rest < kLeastWeight) break;
        above = total;
        std::sort(order.begin(), order.end());
        const double doubt = kDoubt / std::sqrt(static_cast<double>(n));
        const double share = rest / (total + doubt);
        for (size_t i = 0; i < std::min<size_t>(order.size(), kMaxBranches); i++) {
            scores[order[i].second] += share * static_cast<double>(-order[i].first);
        }
        rest = share * doubt;
    }
    std::vector<Guess> all;
    for (const auto& [token, score] : scores) all.push_back({token, score});
    std::sort(all.begin(), all.end(), comes_first);
    return all;
}

Tree search_tree(const Texts& texts, const Tokens& text, uint32_t max_match, const Plan& plan) {
    struct Open {
        double joint;
        int32_t parent;
        Guess guess;
        Tokens text;
        int64_t depth;
    };
    Tree tree;
    std::vector<Open> open;
    const auto expand = [&](const Tokens& at, int32_t parent, int64_t depth, double joint) {
        std::vector<Guess> found = guesses(texts, at, max_match);
        if (static_cast<int64_t>(found.size()) > plan.width) {
            found.resize(static_cast<size_t>(plan.width));
        }
        for (const Guess& guess : found) {
            if (joint * guess.score < plan.min_score) continue;
            open.push_back({joint * guess.score, parent, guess, joined(at, {guess.token}), depth});
        }
    };
    expand(text, -1, 1, 1.0);
    while (!open.empty() && static_cast<int64_t>(tree.token_ids.size()) < plan.num_nodes) {
        const auto best =
            std::min_element(open.begin(), open.end(), [](const Open& a, const Open& b) {
                return std::tuple(-a.joint, a.parent, a.guess.token) <
                       std::tuple(-b.joint, b.parent, b.guess.token);
            });
        const Open node = *best;
        open.erase(best);
        tree.token_ids.push_back(node.guess.token);
        tree.parents.push_back(node.parent);
        tree.scores.push_back(node.guess.score);
        const auto number = static_cast<int32_t>(tree.token_ids.size()) - 1;
        if (node.depth < plan.depth) expand(node.text, number, node.depth + 1, node.joint);
    }
    return tree;
}

class Run {
  public:
    Run(uint32_t seed, Index::Limits limits, int32_t alphabet)
        : random_(seed), limits_(limits), alphabet_(alphabet), index_(limits) {
        for (const uint32_t length : {1u, 2u, 7u, 40u}) prompts_.push_back(text(length));
    }

    // How many comparisons failed.
    int go(int steps) {
        for (int step = 0; step < steps; step++) {
            act();
            if (step % 8 == 0) {
                index_.check();
                compare();
            }
        }
        return failures_;
    }

  private:
    struct Request {
        Tokens prompt, output;
    };

    uint32_t below(uint32_t bound) { return static_cast<uint32_t>(random_() % bound); }

    // Runs and loops, as texts have them.
    Tokens text(uint32_t length) {
        Tokens tokens;
        while (tokens.size() < length) {
            if (tokens.size() > 2 && below(3) == 0) {
                const size_t from = below(static_cast<uint32_t>(tokens.size()));
                for (size_t i = 0; i < 12; i++) {
                    const int32_t again = tokens[from + i];
                    tokens.push_back(again);
                }
            } else {
                tokens.push_back(static_cast<int32_t>(below(static_cast<uint32_t>(alphabet_))));
            }
        }
        tokens.resize(length);
        return tokens;
    }

    std::map<Index::Handle, Request>::iterator any() {
        return std::next(live_.begin(), below(static_cast<uint32_t>(live_.size())));
    }

    void act() {
        const uint32_t choice = below(100);
        if (live_.empty() || (choice < 6 && live_.size() < 6)) {
            const Tokens& prompt = prompts_[below(4)];
            live_[index_.add(prompt)] = {prompt, {}};
        } else if (choice < 82) {
            const auto request = any();
            for (const int32_t token : text(1 + below(6))) {
                index_.append(request->first, token);
                request->second.output.push_back(token);
            }
        } else if (choice < 88) {
            const auto request = any();
            Request& r = request->second;
            r.output.resize(below(static_cast<uint32_t>(r.output.size()) + 1));
            index_.cut(request->first, r.prompt.size() + r.output.size());
        } else if (choice < 94) {
            const auto request = any();
            index_.finish(request->first);
            live_.erase(request);
        } else if (choice < 99) {
            index_.add_history(prompts_[below(4)], text(below(60)));
        } else {
            index_.reset();
            live_.clear();
        }
    }

    void compare() {
        std::map<Tokens, Texts> all;
        for (const auto& [handle, request] : live_) {
            all[request.prompt].outputs.push_back(request.output);
        }
        for (const Index::PromptHistory& entry : index_.history()) {
            for (const Tokens* output : entry.outputs) {
                all[*entry.prompt].outputs.push_back(*output);
            }
        }
        const Plan plan{1 + below(6), 1 + below(12), 1 + below(3), 0.1 * below(3)};
        for (const auto& [handle, request] : live_) {
            Texts& texts = all[request.prompt];
            texts.prompt = request.prompt;
            const Tokens whole = joined(request.prompt, request.output);
            const Tree expected = search_tree(texts, whole, limits_.max_match, plan);
            const Tree found = index_.draft(handle, plan);
            failures_ += found.token_ids != expected.token_ids ||
                         found.parents != expected.parents || found.scores != expected.scores;
            Guess best{};
            const bool knows = index_.best_guess(handle, best);
            const std::vector<Guess> right = guesses(texts, whole, limits_.max_match);
            failures_ += knows == right.empty() ||
                         (knows && (best.token != right[0].token || best.score != right[0].score));
        }
    }

    std::mt19937 random_;
    Index::Limits limits_;
    int32_t alphabet_;
    Index index_;
    std::vector<Tokens> prompts_;
    std::map<Index::Handle, Request> live_;
    int failures_ = 0;
};

// "0 1" goes on in more ways than a top holds before "1" is seen without the 0: its state splits
// with its top.
int split_of_a_wide_state() {
    Index index({32, 1000, 0});
    Tokens output;
    for (int32_t token = 2; token < 20; token++) {
        for (int32_t times = token % 4; times >= 0; times--) {
            for (const int32_t next : {0, 1, token}) output.push_back(next);
        }
    }
    for (const int32_t next : {19, 1, 7, 7, 1}) output.push_back(next);
    const Index::Handle handle = index.add({0});
    for (const int32_t token : output) index.append(handle, token);
    index.check();
    const Texts texts{{0}, {output}};
    const Plan plan{2, 20, 8, 0.0};
    const Tree expected = search_tree(texts, joined({0}, output), 32, plan);
    const Tree found = index.draft(handle, plan);
    return found.token_ids != expected.token_ids || found.scores != expected.scores;
}

int check_all() {
    int failures = split_of_a_wide_state(), runs = 0;
    for (const int32_t alphabet : {1, 2, 4, 30}) {
        for (const uint32_t max_match : {1u, 3u, 8u, 32u}) {
            for (const uint64_t bound : {0u, 100u, 2000u}) {
                runs++;
                failures +=
                    Run(static_cast<uint32_t>(runs), {max_match, bound, runs % 2 * 50u}, alphabet)
                        .go(300);
            }
        }
    }
    std::printf("suffix index: %d runs, %d failures\n", runs, failures);
    return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tlt::suffix

int main() { return tlt::suffix::check_all(); }
