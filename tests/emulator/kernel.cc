// A kernel, -DEMULATED_SOURCE and -DEMULATED_KERNEL (with its namespace), as a function that runs
// it block by block. A launcher of the Python side gives it the operator's Params.
#include "cuda_block.h"

using std::isfinite;
using std::isnan;
using std::max;
using std::min;

#include EMULATED_SOURCE

extern "C" void emulate(const EMULATED_NAMESPACE::Params* p, uint32_t blocks, uint32_t threads,
                        uint32_t seed) {
  emulator::Launch(dim3(blocks, 1, 1), threads, seed,
                   [p] { EMULATED_NAMESPACE::EMULATED_KERNEL(*p); });
}
