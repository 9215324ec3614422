// The kernel table of one instruction set. Owns nothing else; see kernels.h and dispatch.h.
#include "cpu/kernels.h"

#define TLT_STRING2(x) #x
#define TLT_STRING(x) TLT_STRING2(x)

namespace tlt::TLT_ISA {

extern const KernelTable table;
const KernelTable table = {TLT_STRING(TLT_ISA),
#define TLT_ENTRY(name, Args) &name,
                           TLT_KERNELS(TLT_ENTRY) TLT_CEILINGS(TLT_ENTRY)
#undef TLT_ENTRY
};

}  // namespace tlt::TLT_ISA
