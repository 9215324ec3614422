// The table of CPU kernels: what each kernel is given, and one function pointer per kernel and
// instruction set.
//
// Owns: the argument records and the list TLT_KERNELS. A kernel named `f` with record `FArgs` is a
// function `void f(const FArgs&)` in namespace tlt::TLT_ISA, written once in csrc/cpu/*.cpp and
// compiled once per instruction set (CMakeLists.txt). Semantics are those of
// engine/ops/reference.py. Does not know: Python, tensors, which instruction set runs. Invariant:
// arguments were checked at the boundary (csrc/bindings); tensors are contiguous, kernels trust
// them. Inside csrc/cpu use no std:: templates and no non-static inline function outside TLT_ISA:
// the linker would keep one copy for everybody, perhaps the one with instructions that the machine
// lacks. Scratch memory comes from common/scratch.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tlt {

enum class Dtype : uint8_t { f32, bf16 };  // of weights and caches; activations are fp32

inline constexpr int64_t kPageTokens = 16;  // engine.batch.PAGE

// The index tensors of ForwardBatch (engine/batch.py has the legend).
struct BatchView {
    const int32_t* positions;   // [R]
    const int32_t* slots;       // [R]
    const int32_t* row_start;   // [S + 1]
    const int32_t* page_table;  // [S, pages_per_seq]
    const int32_t* ctx_len;     // [R]
    const int32_t* tail_start;  // [R + 1]
    const int32_t* tail_slots;  // [T]
    int64_t num_rows, num_seqs, pages_per_seq;
};

struct LinearWeight;  // cpu/linear_pack.h

struct LinearArgs {
    const float* x;              // [num_rows, K]
    const LinearWeight* weight;  // [N, K], packed
    float* out;                  // [num_rows, N]
    int64_t num_rows;
    int num_threads;
};

struct EmbeddingArgs {
    const int32_t* ids;  // [num_rows], each in [0, vocab)
    const void* table;   // [vocab, width]
    Dtype table_dtype;
    float* out;  // [num_rows, width]
    int64_t num_rows, vocab, width;
    int num_threads;
};

struct RmsNormArgs {
    const float* x;       // [num_rows, width]
    const float* weight;  // [width]
    float* out;           // [num_rows, width], may be x
    int64_t num_rows, width;
    float eps;
    int num_threads;
};

struct AddRmsNormArgs {
    const float* x;       // [num_rows, width]
    float* residual;      // [num_rows, width], += x
    const float* weight;  // [width]
    float* out;           // [num_rows, width], may be x
    int64_t num_rows, width;
    float eps;
    int num_threads;
};

struct SiluMulArgs {
    const float* gate_up;  // [num_rows, 2 * width]
    float* out;            // [num_rows, width]
    int64_t num_rows, width;
    int num_threads;
};

struct RopeStoreArgs {
    const float* qkv;  // [R, (Hq + 2 Hkv) * D]
    BatchView batch;
    const float* cos;     // [positions, D / 2]
    const float* sin;     // [positions, D / 2]
    const float* q_norm;  // [D] or null
    const float* k_norm;  // [D] or null
    float eps;
    void* k_cache;  // [P, PAGE, Hkv, D]
    void* v_cache;  // [P, PAGE, Hkv, D]
    Dtype cache_dtype;
    float* q_out;  // [R, Hq, D]
    int64_t num_q_heads, num_kv_heads, head_dim;
    int num_threads;
};

struct AttentionArgs {
    const float* q;       // [R, Hq, D]
    const void* k_cache;  // [P, PAGE, Hkv, D]
    const void* v_cache;  // [P, PAGE, Hkv, D]
    Dtype cache_dtype;
    BatchView batch;
    float scale;
    int64_t window;  // 0: everything
    float* out;      // [R, Hq, D]
    int64_t num_q_heads, num_kv_heads, head_dim;
    int num_threads;
};

struct KvMoveArgs {
    void* kv_cache;  // [num_planes, plane_slots, slot_bytes]: plane = layer x (k, v), slot = page x
                     // offset
    const int32_t* source;  // [count] slots
    const int32_t* target;  // [count] slots
    int64_t num_planes, plane_slots, slot_bytes, count;
    int num_threads;
};

struct LogSumExpArgs {
    const float* logits;  // [num_rows, vocab]
    float* out;           // [num_rows]
    int64_t num_rows, vocab;
    int num_threads;
};

struct SampleArgs {
    const float* logits;       // [num_rows, vocab]
    const float* temperature;  // [num_rows]
    const int32_t* top_k;      // [num_rows]
    const float* top_p;        // [num_rows]
    const float* min_p;        // [num_rows]
    const int64_t* seeds;      // [num_rows]
    const int32_t* positions;  // [num_rows]
    int32_t* token_ids;        // [num_rows]
    float* logprobs;           // [num_rows]
    int64_t num_rows, vocab;
    int num_threads;
    bool prune = true;  // false scores every token: the same results, for tests
};

inline constexpr int64_t kMostTopK = 64;

struct CoupledTopKArgs {
    const float* logits;        // [num_rows, vocab]
    const float* temperature;   // [num_rows]
    const int32_t* top_k;       // [num_rows]
    const float* top_p;         // [num_rows]
    const float* min_p;         // [num_rows]
    const int64_t* seeds;       // [num_rows]
    const int32_t* positions;   // [num_rows]
    const int32_t* target_ids;  // [vocab] or null: each id is its own
    int32_t* token_ids;         // [num_rows, count]
    float* scores;              // [num_rows, count]
    float* logprobs;            // [num_rows, count]
    int64_t num_rows, vocab, count;
    int num_threads;
    bool prune = true;  // false scores every token: the same results, for tests
};

// Philox4x32-10 as it is, for tests.
struct PhiloxWordsArgs {
    const int32_t* counters;  // [count, 4]
    const int32_t* keys;      // [count, 2]
    int32_t* out;             // [count, 4]
    int64_t count;
};

// The uniforms of one sampled token (`uniform` in engine/ops/reference.py).
struct PhiloxUniformArgs {
    int64_t seed;
    int32_t position;
    float* out;  // [vocab]
    int64_t vocab;
};

// Measures the machine, not a kernel (cpu/ceiling.cpp). `data` only for reading.
struct CeilingArgs {
    const void* data;  // [count] bytes, read_ceiling only
    int64_t count;     // bytes to read, or iterations of every thread
    double* out;       // [2]: bytes or FLOPs that were done, and something that depends on them
    int num_threads;
};

// Null where the instruction set has none: they are not ops and nothing falls back on them.
#define TLT_CEILINGS(X)          \
    X(read_ceiling, CeilingArgs) \
    X(fma_ceiling, CeilingArgs)  \
    X(bf16_dot_ceiling, CeilingArgs)

#define TLT_KERNELS(X)                \
    X(linear, LinearArgs)             \
    X(embedding, EmbeddingArgs)       \
    X(rms_norm, RmsNormArgs)          \
    X(add_rms_norm, AddRmsNormArgs)   \
    X(silu_mul, SiluMulArgs)          \
    X(rope_store, RopeStoreArgs)      \
    X(attention, AttentionArgs)       \
    X(kv_move, KvMoveArgs)            \
    X(log_sum_exp, LogSumExpArgs)     \
    X(sample, SampleArgs)             \
    X(coupled_top_k, CoupledTopKArgs) \
    X(philox_words, PhiloxWordsArgs)  \
    X(philox_uniform, PhiloxUniformArgs)

struct KernelTable {
    const char* isa;
#define TLT_POINTER(name, Args) void (*name)(const Args&);
    TLT_KERNELS(TLT_POINTER)
    TLT_CEILINGS(TLT_POINTER)
#undef TLT_POINTER
};

// In a translation unit compiled for one instruction set: the kernels it must define.
#ifdef TLT_ISA
namespace TLT_ISA {
#define TLT_DECLARE(name, Args) void name(const Args& args);
TLT_KERNELS(TLT_DECLARE)
#undef TLT_DECLARE
#define TLT_DECLARE_WEAK(name, Args) [[gnu::weak]] void name(const Args& args);
TLT_CEILINGS(TLT_DECLARE_WEAK)
#undef TLT_DECLARE_WEAK
}  // namespace TLT_ISA
#endif

}  // namespace tlt
