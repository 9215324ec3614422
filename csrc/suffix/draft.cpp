// Scores and trees (draft.h). The score blends contexts as interpolated backoff does (Witten & Bell
// 1991), with a doubt that shrinks as the context grows; the tree grows best first, as in
// SuffixDecoding (Oliaro et al. 2024).
#include "suffix/draft.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <queue>

namespace tlt::suffix {

namespace {

// The contexts read at one place, and every token that they know of.
struct Contexts {
    std::array<Place, kMaxLevels> levels;
    int num_levels = 0;
    std::array<Guess, kMaxLevels * kMaxBranches> guesses;
    int num_guesses = 0;

    Contexts(const Automaton& automaton, Place place) {
        double weight = 1.0;
        uint32_t above = 0;
        while (num_levels < kMaxLevels && weight >= kLeastWeight) {
            place = automaton.shorter(place, above);
            if (place.state == kRoot) return;
            above = automaton.total(place.state);
            levels[static_cast<size_t>(num_levels++)] = place;
            const double doubt = kDoubt / std::sqrt(static_cast<double>(place.length));
            const double share = weight / (above + doubt);
            std::array<Branch, kMaxBranches> branches;
            const uint32_t num = automaton.branches(place.state, branches);
            for (uint32_t i = 0; i < num; i++) add(branches[i].token, share * branches[i].count);
            weight = share * doubt;
        }
    }

    void add(int32_t token, double score) {
        for (int i = 0; i < num_guesses; i++) {
            Guess& guess = guesses[static_cast<size_t>(i)];
            if (guess.token == token) {
                guess.score += score;
                return;
            }
        }
        guesses[static_cast<size_t>(num_guesses++)] = {token, score};
    }

    // The longest context that has gone on with the token, and the token.
    Place advance(const Automaton& automaton, int32_t token) const {
        int i = 0;
        while (automaton.count(levels[static_cast<size_t>(i)].state, token) == 0) i++;
        return automaton.advance(levels[static_cast<size_t>(i)], token);
    }
};

bool comes_first(const Guess& a, const Guess& b) {
    return a.score != b.score ? a.score > b.score : a.token < b.token;
}

// A node that may be added next.
struct Candidate {
    double joint;
    double score;
    int32_t token;
    int32_t parent;
    int64_t depth;
    Place place;
};

struct ComesLater {
    bool operator()(const Candidate& a, const Candidate& b) const {
        if (a.joint != b.joint) return a.joint < b.joint;
        if (a.parent != b.parent) return a.parent > b.parent;
        return a.token > b.token;
    }
};

}  // namespace

bool best_guess(const Automaton& automaton, Place place, Guess& best) {
    const Contexts contexts(automaton, place);
    if (contexts.num_guesses == 0) return false;
    const Guess* first = contexts.guesses.data();
    best = *std::min_element(first, first + contexts.num_guesses, comes_first);
    return true;
}

Tree draft(const Automaton& automaton, Place place, const Plan& plan) {
    Tree tree;
    std::priority_queue<Candidate, std::vector<Candidate>, ComesLater> open;
    const auto expand = [&](Place at, int32_t parent, int64_t depth, double joint) {
        Contexts contexts(automaton, at);
        Guess* first = contexts.guesses.data();
        const int64_t num = std::min<int64_t>(contexts.num_guesses, plan.width);
        std::partial_sort(first, first + num, first + contexts.num_guesses, comes_first);
        for (int64_t i = 0; i < num; i++) {
            const Guess& guess = first[i];
            if (joint * guess.score < plan.min_score) break;
            open.push({joint * guess.score, guess.score, guess.token, parent, depth,
                       contexts.advance(automaton, guess.token)});
        }
    };
    if (plan.depth > 0 && plan.num_nodes > 0) expand(place, -1, 1, 1.0);
    while (!open.empty() && static_cast<int64_t>(tree.token_ids.size()) < plan.num_nodes) {
        const Candidate node = open.top();
        open.pop();
        tree.token_ids.push_back(node.token);
        tree.parents.push_back(node.parent);
        tree.scores.push_back(node.score);
        const auto number = static_cast<int32_t>(tree.token_ids.size()) - 1;
        if (node.depth < plan.depth) expand(node.place, number, node.depth + 1, node.joint);
    }
    return tree;
}

}  // namespace tlt::suffix
