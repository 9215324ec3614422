// Which kernel table runs: instruction sets that were compiled in, that the machine has, and the
// choice.
//
// Owns: the names, their order and the default. Does not know: what the kernels compute.
// Invariant: an instruction set that was asked for by name either runs or raises; nothing else is
// taken instead.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cpu/kernels.h"

namespace tlt {

// Compiled in and usable on this machine, best last.
std::vector<std::string> usable_isas();

// The table of `isa`. "auto" is the best one that the machine has.
// Throws std::invalid_argument when `isa` is unknown, not compiled in, or not supported by the
// machine.
const KernelTable& kernel_table(std::string_view isa);

}  // namespace tlt
