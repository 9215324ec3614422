// See tensor.h.
#include "common/tensor.h"

#include <sstream>

namespace nb = nanobind;

namespace tlt {
namespace {

// Layouts fixed by the DLPack 1.x ABI (dlpack.h), which torch does not install for us to include.
struct DlDevice {
    int32_t type, id;
};
struct DlDataType {
    uint8_t code, bits;
    uint16_t lanes;
};
struct DlTensor {
    void* data;
    DlDevice device;
    int32_t ndim;
    DlDataType dtype;
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
};
struct DlExchangeHeader {
    struct {
        uint32_t major, minor;
    } version;
    DlExchangeHeader* previous;
};
struct DlExchangeApi {
    DlExchangeHeader header;
    void* unused[3];
    int (*tensor_from_object)(void* object, DlTensor* out);  // borrows: no reference, no sync
    int (*current_stream)(int32_t type, int32_t id, void** out);
};
constexpr int32_t kDlCpu = 1;
constexpr uint8_t kDlInt = 0, kDlFloat = 2, kDlBfloat = 4;

// References below are held for the life of the process.
PyTypeObject* tensor_type = nullptr;
PyObject* element_of_dtype = nullptr;     // dict: torch dtype -> int
const DlExchangeApi* exchange = nullptr;  // null: fallback

Element element_of(DlDataType d) {
    if (d.lanes != 1) return Element::other;
    if (d.code == kDlFloat && d.bits == 32) return Element::f32;
    if (d.code == kDlBfloat && d.bits == 16) return Element::bf16;
    if (d.code == kDlInt && d.bits == 32) return Element::i32;
    if (d.code == kDlInt && d.bits == 64) return Element::i64;
    return Element::other;
}

std::string text_of(nb::handle h) { return nb::str(h).c_str(); }

std::string text_of(Elements elements) {
    std::string text;
    const auto add = [&](Element e, const char* name) {
        if (elements.has(e)) text += (text.empty() ? "" : " or ") + std::string(name);
    };
    add(Element::f32, "torch.float32");
    add(Element::bf16, "torch.bfloat16");
    add(Element::i32, "torch.int32");
    add(Element::i64, "torch.int64");
    return text;
}

std::string text_of(const int64_t* shape, int64_t ndim) {
    std::ostringstream text;
    text << "shape [";
    for (int64_t i = 0; i < ndim; i++) {
        text << (i == 0 ? "" : ", ");
        if (shape[i] == kAny) {
            text << "any";
        } else {
            text << shape[i];
        }
    }
    text << "]";
    return text.str();
}

[[noreturn]] void reject_layout(nb::handle h, Site site) {
    reject(site, "a contiguous tensor", "strides " + text_of(h.attr("stride")()));
}

Tensor read_exchange(nb::handle h, Site site) {
    DlTensor d;
    if (exchange->tensor_from_object(h.ptr(), &d) != 0) {
        PyErr_Clear();  // torch's text says nothing about which argument it was
        reject(site, "a dense CPU tensor",
               text_of(h.attr("device")) + ", " + text_of(h.attr("layout")));
    }
    if (d.device.type != kDlCpu) reject(site, "a dense CPU tensor", text_of(h.attr("device")));
    Tensor t{static_cast<char*>(d.data) + d.byte_offset, element_of(d.dtype), d.ndim, {}};
    if (d.ndim > kMaxDims) reject(site, "at most 6 dimensions", std::to_string(d.ndim));
    int64_t stride = 1, count = 1;
    bool contiguous = true;
    for (int i = d.ndim - 1; i >= 0; i--) {
        t.shape[i] = d.shape[i];
        count *= d.shape[i];
        contiguous &= d.shape[i] == 1 || d.strides == nullptr || d.strides[i] == stride;
        stride *= d.shape[i];
    }
    if (!contiguous && count > 0) reject_layout(h, site);
    return t;
}

Tensor read_attributes(nb::handle h, Site site) {
    if (!nb::cast<bool>(nb::bool_(h.attr("device").attr("type").equal(nb::str("cpu"))))) {
        reject(site, "a dense CPU tensor", text_of(h.attr("device")));
    }
    if (!nb::cast<bool>(h.attr("is_contiguous")())) reject_layout(h, site);
    Tensor t{};
    PyObject* element = PyDict_GetItem(element_of_dtype, nb::object(h.attr("dtype")).ptr());
    t.element = element == nullptr ? Element::other
                                   : static_cast<Element>(nb::cast<int>(nb::handle(element)));
    const nb::tuple shape = nb::cast<nb::tuple>(h.attr("shape"));
    t.ndim = static_cast<int>(shape.size());
    if (t.ndim > kMaxDims) reject(site, "at most 6 dimensions", std::to_string(t.ndim));
    for (int i = 0; i < t.ndim; i++) t.shape[i] = nb::cast<int64_t>(shape[i]);
    t.data = reinterpret_cast<void*>(nb::cast<uintptr_t>(h.attr("data_ptr")()));
    return t;
}

}  // namespace

void reject(Site site, const std::string& expected, const std::string& got) {
    throw std::invalid_argument(std::string(site.op) + ": argument " + site.argument +
                                ": expected " + expected + ", got " + got);
}

bool init_tensors(nb::object type, nb::dict elements, bool want_exchange) {
    tensor_type = reinterpret_cast<PyTypeObject*>(type.release().ptr());
    element_of_dtype = elements.release().ptr();
    exchange = nullptr;
    const nb::handle holder(reinterpret_cast<PyObject*>(tensor_type));
    if (!want_exchange || !nb::hasattr(holder, "__dlpack_c_exchange_api__")) return false;
    const nb::object capsule = holder.attr("__dlpack_c_exchange_api__");
    const void* api = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
    if (api == nullptr) throw nb::python_error();
    const auto* found = static_cast<const DlExchangeApi*>(api);
    if (found->header.version.major == 1 && found->tensor_from_object != nullptr) exchange = found;
    return exchange != nullptr;
}

Tensor take(nb::handle h, Site site, Elements elements, std::initializer_list<int64_t> shape) {
    if (tensor_type == nullptr || !PyObject_TypeCheck(h.ptr(), tensor_type)) {
        reject(site, "a torch.Tensor", text_of(h.type()));
    }
    const Tensor t = exchange != nullptr ? read_exchange(h, site) : read_attributes(h, site);
    if (!elements.has(t.element)) {
        reject(site, text_of(elements), text_of(h.attr("dtype")));
    }
    bool fits = t.ndim == static_cast<int>(shape.size());
    for (int i = 0; fits && i < t.ndim; i++) {
        const int64_t want = shape.begin()[i];
        fits = want == kAny || want == t.shape[i];
    }
    if (!fits) reject(site, text_of(shape.begin(), shape.size()), text_of(t.shape, t.ndim));
    return t;
}

}  // namespace tlt
