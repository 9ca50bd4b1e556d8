// csrc/gdn_prefill/ptx.cuh on a CPU, see common/ptx_sm90.cuh.
#pragma once

#include "bulk_load.cuh"
#include "common/ptx_sm90.cuh"
