#include "cpu/kernels.h"
#include "cpu/linear_pack.h"
#include "cpu/vec.h"
namespace tlt::TLT_ISA {
void linear(const LinearArgs& a) {
    const LinearWeight& w = *a.weight;
    for (int64_t r = 0; r < a.num_rows; r++) for (int64_t p = 0; p < w.panels; p++) {
        V16 acc = zero();
        for (int64_t k = 0; k < w.k; k++) {
            V16 x = splat(a.x[r * w.k + k]), b;
            if (w.dtype == Dtype::f32) b = load((const float*)(w.data + p * w.panel_bytes) + k * 16);
            else { I16 v = load_i((const int32_t*)(w.data + p * w.panel_bytes) + k / 2 * 16); b = as_float(k % 2 ? v & splat_i(0xffff0000) : shl<16>(v)); }
            acc = fma(x, b, acc);
        }
        if (w.bias) acc = acc + load(w.bias + p * 16);
        store_n(a.out + r * w.n + p * 16, acc, w.n - p * 16 < 16 ? w.n - p * 16 : 16);
    }
}
}
