// The texts that proposals come from, by prompt. Owns: requests that live, the history of those
// that have ended, and what is thrown away to keep the history within its bound. Does not know: how
// a text is matched or scored. Invariant: the automaton of a prompt counts the prompt once, the
// output of each live request so far, and each output of its history; nothing else, whatever was
// cut or evicted since.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <unordered_map>
#include <vector>

#include "suffix/automaton.h"
#include "suffix/draft.h"

namespace tlt::suffix {

using Tokens = std::vector<int32_t>;

struct TokensHash {
    size_t operator()(const Tokens& tokens) const;
};

class Index {
  public:
    using Handle = uint32_t;

    struct Limits {
        uint32_t max_match;
        uint64_t max_history_tokens;
        // States of removed tokens are worth their memory until there are this many more of them
        // than of counted ones.
        uint64_t rebuild_slack = 4096;
    };
    struct Sizes {
        uint64_t live, live_tokens, history_prompts, history_texts, history_tokens, bytes;
    };
    struct PromptHistory {
        const Tokens* prompt;
        std::vector<const Tokens*> outputs;  // in the order in which they ended
    };

    explicit Index(Limits limits) : limits_(limits) {}
    Index(const Index&) = delete;
    Index& operator=(const Index&) = delete;

    // A request with no output yet. Its handle is free again after `finish` or `reset`.
    Handle add(const Tokens& prompt);
    bool is_live(Handle handle) const;
    // Prompt and output so far.
    size_t num_tokens(Handle handle) const;
    void append(Handle handle, int32_t token);
    // Takes output tokens back so that `num_tokens` of prompt and output are left.
    void cut(Handle handle, size_t num_tokens);
    // Its output becomes history.
    void finish(Handle handle);
    // Drops all live requests and their output.
    void reset();

    bool best_guess(Handle handle, Guess& best) const;
    Tree draft(Handle handle, const Plan& plan) const;

    void add_history(const Tokens& prompt, Tokens output);
    // Least recently used prompt first; valid until the next change.
    std::vector<PromptHistory> history() const;

    Sizes sizes() const;
    // Throws std::logic_error where anything contradicts itself; counts everything again.
    void check() const;

  private:
    struct Ended {
        uint64_t serial;  // order of ending, over all prompts
        Tokens output;
    };
    struct Group {
        const Tokens* prompt;
        Automaton automaton;
        Cursor prompt_end;
        std::deque<Ended> ended;
        std::vector<Handle> live;
        uint64_t counted = 0;  // tokens that the automaton counts
        uint64_t removed = 0;  // tokens that it counted once, whose states are still there
    };
    using Groups = std::list<Group>;
    struct Live {
        Groups::iterator group;
        Tokens output;
        Cursor end;
        bool used = false;
    };

    Groups::iterator group_of(const Tokens& prompt);
    void drop_if_empty(Groups::iterator group);
    void release(Handle handle);
    void keep(Groups::iterator group, Tokens output);
    void append_to(Group& group, Cursor& end, int32_t token);
    void uncount(Group& group, const Tokens& output, size_t from);
    void rebuild_if_sparse(Group& group);
    void evict();
    void drop_oldest_output();
    uint64_t history_tokens(const Group& group) const;
    void check_counts(const Group& group) const;

    Limits limits_;
    Groups groups_;  // least recently used first
    std::unordered_map<Tokens, Groups::iterator, TokensHash> by_prompt_;  // never iterated over
    std::vector<Live> live_;
    std::vector<Handle> free_handles_;
    uint64_t history_tokens_ = 0;
    uint64_t next_serial_ = 0;
};

}  // namespace tlt::suffix
