// A kernel, -DEMULATED_SOURCE and -DEMULATED_KERNEL (with its namespace), as a function that runs
// it block by block, or cluster by cluster where the kernel has a knob of that name, or FK_TOGETHER
// blocks at a time. A launcher of
// the Python side gives it the operator's Params.
#include "cuda_block.h"

using std::isfinite;
using std::isnan;
using std::max;
using std::min;

#include EMULATED_SOURCE

#ifndef FK_CLUSTER
#define FK_CLUSTER FK_TOGETHER
#endif

// `p` is the struct that the kernel takes.
template <typename Params>
void emulate_with(void (*kernel)(Params), const void* p, uint32_t blocks, uint32_t threads,
                  uint32_t seed) {
  emulator::Launch(dim3(blocks, 1, 1), threads, FK_CLUSTER, seed,
                   [=] { kernel(*static_cast<const Params*>(p)); });
}

extern "C" void emulate(const void* p, uint32_t blocks, uint32_t threads, uint32_t seed) {
  emulate_with(EMULATED_NAMESPACE::EMULATED_KERNEL, p, blocks, threads, seed);
}
