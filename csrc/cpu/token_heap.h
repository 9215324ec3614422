// Tokens in the order of sampling filters, largest value first and lower id first among equals:
// keys and a heap.
//
// Owns: the order. Invariant: keys of different tokens differ, so the order is total.
#pragma once

#include <cstdint>

namespace tlt::TLT_ISA {

static inline uint64_t token_key(float value, int32_t id) {
    uint32_t b = __builtin_bit_cast(uint32_t, value + 0.0f);  // -0 counts as 0
    b ^= (b >> 31) != 0 ? 0xffffffffu : 0x80000000u;
    return static_cast<uint64_t>(b) << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}
static inline float key_value(uint64_t key) {
    uint32_t b = static_cast<uint32_t>(key >> 32);
    b ^= (b >> 31) != 0 ? 0x80000000u : 0xffffffffu;
    return __builtin_bit_cast(float, b);
}
static inline int32_t key_id(uint64_t key) {
    return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(key));
}

// A max-heap over an array that it rearranges.
class TokenHeap {
  public:
    TokenHeap(uint64_t* keys, int64_t count) : keys_(keys), size_(count) {
        for (int64_t i = count / 2; i-- > 0;) sink(i);
    }
    int64_t size() const { return size_; }
    uint64_t pop() {
        const uint64_t top = keys_[0];
        keys_[0] = keys_[--size_];
        sink(0);
        return top;
    }

  private:
    void sink(int64_t at) {
        const uint64_t key = keys_[at];
        for (int64_t child = 2 * at + 1; child < size_; child = 2 * at + 1) {
            if (child + 1 < size_ && keys_[child + 1] > keys_[child]) child++;
            if (keys_[child] < key) break;
            keys_[at] = keys_[child];
            at = child;
        }
        keys_[at] = key;
    }

    uint64_t* keys_;
    int64_t size_;
};

// The k-th largest, 1 <= k <= count.
static inline uint64_t pop_kth(uint64_t* keys, int64_t count, int64_t k) {
    TokenHeap heap(keys, count);
    for (int64_t i = 1; i < k; i++) heap.pop();
    return heap.pop();
}

}  // namespace tlt::TLT_ISA
