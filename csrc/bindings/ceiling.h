// The ceilings of cpu/ceiling.cpp, as Python calls them. Owns: argument checks. Does not know:
// time.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

namespace tlt {

// Runs `kind` ("read", "fma" or "bf16_dot") of `isa` on `num_threads` threads and returns the work
// done in bytes or FLOPs. `buffer` (int32, any length) is what "read" reads; the others do `count`
// iterations.
double ceiling_work(const std::string& isa, const std::string& kind, int num_threads, int64_t count,
                    nanobind::handle buffer);

}  // namespace tlt
