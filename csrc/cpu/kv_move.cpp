// kv_move: copies slots of the KV cache, in every layer, keys and values alike.
//
// Owns: the guarantee that all sources are read before any target is written, by way of a buffer
// per plane (a layer's keys or values). Does not know the element type: a slot is bytes.
#include "common/scratch.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace tlt::TLT_ISA {

void kv_move(const KvMoveArgs& a) {
    const auto size = static_cast<size_t>(a.slot_bytes);
    parallel_ranges(
        a.num_planes, a.count * a.slot_bytes / 2, a.num_threads, [&](int64_t begin, int64_t end) {
            auto* buffer =
                static_cast<char*>(scratch(Scratch::kv_move, static_cast<size_t>(a.count) * size));
            for (int64_t plane = begin; plane < end; plane++) {
                char* slots = static_cast<char*>(a.kv_cache) + plane * a.plane_slots * a.slot_bytes;
                for (int64_t i = 0; i < a.count; i++) {
                    __builtin_memcpy(buffer + i * a.slot_bytes, slots + a.source[i] * a.slot_bytes,
                                     size);
                }
                for (int64_t i = 0; i < a.count; i++) {
                    if (a.source[i] == a.target[i]) continue;
                    __builtin_memcpy(slots + a.target[i] * a.slot_bytes, buffer + i * a.slot_bytes,
                                     size);
                }
            }
        });
}

}  // namespace tlt::TLT_ISA
