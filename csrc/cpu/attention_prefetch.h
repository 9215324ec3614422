// Memory that attention will read soon, asked for a little at a time.
//
// Owns: a list of pieces of memory and how far it has been fetched. Does not know what is in them.
// Invariant: fetching has no effect on results. Why: pages lie anywhere, so the hardware foresees
// only the rest of a page; and requests made all at once would fill every buffer that a load needs.
#pragma once

#include <cstdint>

#include "cpu/attention_rows.h"

namespace tlt::TLT_ISA {

class Prefetcher {
  public:
    // `rows` rows of `bytes` bytes, `stride` bytes apart.
    void add(const void* base, int64_t rows, int64_t bytes, int64_t stride) {
        if (count_ == kMost || rows <= 0) return;
        pieces_[count_++] = {static_cast<const char*>(base), rows, bytes, stride};
        num_lines_ += rows * ((bytes + kLine - 1) / kLine);
    }

    // Fetches what was added over `steps` steps.
    void spread(int64_t steps) { lines_per_step_ = (num_lines_ + steps - 1) / greater(steps, 1); }

    void step(int64_t steps) { fetch(steps * lines_per_step_); }
    void all() {
        fetch(num_lines_);
        num_lines_ = 0;
    }

  private:
    static constexpr int64_t kLine = 64;
    static constexpr int kMost = 4 * kChunkPages;
    struct Piece {
        const char* base;
        int64_t rows, bytes, stride;
    };

    void fetch(int64_t lines) {
        asm volatile(
            "");  // or gcc 12 takes this for a function without effects and drops its calls
        while (lines > 0 && next_ < count_) {
            const Piece& piece = pieces_[next_];
            const char* row = piece.base + row_ * piece.stride;
            const int64_t stop = lesser(piece.bytes, byte_ + lines * kLine);
            int64_t byte = byte_;
            for (; byte < stop; byte += kLine, lines--) __builtin_prefetch(row + byte, 0, 2);
            byte_ = byte;
            if (byte < piece.bytes) return;
            byte_ = 0;
            if (++row_ < piece.rows) continue;
            row_ = 0;
            next_++;
        }
    }

    Piece pieces_[kMost];
    int count_ = 0, next_ = 0;
    int64_t row_ = 0, byte_ = 0, num_lines_ = 0, lines_per_step_ = 0;
};

}  // namespace tlt::TLT_ISA
