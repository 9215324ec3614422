// From counts to proposals. Owns: how counts of several contexts become a score, and the order in
// which a tree grows. Does not know: where the counts come from, or who asks. Invariant: what is
// proposed depends on the counts alone; the first node of a tree is `best_guess`, and any first k
// nodes are the best tree of k.
#pragma once

#include <cstdint>
#include <vector>

#include "suffix/automaton.h"

namespace tlt::suffix {

// Contexts that are blended: the longest that has gone on, and shorter ones that have gone on more
// often.
inline constexpr int kMaxLevels = 3;
// Shorter contexts are not asked once less than this weight is left for them.
inline constexpr double kLeastWeight = 1.0 / 64;
// Shorter contexts weigh as much as kDoubt / sqrt(n) occurrences of a context of n tokens. On
// rollouts of SmolLM2-135M this foretold what is accepted better (log loss) than a doubt of 1 / n
// or a constant one; two to six levels did alike.
inline constexpr double kDoubt = 4.0;

struct Guess {
    int32_t token;
    double score;  // estimated probability that it comes next, in (0, 1)
};

struct Plan {
    int64_t depth;
    int64_t num_nodes;
    int64_t width;
    double min_score;  // of the product of scores from the root
};

struct Tree {
    std::vector<int32_t> token_ids;
    std::vector<int32_t> parents;  // -1 for the root
    std::vector<double> scores;
};

// The best guess of what follows the place; false where there is none.
bool best_guess(const Automaton& automaton, Place place, Guess& best);

Tree draft(const Automaton& automaton, Place place, const Plan& plan);

}  // namespace tlt::suffix
