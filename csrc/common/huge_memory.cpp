// See huge_memory.h.
#include "common/huge_memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <mutex>
#include <new>

namespace tlt {
namespace {

constexpr size_t kPage = size_t{2} << 20;
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kChunk = 64;  // every piece by itself, so that reads past its end are seen
#else
constexpr size_t kChunk = 16 * kPage;
#endif

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

struct Free {
    void operator()(std::byte* p) const { std::free(p); }
};

struct Chunk {
    std::unique_ptr<std::byte, Free> data;
    size_t bytes, used;

    explicit Chunk(size_t size) : bytes(size), used(0) {
        const size_t align = size < kPage ? 64 : kPage;
        data.reset(static_cast<std::byte*>(std::aligned_alloc(align, size)));
        if (!data) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
        if (align == kPage)
            madvise(data.get(), size, MADV_HUGEPAGE);  // a wish: failure changes nothing
#endif
    }
};

std::mutex mutex;
std::weak_ptr<Chunk> open_chunk;  // the one that new pieces are cut from; kept alive by its pieces

}  // namespace

std::shared_ptr<std::byte> huge_memory(size_t bytes) {
    const size_t piece = round_up(bytes > 0 ? bytes : 1, 64);
    const std::lock_guard lock(mutex);
    std::shared_ptr<Chunk> chunk = open_chunk.lock();
    if (!chunk || chunk->bytes - chunk->used < piece) {
        const bool large =
            piece > kChunk / 4;  // gets a chunk of its own and leaves the open one be
        chunk = std::make_shared<Chunk>(!large          ? kChunk
                                        : piece < kPage ? piece
                                                        : round_up(piece, kPage));
        if (!large) open_chunk = chunk;
    }
    std::byte* at = chunk->data.get() + chunk->used;
    chunk->used += piece;
    return {std::move(chunk), at};
}

}  // namespace tlt
