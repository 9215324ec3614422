// Live requests and history (index.h). Owns: their order of eviction. Does not know: Python.
// Invariant: a prompt is here exactly as long as it has a live request or a history.
#include "suffix/index.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace tlt::suffix {

size_t TokensHash::operator()(const Tokens& tokens) const {
    uint64_t hash = tokens.size();
    for (const int32_t token : tokens) {
        hash = (hash ^ static_cast<uint32_t>(token)) * 0x9E3779B97F4A7C15ull;
        hash ^= hash >> 29;
    }
    return hash;
}

// --- groups
// ----------------------------------------------------------------------------------------------------------

void Index::append_to(Group& group, Cursor& end, int32_t token) {
    group.automaton.append(end, token);
    group.counted++;
}

// Found or made; most recently used from now on.
Index::Groups::iterator Index::group_of(const Tokens& prompt) {
    const auto [entry, added] = by_prompt_.try_emplace(prompt);
    if (added) {
        groups_.push_back({&entry->first, Automaton(limits_.max_match), Cursor(), {}, {}, 0, 0});
        entry->second = std::prev(groups_.end());
        for (const int32_t token : prompt) {
            append_to(groups_.back(), groups_.back().prompt_end, token);
        }
    } else {
        groups_.splice(groups_.end(), groups_, entry->second);
    }
    return entry->second;
}

void Index::drop_if_empty(Groups::iterator group) {
    if (!group->live.empty() || !group->ended.empty()) return;
    by_prompt_.erase(by_prompt_.find(*group->prompt));
    groups_.erase(group);
}

uint64_t Index::history_tokens(const Group& group) const {
    if (group.ended.empty()) return 0;
    uint64_t num = group.prompt->size();
    for (const Ended& ended : group.ended) num += ended.output.size();
    return num;
}

// Takes the output from token `from` on out of the counts.
void Index::uncount(Group& group, const Tokens& output, size_t from) {
    const size_t reach = limits_.max_match;
    Tokens before(output.begin() + static_cast<ptrdiff_t>(from > reach ? from - reach : 0),
                  output.begin() + static_cast<ptrdiff_t>(from));
    if (before.size() < reach) {
        const size_t missing = std::min(reach - before.size(), group.prompt->size());
        before.insert(before.begin(), group.prompt->end() - static_cast<ptrdiff_t>(missing),
                      group.prompt->end());
    }
    Place place = group.automaton.locate_place(before.data(), before.size());
    for (size_t i = from; i < output.size(); i++) {
        group.automaton.uncount(place, output[i]);
        place = group.automaton.advance(place, output[i]);
    }
    group.counted -= output.size() - from;
    group.removed += output.size() - from;
}

void Index::rebuild_if_sparse(Group& group) {
    if (group.removed <= group.counted + limits_.rebuild_slack) return;
    group.automaton = Automaton(limits_.max_match);
    group.counted = group.removed = 0;
    group.prompt_end = Cursor();
    for (const int32_t token : *group.prompt) append_to(group, group.prompt_end, token);
    for (const Ended& ended : group.ended) {
        Cursor end = group.prompt_end;
        for (const int32_t token : ended.output) append_to(group, end, token);
    }
    for (const Handle handle : group.live) {
        Live& live = live_[handle];
        live.end = group.prompt_end;
        for (const int32_t token : live.output) append_to(group, live.end, token);
    }
}

// --- live requests
// ---------------------------------------------------------------------------------------------------

Index::Handle Index::add(const Tokens& prompt) {
    const Groups::iterator group = group_of(prompt);
    if (free_handles_.empty()) {
        free_handles_.push_back(static_cast<Handle>(live_.size()));
        live_.emplace_back();
    }
    const Handle handle = free_handles_.back();
    free_handles_.pop_back();
    live_[handle] = {group, {}, group->prompt_end, true};
    group->live.push_back(handle);
    return handle;
}

bool Index::is_live(Handle handle) const { return handle < live_.size() && live_[handle].used; }

size_t Index::num_tokens(Handle handle) const {
    return live_[handle].group->prompt->size() + live_[handle].output.size();
}

void Index::append(Handle handle, int32_t token) {
    Live& live = live_[handle];
    append_to(*live.group, live.end, token);
    live.output.push_back(token);
}

void Index::cut(Handle handle, size_t num_tokens) {
    Live& live = live_[handle];
    Group& group = *live.group;
    const size_t num_output = num_tokens - std::min(num_tokens, group.prompt->size());
    if (num_output >= live.output.size()) return;
    uncount(group, live.output, num_output);
    live.output.resize(num_output);
    Tokens text = *group.prompt;
    text.insert(text.end(), live.output.begin(), live.output.end());
    live.end = group.automaton.locate(text);
    rebuild_if_sparse(group);
}

void Index::release(Handle handle) {
    std::vector<Handle>& handles = live_[handle].group->live;
    handles.erase(std::find(handles.begin(), handles.end(), handle));
    live_[handle] = Live();
    free_handles_.push_back(handle);
}

void Index::finish(Handle handle) {
    const Groups::iterator group = live_[handle].group;
    Tokens output = std::move(live_[handle].output);
    release(handle);
    groups_.splice(groups_.end(), groups_, group);
    keep(group, std::move(output));
}

void Index::reset() {
    for (Handle handle = 0; handle < live_.size(); handle++) {
        if (!live_[handle].used) continue;
        const Groups::iterator group = live_[handle].group;
        uncount(*group, live_[handle].output, 0);
        release(handle);
        rebuild_if_sparse(*group);
        drop_if_empty(group);
    }
    live_.clear();
    free_handles_.clear();
}

bool Index::best_guess(Handle handle, Guess& best) const {
    const Live& live = live_[handle];
    return suffix::best_guess(live.group->automaton, live.end.place, best);
}

Tree Index::draft(Handle handle, const Plan& plan) const {
    const Live& live = live_[handle];
    return suffix::draft(live.group->automaton, live.end.place, plan);
}

// --- history
// ---------------------------------------------------------------------------------------------------------

// An output that the automaton counts already becomes history.
void Index::keep(Groups::iterator group, Tokens output) {
    if (!output.empty()) {
        history_tokens_ += output.size() + (group->ended.empty() ? group->prompt->size() : 0);
        output.shrink_to_fit();
        group->ended.push_back({next_serial_++, std::move(output)});
        evict();
        return;
    }
    drop_if_empty(group);
}

void Index::add_history(const Tokens& prompt, Tokens output) {
    const Groups::iterator group = group_of(prompt);
    Cursor end = group->prompt_end;
    for (const int32_t token : output) append_to(*group, end, token);
    keep(group, std::move(output));
}

// Whole prompts first, least recently used first; then, of prompts in use, the oldest outputs.
void Index::evict() {
    for (auto group = groups_.begin();
         history_tokens_ > limits_.max_history_tokens && group != std::prev(groups_.end());) {
        const auto victim = group++;
        if (!victim->live.empty()) continue;
        history_tokens_ -= history_tokens(*victim);
        victim->ended.clear();
        drop_if_empty(victim);
    }
    while (history_tokens_ > limits_.max_history_tokens) drop_oldest_output();
}

void Index::drop_oldest_output() {
    auto oldest = groups_.end();
    for (auto group = groups_.begin(); group != groups_.end(); ++group) {
        if (group->ended.empty()) continue;
        if (oldest == groups_.end() || group->ended.front().serial < oldest->ended.front().serial) {
            oldest = group;
        }
    }
    history_tokens_ -= history_tokens(*oldest);
    uncount(*oldest, oldest->ended.front().output, 0);
    oldest->ended.pop_front();
    history_tokens_ += history_tokens(*oldest);
    rebuild_if_sparse(*oldest);
    drop_if_empty(oldest);
}

std::vector<Index::PromptHistory> Index::history() const {
    std::vector<PromptHistory> all;
    for (const Group& group : groups_) {
        if (group.ended.empty()) continue;
        all.push_back({group.prompt, {}});
        for (const Ended& ended : group.ended) all.back().outputs.push_back(&ended.output);
    }
    return all;
}

}  // namespace tlt::suffix
