// Scratch memory for kernels: one growing, 64-byte aligned buffer per thread and purpose.
//
// Owns: the buffers. Does not know who uses them. Invariant: a buffer stays valid until the same
// thread asks for the same purpose again; contents are undefined. Compiled once for the baseline
// instruction set, so kernels of every instruction set may call it.
#pragma once

#include <cstddef>

namespace tlt {

enum class Scratch : int {
    linear_x,
    linear_tile,
    attention,
    attention_split,
    attention_plan,
    sample,
    sample_rows,
    kv_move,
    other,
    count
};

// At least `bytes` bytes, with 64 more of slack behind them so that whole vectors may be read past
// the end.
void* scratch(Scratch purpose, size_t bytes);

}  // namespace tlt
