// See scratch.h.
#include "common/scratch.h"

#include <cstdlib>
#include <memory>
#include <new>

namespace tlt {
namespace {

struct Free {
    void operator()(void* p) const { std::free(p); }
};

struct Buffer {
    std::unique_ptr<void, Free> data;
    size_t bytes = 0;
};

thread_local Buffer buffers[static_cast<int>(Scratch::count)];

}  // namespace

void* scratch(Scratch purpose, size_t bytes) {
    Buffer& buffer = buffers[static_cast<int>(purpose)];
    if (buffer.bytes < bytes) {
        const size_t rounded = ((bytes + bytes / 4 + 64) / 4096 + 1) * 4096;
        buffer.data.reset();
        buffer.bytes = 0;
        buffer.data.reset(std::aligned_alloc(4096, rounded));
        if (!buffer.data) throw std::bad_alloc();
        buffer.bytes = rounded - 64;
    }
    return buffer.data.get();
}

}  // namespace tlt
