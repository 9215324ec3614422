// See batch.h.
#include "bindings/batch.h"

#include <algorithm>
#include <string>

#include "common/tensor.h"

namespace nb = nanobind;

namespace tlt {
namespace {

// Interned once, for the life of the process: a lookup by char* would make a string each time.
struct Names {
    PyObject *positions, *slots, *row_start, *page_table, *ctx_len, *tail_start, *tail_slots;
};
Names names{};

// The batch keeps its tensors alive for the whole call, so the reference taken here may go at once.
Tensor field(nb::handle batch, const char* op, PyObject* name, const char* text,
             std::initializer_list<int64_t> shape) {
    const nb::object value = nb::steal(PyObject_GetAttr(batch.ptr(), name));
    if (!value.is_valid()) throw nb::python_error();
    return take(value, {op, text}, Element::i32, shape);
}

void check_tails(const BatchView& b, const char* op, int64_t num_tail, int64_t num_slots) {
    bool rising = b.tail_start[0] == 0 && b.tail_start[b.num_rows] == num_tail;
    for (int64_t r = 0; r < b.num_rows; r++) rising &= b.tail_start[r] <= b.tail_start[r + 1];
    if (!rising) {
        reject({op, "batch.tail_start"}, "values rising from 0 to " + std::to_string(num_tail),
               "others");
    }
    check_indices(op, "batch.tail_slots", b.tail_slots, num_tail, num_slots);
}

void check_pages(const BatchView& b, const char* op, int64_t num_pages) {
    if (b.row_start[0] != 0 || b.row_start[b.num_seqs] != b.num_rows) {
        reject({op, "batch.row_start"}, "values from 0 to " + std::to_string(b.num_rows), "others");
    }
    for (int64_t s = 0; s < b.num_seqs; s++) {
        if (b.row_start[s] > b.row_start[s + 1] || b.row_start[s + 1] > b.num_rows) {
            reject({op, "batch.row_start"}, "rising values", "others");
        }
        int32_t longest = 0;
        for (int64_t r = b.row_start[s]; r < b.row_start[s + 1]; r++) {
            if (b.ctx_len[r] < 0 || b.ctx_len[r] > b.pages_per_seq * kPageTokens) {
                reject({op, "batch.ctx_len"},
                       "lengths in 0.." + std::to_string(b.pages_per_seq * kPageTokens),
                       std::to_string(b.ctx_len[r]) + " at row " + std::to_string(r));
            }
            longest = std::max(longest, b.ctx_len[r]);
        }
        check_indices(op, "batch.page_table", b.page_table + s * b.pages_per_seq,
                      (longest + kPageTokens - 1) / kPageTokens, num_pages);
    }
}

}  // namespace

void init_batch_names() {
    const auto intern = [](const char* text) { return PyUnicode_InternFromString(text); };
    names = {intern("positions"), intern("slots"),      intern("row_start"), intern("page_table"),
             intern("ctx_len"),   intern("tail_start"), intern("tail_slots")};
}

void check_indices(const char* op, const char* argument, const int32_t* values, int64_t count,
                   int64_t bound) {
    for (int64_t i = 0; i < count; i++) {
        if (values[i] < 0 || values[i] >= bound) {
            reject({op, argument}, "values in 0.." + std::to_string(bound - 1),
                   std::to_string(values[i]) + " at " + std::to_string(i));
        }
    }
}

BatchView take_rows(nb::handle batch, const char* op, int64_t num_rows, int64_t num_positions,
                    int64_t num_slots) {
    BatchView b{};
    b.num_rows = num_rows;
    b.positions =
        field(batch, op, names.positions, "batch.positions", {num_rows}).as<const int32_t>();
    b.slots = field(batch, op, names.slots, "batch.slots", {num_rows}).as<const int32_t>();
    check_indices(op, "batch.positions", b.positions, num_rows, num_positions);
    check_indices(op, "batch.slots", b.slots, num_rows, num_slots);
    return b;
}

BatchView take_sequences(nb::handle batch, const char* op, int64_t num_rows, int64_t num_slots) {
    BatchView b{};
    b.num_rows = num_rows;
    const Tensor start = field(batch, op, names.row_start, "batch.row_start", {kAny});
    b.num_seqs = start.shape[0] - 1;
    if (b.num_seqs < 0) reject({op, "batch.row_start"}, "at least one value", "none");
    b.row_start = start.as<const int32_t>();
    const Tensor pages = field(batch, op, names.page_table, "batch.page_table", {b.num_seqs, kAny});
    b.pages_per_seq = pages.shape[1];
    b.page_table = pages.as<const int32_t>();
    b.ctx_len = field(batch, op, names.ctx_len, "batch.ctx_len", {num_rows}).as<const int32_t>();
    b.tail_start =
        field(batch, op, names.tail_start, "batch.tail_start", {num_rows + 1}).as<const int32_t>();
    const Tensor tails = field(batch, op, names.tail_slots, "batch.tail_slots", {kAny});
    b.tail_slots = tails.as<const int32_t>();
    check_tails(b, op, tails.shape[0], num_slots);
    check_pages(b, op, num_slots / kPageTokens);
    return b;
}

}  // namespace tlt
