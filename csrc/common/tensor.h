// The boundary between Python tensors and kernels: take a torch tensor, check it, give a view.
//
// Owns: reading tensors (torch's DLPack C exchange API, or `data_ptr()` and friends where torch has
// none) and the text of what is wrong with them. Does not know: any op. Invariant: a Tensor that
// came out of `take` lies on the CPU, is contiguous, and has the dtype and the shape asked for;
// everything behind the boundary may trust it. It is valid as long as the Python tensor is.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

namespace tlt {

enum class Element : uint8_t { f32 = 1, bf16 = 2, i32 = 4, i64 = 8, other = 0 };

// A set of Elements.
struct Elements {
    uint8_t mask;
    constexpr Elements(Element e)
        : mask(static_cast<uint8_t>(e)) {}  // NOLINT: an element is a set of one
    constexpr explicit Elements(uint8_t m) : mask(m) {}
    constexpr bool has(Element e) const { return (mask & static_cast<uint8_t>(e)) != 0; }
};
constexpr Elements operator|(Element a, Element b) {
    return Elements(static_cast<uint8_t>(static_cast<uint8_t>(a) | static_cast<uint8_t>(b)));
}

inline constexpr int kMaxDims = 6;
inline constexpr int64_t kAny = -1;  // a size that may be anything

struct Tensor {
    void* data;
    Element element;
    int ndim;
    int64_t shape[kMaxDims];

    template <class T>
    T* as() const {
        return static_cast<T*>(data);
    }
};

// Where a tensor comes in, for messages: "linear: argument x: ...".
struct Site {
    const char* op;
    const char* argument;
};

// To be called before `take`: the class torch.Tensor and {torch dtype: Element}. Takes the exchange
// API if torch has it and it is wanted; returns whether it did.
bool init_tensors(nanobind::object tensor_type, nanobind::dict elements, bool want_exchange);

// Throws std::invalid_argument (ValueError) naming op, argument, what was expected and what came.
Tensor take(nanobind::handle h, Site site, Elements elements, std::initializer_list<int64_t> shape);

[[noreturn]] void reject(Site site, const std::string& expected, const std::string& got);

}  // namespace tlt
