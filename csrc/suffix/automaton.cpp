// The suffix automaton (automaton.h). Owns: how states are split and where edges lie. Does not
// know: texts as a whole. Invariant: blocks of edges hold a power of two and are full up to
// `num_edges`; a block that is given up is used again.
#include "suffix/automaton.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

namespace tlt::suffix {

namespace {

constexpr uint32_t kAbsent = UINT32_MAX;

bool comes_first(Branch a, Branch b) {
    return a.count != b.count ? a.count > b.count : a.token < b.token;
}

}  // namespace

Automaton::Automaton(uint32_t max_match) : max_match_(max_match) {
    add_state(0);
    states_[kRoot].link = kNone;
}

StateId Automaton::add_state(uint32_t length) {
    if (states_.size() >= kNone) throw std::length_error("suffix automaton: more than 2^32 states");
    states_.push_back({length, kRoot, 0, 0, 0, kAbsent});
    return static_cast<StateId>(states_.size() - 1);
}

// --- edges
// -----------------------------------------------------------------------------------------------------------

// Where the token is, or would be put in.
uint32_t Automaton::edge_index(const State& state, int32_t token) const {
    const Edge* edges = edges_.data() + state.first;
    if (state.num_edges <= 8) {
        uint32_t i = 0;
        while (i < state.num_edges && edges[i].token < token) i++;
        return i;
    }
    const Edge* found =
        std::lower_bound(edges, edges + state.num_edges, token,
                         [](const Edge& edge, int32_t value) { return edge.token < value; });
    return static_cast<uint32_t>(found - edges);
}

StateId Automaton::next(StateId id, int32_t token) const {
    if (id == kRoot) {
        const auto found = root_next_.find(token);
        return found == root_next_.end() ? kNone : found->second;
    }
    const State& state = states_[id];
    const uint32_t i = edge_index(state, token);
    if (i == state.num_edges || edges_[state.first + i].token != token) return kNone;
    return edges_[state.first + i].target;
}

uint32_t Automaton::take_block(uint32_t capacity) {
    std::vector<uint32_t>& free = free_[static_cast<size_t>(std::countr_zero(capacity))];
    if (!free.empty()) {
        const uint32_t first = free.back();
        free.pop_back();
        return first;
    }
    const size_t first = edges_.size();
    if (first + capacity > kNone) throw std::length_error("suffix automaton: more than 2^32 edges");
    edges_.resize(first + capacity);
    return static_cast<uint32_t>(first);
}

void Automaton::add_edge(StateId id, int32_t token, StateId target) {
    if (id == kRoot) {
        root_next_.emplace(token, target);
        return;
    }
    const uint32_t num = states_[id].num_edges;
    if (num == 0) {
        states_[id].first = take_block(1);
    } else if (std::has_single_bit(num)) {  // the block is full
        const uint32_t first = take_block(2 * num);
        std::copy_n(edges_.begin() + states_[id].first, num, edges_.begin() + first);
        free_[static_cast<size_t>(std::countr_zero(num))].push_back(states_[id].first);
        states_[id].first = first;
    }
    State& state = states_[id];
    const uint32_t i = edge_index(state, token);
    Edge* edges = edges_.data() + state.first;
    std::copy_backward(edges + i, edges + num, edges + num + 1);
    edges[i] = {token, target, 0};
    state.num_edges++;
    if (state.top != kAbsent) {
        raise_top(tops_[state.top], {token, 0});
    } else if (state.num_edges > kMaxBranches) {
        state.top = static_cast<uint32_t>(tops_.size());
        tops_.push_back(most_frequent(state));
    }
}

void Automaton::set_target(StateId id, int32_t token, StateId target) {
    if (id == kRoot) {
        root_next_.find(token)->second = target;
        return;
    }
    const State& state = states_[id];
    edges_[state.first + edge_index(state, token)].target = target;
}

// --- counts
// ----------------------------------------------------------------------------------------------------------

void Automaton::bump(StateId id, int32_t token) {
    State& state = states_[id];
    Edge& edge = edges_[state.first + edge_index(state, token)];
    edge.count++;
    state.total++;
    if (state.top != kAbsent) raise_top(tops_[state.top], {token, edge.count});
}

// A count went up by one or is new at 0, so the token moves forward only.
void Automaton::raise_top(Top& top, Branch branch) const {
    size_t i = 0;
    while (i < top.size() && top[i].token != branch.token) i++;
    if (i == top.size()) {
        if (!comes_first(branch, top.back())) return;
        i--;
    }
    for (; i > 0 && comes_first(branch, top[i - 1]); i--) top[i] = top[i - 1];
    top[i] = branch;
}

Automaton::Top Automaton::most_frequent(const State& state) const {
    Top top;
    std::vector<Branch> all;
    for (uint32_t i = 0; i < state.num_edges; i++) {
        const Edge& edge = edges_[state.first + i];
        all.push_back({edge.token, edge.count});
    }
    std::partial_sort_copy(all.begin(), all.end(), top.begin(), top.end(), comes_first);
    return top;
}

void Automaton::uncount(Place place, int32_t token) {
    for (StateId id = settle(place).state; id != kRoot; id = states_[id].link) {
        State& state = states_[id];
        edges_[state.first + edge_index(state, token)].count--;
        state.total--;
        if (state.top != kAbsent) tops_[state.top] = most_frequent(state);
    }
}

uint32_t Automaton::count(StateId id, int32_t token) const {
    const State& state = states_[id];
    const uint32_t i = edge_index(state, token);
    if (i == state.num_edges || edges_[state.first + i].token != token) return 0;
    return edges_[state.first + i].count;
}

uint32_t Automaton::branches(StateId id, std::array<Branch, kMaxBranches>& out) const {
    const State& state = states_[id];
    uint32_t num = 0;
    if (state.top != kAbsent) {
        for (const Branch& branch : tops_[state.top]) {
            if (branch.count > 0) out[num++] = branch;
        }
        return num;
    }
    for (uint32_t i = 0; i < state.num_edges; i++) {
        const Edge& edge = edges_[state.first + i];
        if (edge.count > 0) out[num++] = {edge.token, edge.count};
    }
    return num;
}

// --- texts
// -----------------------------------------------------------------------------------------------------------

StateId Automaton::split(StateId before, int32_t token, StateId id) {
    const StateId clone = add_state(states_[before].length + 1);
    const State from = states_[id];
    states_[clone].link = from.link;
    states_[id].link = clone;
    if (from.num_edges > 0) {  // until now, the strings of both stood at the same places
        const uint32_t first = take_block(std::bit_ceil(from.num_edges));
        std::copy_n(edges_.begin() + from.first, from.num_edges, edges_.begin() + first);
        states_[clone].first = first;
        states_[clone].num_edges = from.num_edges;
        states_[clone].total = from.total;
        if (from.top != kAbsent) {
            states_[clone].top = static_cast<uint32_t>(tops_.size());
            tops_.push_back(Top(tops_[from.top]));
        }
    }
    for (; before != kNone && next(before, token) == id; before = states_[before].link) {
        set_target(before, token, clone);
    }
    return clone;
}

StateId Automaton::extend(StateId end, int32_t token) {
    StateId target = next(end, token);
    if (target != kNone) {  // another text went this way
        if (states_[target].length == states_[end].length + 1) return target;
        return split(end, token, target);
    }
    const StateId added = add_state(states_[end].length + 1);
    StateId before = end;
    while (before != kNone && (target = next(before, token)) == kNone) {
        add_edge(before, token, added);
        before = states_[before].link;
    }
    if (before == kNone) return added;  // linked to the root
    const bool whole = states_[target].length == states_[before].length + 1;
    const StateId link = whole ? target : split(before, token, target);
    states_[added].link = link;
    return added;
}

// The string may have moved to a state split off since.
Place Automaton::settle(Place place) const {
    while (place.state != kRoot && states_[states_[place.state].link].length >= place.length) {
        place.state = states_[place.state].link;
    }
    return place;
}

Place Automaton::advance(Place place, int32_t token) const {
    place = settle(place);
    const StateId target = next(place.state, token);
    if (target == kNone) throw std::logic_error("suffix automaton: a text lost its way");
    return settle({target, std::min(place.length + 1, max_match_)});
}

void Automaton::append(Cursor& end, int32_t token) {
    end.whole = extend(end.whole, token);
    const Place place = settle(end.place);
    for (StateId id = place.state; id != kRoot; id = states_[id].link) bump(id, token);
    end.place = advance(place, token);
}

Place Automaton::shorter(Place place, uint32_t above) const {
    place = settle(place);
    while (place.state != kRoot && states_[place.state].total <= above) {
        place.state = states_[place.state].link;
        place.length = states_[place.state].length;
    }
    return place;
}

Cursor Automaton::locate(const std::vector<int32_t>& text) const {
    Cursor end;
    for (const int32_t token : text) {
        end.whole = next(end.whole, token);
        if (end.whole == kNone) throw std::logic_error("suffix automaton: the text is not in it");
    }
    end.place = locate_place(text.data(), text.size());
    return end;
}

Place Automaton::locate_place(const int32_t* tokens, size_t count) const {
    Place place;
    const size_t reach = std::min<size_t>(count, max_match_);
    for (const int32_t* token = tokens + count - reach; token != tokens + count; token++) {
        place = advance(place, *token);
    }
    return place;
}

StateId Automaton::find(const int32_t* tokens, size_t count) const {
    StateId id = kRoot;
    for (size_t i = 0; i < count && id != kNone; i++) id = next(id, tokens[i]);
    return id;
}

// --- checks
// ----------------------------------------------------------------------------------------------------------

size_t Automaton::num_bytes() const {
    size_t bytes = states_.capacity() * sizeof(State) + edges_.capacity() * sizeof(Edge) +
                   tops_.capacity() * sizeof(Top) + root_next_.size() * 32;
    for (const std::vector<uint32_t>& blocks : free_) bytes += blocks.capacity() * sizeof(uint32_t);
    return bytes;
}

void Automaton::check_state(StateId id) const {
    const State& state = states_[id];
    const auto demand = [id](bool holds, const char* what) {
        if (holds) return;
        throw std::logic_error("suffix automaton: state " + std::to_string(id) + ": " + what);
    };
    demand(state.link < states_.size() && states_[state.link].length < state.length,
           "its link is not to a shorter string");
    uint64_t sum = 0;
    for (uint32_t i = 0; i < state.num_edges; i++) {
        const Edge& edge = edges_[state.first + i];
        demand(i == 0 || edges_[state.first + i - 1].token < edge.token, "edges out of order");
        demand(edge.target < states_.size() && states_[edge.target].length > state.length,
               "an edge does not lead to a longer string");
        sum += edge.count;
    }
    demand(sum == state.total, "its total is not the sum of its counts");
    demand((state.top != kAbsent) == (state.num_edges > kMaxBranches), "its top is missing");
    if (state.top == kAbsent) return;
    const Top expected = most_frequent(state);
    const auto equal = [](Branch a, Branch b) { return a.token == b.token && a.count == b.count; };
    const bool same = std::equal(expected.begin(), expected.end(), tops_[state.top].begin(), equal);
    demand(same, "its top is not its most frequent tokens");
}

void Automaton::check() const {
    uint64_t used = 0;
    for (StateId id = 1; id < states_.size(); id++) {
        check_state(id);
        if (states_[id].num_edges > 0) used += std::bit_ceil(states_[id].num_edges);
    }
    for (size_t log = 0; log < free_.size(); log++) used += free_[log].size() << log;
    if (used != edges_.size()) throw std::logic_error("suffix automaton: blocks of edges leaked");
    for (const auto& [token, target] : root_next_) {
        if (target == kRoot || target >= states_.size()) {
            throw std::logic_error("suffix automaton: the root leads nowhere with " +
                                   std::to_string(token));
        }
    }
}

}  // namespace tlt::suffix
