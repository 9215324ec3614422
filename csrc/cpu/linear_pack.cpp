// See linear_pack.h.
#include "cpu/linear_pack.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

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
    const int64_t bias_bytes = bias == nullptr ? 0 : panels * 64;
    bytes_ = panels * panel_bytes + bias_bytes;
    // whole 2 MB pages where the weight is large: fewer TLB misses when all of it streams by
    const int64_t align = bytes_ >= (2 << 20) ? (2 << 20) : 4096;
    const int64_t rounded = std::max<int64_t>(1, (bytes_ + align - 1) / align) * align;
    auto* data = static_cast<std::byte*>(std::aligned_alloc(align, rounded));
    if (data == nullptr) throw std::bad_alloc();
    std::memset(data, 0, bytes_);
    for (int64_t p = 0; p < panels; p++) {
        std::byte* to = data + p * panel_bytes;
        if (dtype == Dtype::bf16) {
            pack_bf16(static_cast<const uint16_t*>(weight), n, k, p,
                      reinterpret_cast<uint32_t*>(to));
        } else {
            pack_fp32(static_cast<const float*>(weight), n, k, p, reinterpret_cast<float*>(to));
        }
    }
    auto* packed_bias = reinterpret_cast<float*>(data + panels * panel_bytes);
    if (bias != nullptr) std::copy_n(bias, n, packed_bias);
    view_ = {dtype, n, k, panels, panel_bytes, data, bias == nullptr ? nullptr : packed_bias};
}

PackedLinear::~PackedLinear() { std::free(const_cast<std::byte*>(view_.data)); }

}  // namespace tlt
