// Memory that is written once and then streamed: in 2 MB pages where the system gives them.
//
// Owns: cutting chunks into pieces, so that weights below 2 MB share large pages too. Does not know
// what is stored. With 4 KB pages the misses of the TLB cost a third of the read bandwidth.
// Invariant: a piece is 64-byte aligned and lives as long as a shared_ptr to it; a chunk is freed
// with its last piece.
#pragma once

#include <cstddef>
#include <memory>

namespace tlt {

// `bytes` of uninitialised memory. May be called from any thread.
std::shared_ptr<std::byte> huge_memory(size_t bytes);

}  // namespace tlt
