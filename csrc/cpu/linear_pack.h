// A weight [N, K] in the layout that `linear` reads. Compiled once, for the baseline instruction
// set.
//
// Owns: the packed memory and its layout. Does not know: instruction sets, Python.
// Layout: panels of 16 output columns; columns past N are zero.
//   bf16: per pair of input dimensions (k, k + 1), sixteen 32-bit words, word n = w[n][k] | w[n][k
//   + 1] << 16; K is
//         padded to even with zero. One line of 64 bytes a pair, as vdpbf16ps wants it; `w << 16`
//         and `w & 0xffff0000` are the two fp32 vectors.
//   fp32: per input dimension, sixteen floats.
// Invariant: every line is 64-byte aligned; reading all panels reads nothing outside the memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "cpu/kernels.h"

namespace tlt {

struct LinearWeight {
    Dtype dtype;
    int64_t n, k;           // as given
    int64_t panels;         // ceil(n / 16)
    int64_t panel_bytes;    // 64 * (bf16: ceil(k / 2), fp32: k)
    const std::byte* data;  // [panels, panel_bytes]
    const float* bias;      // [panels * 16], zero past n, or null
};

// A packed weight and its memory.
class PackedLinear {
  public:
    // weight [n, k] in `dtype` (bf16 as uint16_t), bias [n] fp32 or null. Both are copied.
    PackedLinear(const void* weight, Dtype dtype, int64_t n, int64_t k, const float* bias);

    const LinearWeight& view() const { return view_; }
    int64_t bytes() const;

  private:
    LinearWeight view_;
    std::shared_ptr<std::byte> data_;
};

}  // namespace tlt
