// A suffix automaton over many texts that grow at their ends, with branch counts. Owns: the states,
// their edges and the counts. Does not know: which texts there are, or what is proposed from the
// counts. Invariant: for every state that stands for a string u of at most `max_match` tokens, the
// edge of token t counts how often t stands behind u in the texts counted, and `total` is the sum
// of its edges.
//
// Blumer et al. 1985 (the automaton), Mohri et al. 2009 (many texts, online). The strings of a
// state end at the same places of the texts; the suffixes of a text's end are the strings of one
// state and of those that its suffix links lead to. So the state where a text ends is also its
// longest match, and appending a token bumps one edge in each of at most `max_match` states: the
// bound keeps texts that loop from costing more per token the longer they loop.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace tlt::suffix {

using StateId = uint32_t;
inline constexpr StateId kRoot = 0;  // the empty string; its edges are not counted

// Tokens of one state that are looked at: the most frequent, lowest id first where counts are
// equal.
inline constexpr uint32_t kMaxBranches = 8;

struct Branch {
    int32_t token;
    uint32_t count;
};

// The longest of a text's last `length` tokens that matter, and its state.
struct Place {
    StateId state = kRoot;
    uint32_t length = 0;
};

// The end of a text.
struct Cursor {
    StateId whole = kRoot;  // the state of the text from its first token on
    Place place;
};

class Automaton {
  public:
    explicit Automaton(uint32_t max_match);

    void append(Cursor& end, int32_t token);

    // Takes one occurrence of `token` behind the place back out of the counts; states stay.
    void uncount(Place place, int32_t token);

    // The place `token` further on. The text at the place must have gone on with it somewhere.
    Place advance(Place place, int32_t token) const;

    // The end of a text that was appended before, from the root on.
    Cursor locate(const std::vector<int32_t>& text) const;
    // The place behind `count` tokens at `tokens` that were appended before; reads max_match of
    // them.
    Place locate_place(const int32_t* tokens, size_t count) const;

    // The next shorter place whose text has gone on more often than `above` times; length 0 where
    // there is none.
    Place shorter(Place place, uint32_t above) const;
    uint32_t total(StateId state) const { return states_[state].total; }
    // How often `token` stands behind the place.
    uint32_t count(StateId state, int32_t token) const;
    // Fills `out` with the most frequent tokens behind a state other than the root, count above 0;
    // returns how many.
    uint32_t branches(StateId state, std::array<Branch, kMaxBranches>& out) const;

    uint32_t max_match() const { return max_match_; }
    size_t num_states() const { return states_.size(); }
    size_t num_bytes() const;

    // Throws std::logic_error where the structure contradicts itself.
    void check() const;
    // The state of a string, or UINT32_MAX where it stands nowhere. For tests.
    StateId find(const int32_t* tokens, size_t count) const;

  private:
    static constexpr StateId kNone = UINT32_MAX;

    struct Edge {
        int32_t token;
        StateId target;
        uint32_t count;
    };
    struct State {
        uint32_t length;  // of its longest string
        StateId link;
        uint32_t total;
        uint32_t first;  // of its block in edges_
        uint32_t num_edges;
        uint32_t top;  // number in tops_, where it has more than kMaxBranches edges
    };
    using Top = std::array<Branch, kMaxBranches>;

    StateId extend(StateId end, int32_t token);
    StateId split(StateId before, int32_t token, StateId state);
    StateId add_state(uint32_t length);
    StateId next(StateId state, int32_t token) const;
    void add_edge(StateId state, int32_t token, StateId target);
    void set_target(StateId state, int32_t token, StateId target);
    uint32_t edge_index(const State& state, int32_t token) const;
    void bump(StateId state, int32_t token);
    void raise_top(Top& top, Branch branch) const;
    Top most_frequent(const State& state) const;
    Place settle(Place place) const;
    uint32_t take_block(uint32_t capacity);
    void check_state(StateId state) const;

    uint32_t max_match_;
    std::vector<State> states_;
    std::vector<Edge> edges_;                     // blocks of a power of two, sorted by token
    std::array<std::vector<uint32_t>, 32> free_;  // blocks given up, by the logarithm of their size
    std::vector<Top> tops_;                       // sorted by count, then token
    std::unordered_map<int32_t, StateId> root_next_;  // never iterated over
};

}  // namespace tlt::suffix
