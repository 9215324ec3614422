// Reading a ForwardBatch (engine/batch.py). Owns: the names of its fields and the check of every
// index in it. Does not know: ops. Invariant: a BatchView that came out of here never leads outside
// the cache it was checked against.
#pragma once

#include <nanobind/nanobind.h>

#include "cpu/kernels.h"

namespace tlt {

// To be called once, before the others.
void init_batch_names();

// positions and slots (what rope_store reads); positions below `num_positions`, slots below
// `num_slots`.
BatchView take_rows(nanobind::handle batch, const char* op, int64_t num_rows, int64_t num_positions,
                    int64_t num_slots);

// row_start, page_table, ctx_len and tails (what attention reads), against a cache of `num_slots`
// slots.
BatchView take_sequences(nanobind::handle batch, const char* op, int64_t num_rows,
                         int64_t num_slots);

// Throws unless 0 <= values[i] < bound for all i.
void check_indices(const char* op, const char* argument, const int32_t* values, int64_t count,
                   int64_t bound);

}  // namespace tlt
