// Blocks of few queries: what attention.cpp hands to attention_few.cpp.
//
// Owns: that interface. Does not know either side. Invariant: each block has at most kFewQueries
// queries of each kv head, and which side computes a block never changes its bits.
#pragma once

#include <cstdint>

#include "cpu/attention_rows.h"

namespace tlt::TLT_ISA {

inline constexpr int kFewQueries = 8;

struct RowBlocks {
    const RowBlock* blocks;
    int64_t count;
};

void attention_few(const AttentionArgs& a, const RowBlocks& few);

}  // namespace tlt::TLT_ISA
