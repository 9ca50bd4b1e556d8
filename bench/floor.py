"""The floor: how long an elementwise kernel takes to move the same bytes, in the same run.

Functional: N floats read, N written elsewhere. In place: the same N floats updated. Several kernels
are measured beside the operator; the fastest is the floor of its row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

PREFIX = "floor:"
# Elements per program and warps: one and two 16-byte accesses per thread in flight, and eight.
TRITON_TILES = ((512, 4), (1024, 4), (8192, 8))


def buffers(
    num_bytes: int, is_update: bool, device: torch.device, sets: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per input set (source, target), the same tensor if it is updated; `num_bytes` counts what is
    read and what is written. Sizes are multiples of 64 bytes, so that every access is whole."""
    count = -(-num_bytes // 128) * 16
    sources = [torch.zeros(count, device=device) for _ in range(sets)]
    return [(source, source if is_update else torch.zeros_like(source)) for source in sources]


def candidates(is_update: bool) -> dict[str, Callable[[torch.Tensor, torch.Tensor], object]]:
    """Kernels by name; each is `kernel(source, target)`."""
    found: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
        "torch.add": lambda source, target: torch.add(source, 1.0, out=target),
    }
    if not is_update:
        found["torch.copy_"] = lambda source, target: target.copy_(source)
    try:
        from bench.floor_triton import add_one
    except ImportError:
        return found
    for block, warps in TRITON_TILES:
        found[f"triton {block}/{warps}"] = partial(add_one, block=block, warps=warps)
    return found
