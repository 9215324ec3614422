// See linear_pack.h.
#include "cpu/linear_pack.h"

#include <algorithm>
#include <cstring>

#include "common/huge_memory.h"

namespace tlt {
namespace {

constexpr int64_t kPanel = 16;

void pack_bf16(const uint16_t* weight, int64_t n, int64_t k, int64_t panel, uint32_t* to) {
    const int64_t columns = std::min(kPanel, n - panel * kPanel);
    for (int64_t c = 0; c < columns; c++) {
        const uint16_t* row = weight + (panel * kPanel + c) * k;
        for (int64_t pair = 0; pair < k / 2; pair++) {
            to[pair * kPanel + c] = static_cast<uint32_t>(row[2 * pair]) |
                                    static_cast<uint32_t>(row[2 * pair + 1]) << 16;
        }
        if (k % 2 != 0) to[k / 2 * kPanel + c] = row[k - 1];
    }
}

void pack_fp32(const float* weight, int64_t n, int64_t k, int64_t panel, float* to) {
    const int64_t columns = std::min(kPanel, n - panel * kPanel);
    for (int64_t c = 0; c < columns; c++) {
        const float* row = weight + (panel * kPanel + c) * k;
        for (int64_t i = 0; i < k; i++) to[i * kPanel + c] = row[i];
    }
}

}  // namespace

PackedLinear::PackedLinear(const void* weight, Dtype dtype, int64_t n, int64_t k,
                           const float* bias) {
    const int64_t panels = (n + kPanel - 1) / kPanel;
    const int64_t panel_bytes = 64 * (dtype == Dtype::bf16 ? (k + 1) / 2 : k);
    view_ = {dtype, n, k, panels, panel_bytes, nullptr, nullptr};
    const int64_t bias_bytes = bias == nullptr ? 0 : panels * 64;
    data_ = huge_memory(static_cast<size_t>(panels * panel_bytes + bias_bytes));
    view_.data = data_.get();
    for (int64_t p = 0; p < panels; p++) {
        std::byte* to = data_.get() + p * panel_bytes;
        if ((p + 1) * kPanel > n) std::memset(to, 0, static_cast<size_t>(panel_bytes));
        if (dtype == Dtype::bf16) {
            pack_bf16(static_cast<const uint16_t*>(weight), n, k, p,
                      reinterpret_cast<uint32_t*>(to));
        } else {
            pack_fp32(static_cast<const float*>(weight), n, k, p, reinterpret_cast<float*>(to));
        }
    }
    if (bias == nullptr) return;
    auto* packed_bias = reinterpret_cast<float*>(data_.get() + panels * panel_bytes);
    std::fill_n(packed_bias, panels * kPanel, 0.0f);
    std::copy_n(bias, n, packed_bias);
    view_.bias = packed_bias;
}

int64_t PackedLinear::bytes() const {
    return view_.panels * (view_.panel_bytes + (view_.bias == nullptr ? 0 : 64));
}

}  // namespace tlt
