// Every kernel over odd shapes, on every instruction set of this machine and several thread counts,
// with results compared to the bit. Meant for a build with sanitizers (TLT_SANITIZE): each array is
// its own heap block of exactly its size, so a lane too many is seen.
//
// Owns: shapes. Does not know: what is right (tests/ops compares with the reference). Invariant: a
// case makes its inputs from a fixed seed, so only the kernels can make two runs differ.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/linear_pack.h"

namespace tlt {
namespace {

using Floats = std::vector<float>;
using Ints = std::vector<int32_t>;
using Bytes = std::vector<unsigned char>;

class Inputs {
  public:
    Floats floats(int64_t n, float scale = 1.0f) {
        Floats x(static_cast<size_t>(n));
        for (float& v : x) v = scale * normal_(random_);
        return x;
    }
    std::vector<uint16_t> bf16(int64_t n) {
        std::vector<uint16_t> x(static_cast<size_t>(n));
        for (uint16_t& v : x) {
            const float f = normal_(random_);
            uint32_t bits;
            std::memcpy(&bits, &f, 4);
            v = static_cast<uint16_t>(bits >> 16);
        }
        return x;
    }
    Ints ints(int64_t n, int32_t bound) {
        Ints x(static_cast<size_t>(n));
        for (int32_t& v : x) v = static_cast<int32_t>(random_() % static_cast<uint32_t>(bound));
        return x;
    }

  private:
    std::mt19937 random_{7};
    std::normal_distribution<float> normal_;
};

template <class T>
void append(Bytes& to, const std::vector<T>& x) {
    const auto* p = reinterpret_cast<const unsigned char*>(x.data());
    to.insert(to.end(), p, p + x.size() * sizeof(T));
}

struct Run {
    const KernelTable& table;
    int num_threads;
};

Bytes linear(const Run& run, Dtype dtype, int64_t rows, int64_t n, int64_t k) {
    Inputs in;
    const Floats x = in.floats(rows * k), bias = in.floats(n), w32 = in.floats(n * k);
    const std::vector<uint16_t> w16 = in.bf16(n * k);
    const void* data = dtype == Dtype::bf16 ? static_cast<const void*>(w16.data()) : w32.data();
    Bytes result;
    for (const float* b : {static_cast<const float*>(nullptr), bias.data()}) {
        const PackedLinear packed(data, dtype, n, k, b);
        Floats out(static_cast<size_t>(rows * n), -1.0f);
        run.table.linear({x.data(), &packed.view(), out.data(), rows, run.num_threads});
        append(result, out);
    }
    return result;
}

Bytes row_ops(const Run& run, int64_t rows, int64_t width) {
    Inputs in;
    const Floats x = in.floats(rows * width), gate_up = in.floats(rows * 2 * width, 4.0f);
    const Floats weight = in.floats(width), table32 = in.floats(9 * width);
    const std::vector<uint16_t> table16 = in.bf16(9 * width);
    const Ints ids = in.ints(rows, 9);
    Floats residual = in.floats(rows * width);
    Bytes result;
    Floats out(x.size(), -1.0f);
    run.table.rms_norm({x.data(), weight.data(), out.data(), rows, width, 1e-5f, run.num_threads});
    append(result, out);
    run.table.add_rms_norm({x.data(), residual.data(), weight.data(), out.data(), rows, width,
                            1e-5f, run.num_threads});
    append(result, out);
    append(result, residual);
    run.table.silu_mul({gate_up.data(), out.data(), rows, width, run.num_threads});
    append(result, out);
    run.table.embedding(
        {ids.data(), table32.data(), Dtype::f32, out.data(), rows, 9, width, run.num_threads});
    append(result, out);
    run.table.embedding(
        {ids.data(), table16.data(), Dtype::bf16, out.data(), rows, 9, width, run.num_threads});
    append(result, out);
    return result;
}

// Sequences of odd lengths with one prefill chunk, one decoding row and a small tree.
struct Batch {
    Ints positions, slots, row_start{0}, page_table, ctx_len, tail_start{0}, tail_slots;
    int64_t num_pages = 12;

    Batch() {
        for (int32_t i = 0; i < 12; i++)
            page_table.push_back((i * 5 + 3) % 12);  // 3 sequences, 4 pages
        for (int32_t t = 14; t < 33; t++) add_row(0, t, {});
        row_start.push_back(static_cast<int32_t>(positions.size()));
        add_row(1, 0, {});
        row_start.push_back(static_cast<int32_t>(positions.size()));
        const std::vector<std::vector<int32_t>> paths = {{0}, {0, 1}, {0, 2}, {0, 1, 3}};
        for (const auto& path : paths) add_row(2, 40, path);
        row_start.push_back(static_cast<int32_t>(positions.size()));
    }

    int32_t slot(int sequence, int32_t t) const {
        return page_table[static_cast<size_t>(sequence * 4 + t / 16)] * 16 + t % 16;
    }
    void add_row(int sequence, int32_t t, const std::vector<int32_t>& path) {
        const bool tree = !path.empty();
        const auto depth = static_cast<int32_t>(path.size());
        positions.push_back(tree ? t + depth - 1 : t);
        slots.push_back(slot(sequence, tree ? t + path.back() : t));
        ctx_len.push_back(tree ? t : t + 1);
        for (int32_t node : path) tail_slots.push_back(slot(sequence, t + node));
        tail_start.push_back(static_cast<int32_t>(tail_slots.size()));
    }
    BatchView view() const {
        return {positions.data(),
                slots.data(),
                row_start.data(),
                page_table.data(),
                ctx_len.data(),
                tail_start.data(),
                tail_slots.data(),
                static_cast<int64_t>(positions.size()),
                3,
                4};
    }
};

template <class Element>
Bytes cached_ops(const Run& run, Dtype dtype, std::vector<Element> k_cache,
                 std::vector<Element> v_cache, int64_t num_kv_heads, int64_t head_dim,
                 int64_t window) {
    Inputs in;
    const Batch batch;
    const int64_t rows = batch.view().num_rows, num_q_heads = 3 * num_kv_heads;
    const Floats qkv = in.floats(rows * (num_q_heads + 2 * num_kv_heads) * head_dim);
    const Floats cos = in.floats(64 * head_dim / 2), sin = in.floats(64 * head_dim / 2);
    const Floats norm = in.floats(head_dim);
    Floats q(static_cast<size_t>(rows * num_q_heads * head_dim), -1.0f), out(q);
    Bytes result;
    for (const float* weight : {static_cast<const float*>(nullptr), norm.data()}) {
        run.table.rope_store({qkv.data(), batch.view(), cos.data(), sin.data(), weight, weight,
                              1e-6f, k_cache.data(), v_cache.data(), dtype, q.data(), num_q_heads,
                              num_kv_heads, head_dim, run.num_threads});
        run.table.attention({q.data(), k_cache.data(), v_cache.data(), dtype, batch.view(), 0.3f,
                             window, out.data(), num_q_heads, num_kv_heads, head_dim,
                             run.num_threads});
        append(result, q);
        append(result, out);
    }
    const Ints source = {5, 6, 7, 100}, target = {6, 7, 100, 3};  // chained: reads come first
    const int64_t slot_bytes = num_kv_heads * head_dim * static_cast<int64_t>(sizeof(Element));
    run.table.kv_move({k_cache.data(), source.data(), target.data(), 1, batch.num_pages * 16,
                       slot_bytes, 4, run.num_threads});
    append(result, k_cache);
    append(result, v_cache);
    return result;
}

Bytes attention(const Run& run, Dtype dtype, int64_t num_kv_heads, int64_t head_dim,
                int64_t window) {
    Inputs in;
    const int64_t count = Batch().num_pages * 16 * num_kv_heads * head_dim;
    if (dtype == Dtype::bf16) {
        return cached_ops(run, dtype, in.bf16(count), in.bf16(count), num_kv_heads, head_dim,
                          window);
    }
    return cached_ops(run, dtype, in.floats(count), in.floats(count), num_kv_heads, head_dim,
                      window);
}

// Few rows over many keys: with several threads the keys are cut into segments.
Bytes long_attention(const Run& run, int64_t rows, int64_t length, int64_t window) {
    constexpr int64_t kHeadDim = 24, kHeads = 2;
    Inputs in;
    const int64_t num_pages = (length + kPageTokens - 1) / kPageTokens;
    const std::vector<uint16_t> k_cache = in.bf16(num_pages * kPageTokens * kHeads * kHeadDim);
    const std::vector<uint16_t> v_cache = in.bf16(num_pages * kPageTokens * kHeads * kHeadDim);
    const Floats q = in.floats(rows * kHeads * kHeadDim);
    Ints page_table, ctx_len, tail_start{0};
    for (int64_t page = num_pages; page-- > 0;) page_table.push_back(static_cast<int32_t>(page));
    for (int64_t row = 0; row < rows; row++) {
        ctx_len.push_back(static_cast<int32_t>(length - rows + row + 1));
        tail_start.push_back(0);
    }
    const Ints row_start = {0, static_cast<int32_t>(rows)};
    const BatchView batch{nullptr,           nullptr,        row_start.data(),
                          page_table.data(), ctx_len.data(), tail_start.data(),
                          nullptr,           rows,           1,
                          num_pages};
    Floats out(q.size(), -1.0f);
    run.table.attention({q.data(), k_cache.data(), v_cache.data(), Dtype::bf16, batch, 0.2f, window,
                         out.data(), kHeads, kHeads, kHeadDim, run.num_threads});
    Bytes result;
    append(result, out);
    return result;
}

Bytes noise(const Run& run, int64_t vocab) {
    Inputs in;
    Floats uniforms(static_cast<size_t>(vocab), -1.0f);
    run.table.philox_uniform({INT64_MIN + 3, 77, uniforms.data(), vocab});
    const Ints counters = in.ints(4 * 3, INT32_MAX), keys = in.ints(2 * 3, INT32_MAX);
    Ints words(4 * 3, -1);
    run.table.philox_words({counters.data(), keys.data(), words.data(), 3});
    Bytes result;
    append(result, uniforms);
    append(result, words);
    return result;
}

Bytes sampling(const Run& run, int64_t vocab) {
    Inputs in;
    constexpr int64_t kRows = 7;
    Floats logits = in.floats(kRows * vocab, 3.0f);
    logits[0] = -__builtin_inff();
    const Floats temperature = {0.0f, 1.0f, 0.7f, 1.3f, 1.0f, 1.0f, 0.01f};
    const Ints top_k = {0, 0, 5, 0, 0, 1, 0}, positions = in.ints(kRows, 1000);
    const Floats top_p = {1.0f, 1.0f, 0.9f, 0.5f, 1.0f, 1.0f, 1.0f};
    const Floats min_p = {0.0f, 0.0f, 0.0f, 0.0f, 0.1f, 0.0f, 0.0f};
    const std::vector<int64_t> seeds = {0, 1, -1, INT64_MAX, INT64_MIN, 42, 1 << 20};
    Ints tokens(kRows, -1);
    Floats logprobs(kRows, -1.0f), lse(kRows, -1.0f);
    run.table.sample({logits.data(), temperature.data(), top_k.data(), top_p.data(), min_p.data(),
                      seeds.data(), positions.data(), tokens.data(), logprobs.data(), kRows, vocab,
                      run.num_threads});
    run.table.log_sum_exp({logits.data(), lse.data(), kRows, vocab, run.num_threads});
    Bytes result;
    append(result, tokens);
    append(result, logprobs);
    append(result, lse);
    run.table.sample({logits.data(), temperature.data(), top_k.data(), top_p.data(), min_p.data(),
                      seeds.data(), positions.data(), tokens.data(), logprobs.data(), kRows, vocab,
                      run.num_threads, false});
    append(result, tokens);
    for (const bool mapped : {false, true}) {
        constexpr int64_t kCount = 5;
        const Ints target_ids = in.ints(vocab, INT32_MAX);
        Ints best(kRows * kCount, -2);
        Floats scores(kRows * kCount, -1.0f), likely(kRows * kCount, -1.0f);
        run.table.coupled_top_k({logits.data(), temperature.data(), top_k.data(), top_p.data(),
                                 min_p.data(), seeds.data(), positions.data(),
                                 mapped ? target_ids.data() : nullptr, best.data(), scores.data(),
                                 likely.data(), kRows, vocab, kCount, run.num_threads});
        append(result, best);
        append(result, scores);
        append(result, likely);
    }
    return result;
}

struct Case {
    std::string name;
    std::function<Bytes(const Run&)> run;
    bool rounds_activations = false;  // on avx512bf16: other bits than elsewhere
};

std::vector<Case> all_cases() {
    std::vector<Case> cases;
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
        const std::string suffix = dtype == Dtype::bf16 ? " bf16" : " fp32";
        for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 40}) {
            for (const auto& [n, k] : {std::pair{1, 1}, {17, 3}, {49, 130}, {160, 577}}) {
                cases.push_back(
                    {"linear" + suffix + " " + std::to_string(rows) + " x " + std::to_string(n) +
                         " x " + std::to_string(k),
                     [=, n = n, k = k](const Run& run) { return linear(run, dtype, rows, n, k); },
                     dtype == Dtype::bf16});
            }
        }
        for (const int64_t head_dim : {2, 18, 64, 100}) {
            for (const int64_t window : {0, 5}) {
                cases.push_back(
                    {"attention" + suffix + " head size " + std::to_string(head_dim),
                     [=](const Run& run) { return attention(run, dtype, 2, head_dim, window); }});
            }
        }
    }
    for (const int64_t width : {1, 15, 16, 33, 576}) {
        for (const int64_t rows : {1, 5, 40}) {
            cases.push_back({"row ops of width " + std::to_string(width),
                             [=](const Run& run) { return row_ops(run, rows, width); }});
        }
    }
    for (const int64_t rows : {1, 37}) {
        for (const int64_t window : {0, 300}) {
            cases.push_back(
                {"attention of " + std::to_string(rows) + " rows to 1003 keys",
                 [=](const Run& run) { return long_attention(run, rows, 1003, window); }});
        }
    }
    for (const int64_t vocab : {1, 2, 17, 100, 5003, 20000}) {
        cases.push_back({"noise of " + std::to_string(vocab),
                         [=](const Run& run) { return noise(run, vocab); }});
        cases.push_back({"sampling from " + std::to_string(vocab),
                         [=](const Run& run) { return sampling(run, vocab); }});
    }
    return cases;
}

int check_all() {
    int failures = 0;
    const std::vector<Case> cases = all_cases();
    for (const Case& item : cases) {
        const Bytes expected = item.run({kernel_table("scalar"), 1});
        for (const std::string& isa : usable_isas()) {
            const bool own_bits = item.rounds_activations && isa == "avx512bf16";
            const Bytes same = own_bits ? item.run({kernel_table(isa), 1}) : expected;
            for (const int num_threads : {1, 2, 5}) {
                if (item.run({kernel_table(isa), num_threads}) == same) continue;
                std::printf("FAILED: %s: %s with %d threads has other bits\n", item.name.c_str(),
                            isa.c_str(), num_threads);
                failures++;
            }
        }
    }
    std::printf("%zu cases, %zu instruction sets, %d failures\n", cases.size(),
                usable_isas().size(), failures);
    return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tlt

int main() { return tlt::check_all(); }
