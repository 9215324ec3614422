// The Python module engine.spec._suffix. Owns: names, signatures and the check of what comes from
// Python. Does not know: requests. Invariant: a handle that is not live, or a token that is not an
// int32, raises before anything changes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "suffix/index.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tlt::suffix {
namespace {

Index::Handle take_handle(const Index& index, nb::handle value) {
    const auto handle = nb::cast<uint32_t>(value);
    if (!index.is_live(handle)) {
        throw std::invalid_argument("handle " + std::to_string(handle) + " is not live");
    }
    return handle;
}

int32_t take_token(nb::handle value) {
    const long long token = PyLong_AsLongLong(value.ptr());
    if (token == -1 && PyErr_Occurred()) throw nb::python_error();
    if (token < 0 || token > INT32_MAX) {
        throw std::invalid_argument("token ids must be in 0..2147483647, got " +
                                    std::to_string(token));
    }
    return static_cast<int32_t>(token);
}

// One request in a call: what it had, what it has now.
struct Growth {
    Index::Handle handle;
    size_t first;                 // of the new tokens in its list
    std::vector<int32_t> tokens;  // the new ones
    bool knows;
    Guess guess;  // for the first of them
};

// Guesses for all first tokens come before any token is added, as a proposal for this step would
// have.
nb::list extend(Index& index, nb::list handles, nb::list token_ids) {
    const size_t num = handles.size();
    if (token_ids.size() != num) throw std::invalid_argument("as many handles as lists of tokens");
    std::vector<Growth> all;
    all.reserve(num);
    for (size_t i = 0; i < num; i++) {
        const auto tokens = nb::cast<nb::list>(token_ids[i]);
        Growth growth{take_handle(index, handles[i]), 0, {}, false, {}};
        growth.first = index.num_tokens(growth.handle);
        for (size_t t = growth.first; t < tokens.size(); t++) {
            growth.tokens.push_back(take_token(tokens[t]));
        }
        if (!growth.tokens.empty()) growth.knows = index.best_guess(growth.handle, growth.guess);
        all.push_back(std::move(growth));
    }
    nb::list trials;
    for (size_t i = 0; i < num; i++) {
        Growth& growth = all[i];
        if (index.num_tokens(growth.handle) != growth.first) continue;  // it came twice
        const size_t length = nb::cast<nb::list>(token_ids[i]).size();
        if (length < growth.first) index.cut(growth.handle, length);
        for (size_t t = 0; t < growth.tokens.size(); t++) {
            if (t > 0) growth.knows = index.best_guess(growth.handle, growth.guess);
            if (growth.knows) {
                trials.append(
                    nb::make_tuple(i, growth.guess.score, growth.guess.token == growth.tokens[t]));
            }
            index.append(growth.handle, growth.tokens[t]);
        }
    }
    return trials;
}

// jobs: (handle, depth, num_nodes, width, min_score).
nb::list propose(const Index& index, nb::list jobs) {
    nb::list trees;
    for (nb::handle item : jobs) {
        const auto job = nb::cast<nb::tuple>(item);
        const Plan plan{nb::cast<int64_t>(job[1]), nb::cast<int64_t>(job[2]),
                        nb::cast<int64_t>(job[3]), nb::cast<double>(job[4])};
        const Tree tree = index.draft(take_handle(index, job[0]), plan);
        nb::list tokens, parents, scores;
        for (size_t n = 0; n < tree.token_ids.size(); n++) {
            tokens.append(tree.token_ids[n]);
            parents.append(tree.parents[n]);
            scores.append(tree.scores[n]);
        }
        trees.append(nb::make_tuple(nb::tuple(tokens), nb::tuple(parents), nb::tuple(scores)));
    }
    return trees;
}

nb::bytes as_bytes(const Tokens& tokens) {
    return nb::bytes(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(int32_t));
}

nb::list history(const Index& index) {
    nb::list all;
    for (const Index::PromptHistory& entry : index.history()) {
        nb::list outputs;
        for (const Tokens* output : entry.outputs) outputs.append(as_bytes(*output));
        all.append(nb::make_tuple(as_bytes(*entry.prompt), outputs));
    }
    return all;
}

nb::dict sizes(const Index& index) {
    const Index::Sizes sizes = index.sizes();
    nb::dict all;
    all["live_requests"] = sizes.live;
    all["live_tokens"] = sizes.live_tokens;
    all["history_prompts"] = sizes.history_prompts;
    all["history_texts"] = sizes.history_texts;
    all["history_tokens"] = sizes.history_tokens;
    all["bytes"] = sizes.bytes;
    return all;
}

}  // namespace
}  // namespace tlt::suffix

NB_MODULE(_suffix, m) {
    using namespace tlt::suffix;
    m.attr("MAX_LEVELS") = kMaxLevels;
    m.attr("MAX_BRANCHES") = kMaxBranches;
    m.attr("LEAST_WEIGHT") = kLeastWeight;
    m.attr("DOUBT") = kDoubt;

    nb::class_<Index>(m, "SuffixIndex", "Texts by prompt, their branch counts, and proposals.")
        .def(
            "__init__",
            [](Index* self, uint32_t max_match, uint64_t max_history_tokens) {
                new (self) Index({max_match, max_history_tokens});
            },
            "max_match"_a, "max_history_tokens"_a)
        .def("add", &Index::add, "prompt_token_ids"_a)
        .def("extend", &extend, "handles"_a, "token_ids"_a)
        .def(
            "finish",
            [](Index& index, nb::handle handle) { index.finish(take_handle(index, handle)); },
            "handle"_a)
        .def("reset", &Index::reset)
        .def("propose", &propose, "jobs"_a)
        .def("add_history", &Index::add_history, "prompt_token_ids"_a, "output_token_ids"_a)
        .def("history", &history)
        .def("sizes", &sizes)
        .def("check", &Index::check);
}
