// Sizes and checks of the index (index.h). Owns: the slow recount. Does not know: anything that
// changes state. Invariant: it counts with the texts alone, token by token, and never with the
// counts that it checks.
#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "suffix/index.h"

namespace tlt::suffix {

namespace {

void demand(bool holds, const std::string& what) {
    if (!holds) throw std::logic_error("suffix index: " + what);
}

using Counts = std::map<std::pair<StateId, int32_t>, uint32_t>;

// Bumps the edge of text[i] in the state of each suffix of what stands before it, once a state.
void recount(const Automaton& automaton, const Tokens& text, size_t from, Counts& counts) {
    for (size_t i = from; i < text.size(); i++) {
        const size_t reach = std::min<size_t>(i, automaton.max_match());
        StateId last = kRoot;
        for (size_t length = 1; length <= reach; length++) {
            const StateId state = automaton.find(text.data() + i - length, length);
            if (state != last) counts[{state, text[i]}]++;
            last = state;
        }
    }
}

}  // namespace

Index::Sizes Index::sizes() const {
    Sizes sizes{};
    for (const Group& group : groups_) {
        sizes.live += group.live.size();
        sizes.history_prompts += !group.ended.empty();
        sizes.history_texts += group.ended.size();
        sizes.bytes += group.automaton.num_bytes() + 4 * (group.counted + group.prompt->size());
        for (const Handle handle : group.live) sizes.live_tokens += num_tokens(handle);
    }
    sizes.history_tokens = history_tokens_;
    return sizes;
}

void Index::check_counts(const Group& group) const {
    Counts counts;
    recount(group.automaton, *group.prompt, 0, counts);
    uint64_t num_tokens = group.prompt->size();
    const auto add = [&](const Tokens& output, Cursor end) {
        Tokens text = *group.prompt;
        text.insert(text.end(), output.begin(), output.end());
        recount(group.automaton, text, group.prompt->size(), counts);
        num_tokens += output.size();
        const Cursor expected = group.automaton.locate(text);
        demand(expected.whole == end.whole, "a text ends in another state than it should");
        const Place place = group.automaton.shorter(end.place, 0);
        const Place right = group.automaton.shorter(expected.place, 0);
        demand(place.state == right.state && place.length == right.length,
               "a text's place is not its longest match");
    };
    for (const Ended& ended : group.ended) {
        Tokens text = *group.prompt;
        text.insert(text.end(), ended.output.begin(), ended.output.end());
        add(ended.output, group.automaton.locate(text));
    }
    for (const Handle handle : group.live) add(live_[handle].output, live_[handle].end);
    demand(num_tokens == group.counted, "the number of counted tokens is wrong");
    std::map<StateId, uint32_t> totals;
    for (const auto& [edge, expected] : counts) {
        demand(group.automaton.count(edge.first, edge.second) == expected,
               "state " + std::to_string(edge.first) + " counts token " +
                   std::to_string(edge.second) + " " +
                   std::to_string(group.automaton.count(edge.first, edge.second)) +
                   " times instead of " + std::to_string(expected));
        totals[edge.first] += expected;
    }
    for (const auto& [state, total] : totals) {
        demand(group.automaton.total(state) == total, "a state counts what stands nowhere");
    }
}

void Index::check() const {
    demand(by_prompt_.size() == groups_.size(), "prompts and groups differ in number");
    uint64_t num_live = 0;
    uint64_t num_history = 0;
    for (auto group = groups_.begin(); group != groups_.end(); ++group) {
        const auto found = by_prompt_.find(*group->prompt);
        demand(found != by_prompt_.end() && &found->first == group->prompt &&
                   &*found->second == &*group,
               "a prompt leads to another group");
        demand(!group->live.empty() || !group->ended.empty(), "a group that nobody needs");
        for (const Handle handle : group->live) {
            demand(is_live(handle) && &*live_[handle].group == &*group,
                   "a group has a request that is not its own");
        }
        num_live += group->live.size();
        num_history += history_tokens(*group);
        group->automaton.check();
        check_counts(*group);
    }
    demand(num_live + free_handles_.size() == live_.size(), "handles leaked");
    demand(num_history == history_tokens_, "the tokens of the history are counted wrongly");
    demand(num_history <= limits_.max_history_tokens, "the history is above its bound");
}

}  // namespace tlt::suffix
