// See cpu_ops.h.
#include "bindings/cpu_ops.h"

#include <stdexcept>

#include "bindings/batch.h"
#include "common/tensor.h"

namespace nb = nanobind;

namespace tlt {
namespace {

constexpr Elements kFloat = Element::f32;
constexpr Elements kInt = Element::i32;
constexpr Elements kWeight = Element::f32 | Element::bf16;

Dtype dtype_of(const Tensor& t) { return t.element == Element::bf16 ? Dtype::bf16 : Dtype::f32; }

// The cache pair of rope_store and attention: [P, PAGE, Hkv, D] twice, alike.
struct Caches {
    Tensor k, v;
    int64_t num_slots() const { return k.shape[0] * k.shape[1]; }
    int64_t num_heads() const { return k.shape[2]; }
    int64_t head_dim() const { return k.shape[3]; }
};

Caches take_caches(const char* op, nb::handle k_cache, nb::handle v_cache) {
    const Tensor k = take(k_cache, {op, "k_cache"}, kWeight, {kAny, kPageTokens, kAny, kAny});
    const Tensor v = take(v_cache, {op, "v_cache"}, k.element,
                          {k.shape[0], kPageTokens, k.shape[2], k.shape[3]});
    if (k.shape[2] == 0 || k.shape[3] == 0) reject({op, "k_cache"}, "heads of some size", "none");
    return {k, v};
}

const float* optional_norm(nb::handle h, Site site, int64_t head_dim) {
    return h.is_none() ? nullptr : take(h, site, kFloat, {head_dim}).as<const float>();
}

int64_t element_bytes(const Tensor& t) { return t.element == Element::bf16 ? 2 : 4; }

}  // namespace

CpuOps::CpuOps(const std::string& isa, int num_threads)
    : table_(kernel_table(isa)), num_threads_(num_threads) {
    if (num_threads < 1 || num_threads > 1024) {
        throw std::invalid_argument("num_threads: expected 1..1024, got " +
                                    std::to_string(num_threads));
    }
}

PackedLinear* CpuOps::pack_linear(H weight, H bias) const {
    const Tensor w = take(weight, {"pack_linear", "weight"}, kWeight, {kAny, kAny});
    const float* b =
        bias.is_none()
            ? nullptr
            : take(bias, {"pack_linear", "bias"}, kFloat, {w.shape[0]}).as<const float>();
    return new PackedLinear(w.data, dtype_of(w), w.shape[0], w.shape[1], b);
}

void CpuOps::linear(H x, const PackedLinear& weight, H out) const {
    const LinearWeight& w = weight.view();
    const Tensor in = take(x, {"linear", "x"}, kFloat, {kAny, w.k});
    const Tensor to = take(out, {"linear", "out"}, kFloat, {in.shape[0], w.n});
    table_.linear({in.as<const float>(), &w, to.as<float>(), in.shape[0], num_threads_});
}

void CpuOps::embedding(H ids, H table, H out) const {
    const Tensor from = take(table, {"embedding", "table"}, kWeight, {kAny, kAny});
    const Tensor rows = take(ids, {"embedding", "ids"}, kInt, {kAny});
    const Tensor to = take(out, {"embedding", "out"}, kFloat, {rows.shape[0], from.shape[1]});
    check_indices("embedding", "ids", rows.as<const int32_t>(), rows.shape[0], from.shape[0]);
    table_.embedding({rows.as<const int32_t>(), from.data, dtype_of(from), to.as<float>(),
                      rows.shape[0], from.shape[0], from.shape[1], num_threads_});
}

void CpuOps::rms_norm(H x, H weight, float eps, H out) const {
    const Tensor in = take(x, {"rms_norm", "x"}, kFloat, {kAny, kAny});
    const Tensor w = take(weight, {"rms_norm", "weight"}, kFloat, {in.shape[1]});
    const Tensor to = take(out, {"rms_norm", "out"}, kFloat, {in.shape[0], in.shape[1]});
    table_.rms_norm({in.as<const float>(), w.as<const float>(), to.as<float>(), in.shape[0],
                     in.shape[1], eps, num_threads_});
}

void CpuOps::add_rms_norm(H x, H residual, H weight, float eps, H out) const {
    const char* op = "add_rms_norm";
    const Tensor in = take(x, {op, "x"}, kFloat, {kAny, kAny});
    const Tensor sum = take(residual, {op, "residual"}, kFloat, {in.shape[0], in.shape[1]});
    const Tensor w = take(weight, {op, "weight"}, kFloat, {in.shape[1]});
    const Tensor to = take(out, {op, "out"}, kFloat, {in.shape[0], in.shape[1]});
    table_.add_rms_norm({in.as<const float>(), sum.as<float>(), w.as<const float>(), to.as<float>(),
                         in.shape[0], in.shape[1], eps, num_threads_});
}

void CpuOps::silu_mul(H gate_up, H out) const {
    const Tensor to = take(out, {"silu_mul", "out"}, kFloat, {kAny, kAny});
    const Tensor in =
        take(gate_up, {"silu_mul", "gate_up"}, kFloat, {to.shape[0], 2 * to.shape[1]});
    table_.silu_mul({in.as<const float>(), to.as<float>(), to.shape[0], to.shape[1], num_threads_});
}

void CpuOps::rope_store(H qkv, H batch, H cos, H sin, H q_norm, H k_norm, float eps, H k_cache,
                        H v_cache, H q_out) const {
    const char* op = "rope_store";
    const Caches cache = take_caches(op, k_cache, v_cache);
    const int64_t dim = cache.head_dim();
    if (dim % 2 != 0) reject({op, "k_cache"}, "an even head size", std::to_string(dim));
    const Tensor q = take(q_out, {op, "q_out"}, kFloat, {kAny, kAny, dim});
    const int64_t num_rows = q.shape[0];
    const Tensor in =
        take(qkv, {op, "qkv"}, kFloat, {num_rows, (q.shape[1] + 2 * cache.num_heads()) * dim});
    const Tensor c = take(cos, {op, "cos"}, kFloat, {kAny, dim / 2});
    const Tensor s = take(sin, {op, "sin"}, kFloat, {c.shape[0], dim / 2});
    table_.rope_store(
        {in.as<const float>(), take_rows(batch, op, num_rows, c.shape[0], cache.num_slots()),
         c.as<const float>(), s.as<const float>(), optional_norm(q_norm, {op, "q_norm"}, dim),
         optional_norm(k_norm, {op, "k_norm"}, dim), eps, cache.k.data, cache.v.data,
         dtype_of(cache.k), q.as<float>(), q.shape[1], cache.num_heads(), dim, num_threads_});
}

void CpuOps::attention(H q, H k_cache, H v_cache, H batch, float scale, int window, H out) const {
    const char* op = "attention";
    const Caches cache = take_caches(op, k_cache, v_cache);
    const Tensor in = take(q, {op, "q"}, kFloat, {kAny, kAny, cache.head_dim()});
    const Tensor to = take(out, {op, "out"}, kFloat, {in.shape[0], in.shape[1], in.shape[2]});
    if (in.shape[1] % cache.num_heads() != 0) {
        reject({op, "q"}, "a multiple of " + std::to_string(cache.num_heads()) + " heads",
               std::to_string(in.shape[1]));
    }
    if (window < 0) reject({op, "window"}, "0 or more", std::to_string(window));
    table_.attention({in.as<const float>(), cache.k.data, cache.v.data, dtype_of(cache.k),
                      take_sequences(batch, op, in.shape[0], cache.num_slots()), scale, window,
                      to.as<float>(), in.shape[1], cache.num_heads(), cache.head_dim(),
                      num_threads_});
}

void CpuOps::kv_move(H kv_cache, H source, H target) const {
    const char* op = "kv_move";
    const Tensor kv =
        take(kv_cache, {op, "kv_cache"}, kWeight, {kAny, 2, kAny, kPageTokens, kAny, kAny});
    const Tensor from = take(source, {op, "source"}, kInt, {kAny});
    const Tensor to = take(target, {op, "target"}, kInt, {from.shape[0]});
    const int64_t num_slots = kv.shape[2] * kPageTokens, count = from.shape[0];
    check_indices(op, "source", from.as<const int32_t>(), count, num_slots);
    check_indices(op, "target", to.as<const int32_t>(), count, num_slots);
    table_.kv_move({kv.data, from.as<const int32_t>(), to.as<const int32_t>(), kv.shape[0] * 2,
                    num_slots, kv.shape[4] * kv.shape[5] * element_bytes(kv), count, num_threads_});
}

void CpuOps::log_sum_exp(H logits, H out) const {
    const Tensor in = take(logits, {"log_sum_exp", "logits"}, kFloat, {kAny, kAny});
    const Tensor to = take(out, {"log_sum_exp", "out"}, kFloat, {in.shape[0]});
    table_.log_sum_exp(
        {in.as<const float>(), to.as<float>(), in.shape[0], in.shape[1], num_threads_});
}

void CpuOps::sample(H logits, H temperature, H top_k, H top_p, H min_p, H seeds, H positions,
                    H token_ids, H logprobs, bool prune) const {
    const char* op = "sample";
    const Tensor in = take(logits, {op, "logits"}, kFloat, {kAny, kAny});
    const int64_t rows = in.shape[0];
    if (in.shape[1] == 0) reject({op, "logits"}, "a vocabulary", "none");
    const auto floats = [&](H h, const char* name) {
        return take(h, {op, name}, kFloat, {rows}).as<float>();
    };
    const auto ints = [&](H h, const char* name) {
        return take(h, {op, name}, kInt, {rows}).as<int32_t>();
    };
    table_.sample({in.as<const float>(), floats(temperature, "temperature"), ints(top_k, "top_k"),
                   floats(top_p, "top_p"), floats(min_p, "min_p"),
                   take(seeds, {op, "seeds"}, Element::i64, {rows}).as<const int64_t>(),
                   ints(positions, "positions"), ints(token_ids, "token_ids"),
                   floats(logprobs, "logprobs"), rows, in.shape[1], num_threads_, prune});
}

void CpuOps::coupled_top_k(H logits, H temperature, H top_k, H top_p, H min_p, H seeds, H positions,
                           H target_ids, H token_ids, H scores, H logprobs, bool prune) const {
    const char* op = "coupled_top_k";
    const Tensor in = take(logits, {op, "logits"}, kFloat, {kAny, kAny});
    const int64_t rows = in.shape[0], vocab = in.shape[1];
    if (vocab == 0) reject({op, "logits"}, "a vocabulary", "none");
    const Tensor to = take(token_ids, {op, "token_ids"}, kInt, {rows, kAny});
    const int64_t count = to.shape[1];
    if (count < 1 || count > kMostTopK) {
        reject({op, "token_ids"}, "1.." + std::to_string(kMostTopK) + " columns",
               std::to_string(count));
    }
    const auto floats = [&](H h, const char* name) {
        return take(h, {op, name}, kFloat, {rows}).as<const float>();
    };
    const auto ints = [&](H h, const char* name) {
        return take(h, {op, name}, kInt, {rows}).as<const int32_t>();
    };
    const auto found = [&](H h, const char* name) {
        return take(h, {op, name}, kFloat, {rows, count}).as<float>();
    };
    const int32_t* map =
        target_ids.is_none()
            ? nullptr
            : take(target_ids, {op, "target_ids"}, kInt, {vocab}).as<const int32_t>();
    table_.coupled_top_k({in.as<const float>(), floats(temperature, "temperature"),
                          ints(top_k, "top_k"), floats(top_p, "top_p"), floats(min_p, "min_p"),
                          take(seeds, {op, "seeds"}, Element::i64, {rows}).as<const int64_t>(),
                          ints(positions, "positions"), map, to.as<int32_t>(),
                          found(scores, "scores"), found(logprobs, "logprobs"), rows, vocab, count,
                          num_threads_, prune});
}

void CpuOps::philox_words(H counters, H keys, H out) const {
    const char* op = "philox_words";
    const Tensor c = take(counters, {op, "counters"}, kInt, {kAny, 4});
    const Tensor k = take(keys, {op, "keys"}, kInt, {c.shape[0], 2});
    const Tensor to = take(out, {op, "out"}, kInt, {c.shape[0], 4});
    table_.philox_words(
        {c.as<const int32_t>(), k.as<const int32_t>(), to.as<int32_t>(), c.shape[0]});
}

void CpuOps::philox_uniform(int64_t seed, int position, H out) const {
    const Tensor to = take(out, {"philox_uniform", "out"}, kFloat, {kAny});
    table_.philox_uniform({seed, position, to.as<float>(), to.shape[0]});
}

}  // namespace tlt
