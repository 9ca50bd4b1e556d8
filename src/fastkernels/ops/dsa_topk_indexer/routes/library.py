"""The routes over compiled kernels: one for each, all through one entry of the library."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from fastkernels.core.compiled import compiled_route
from fastkernels.core.device import DeviceInfo
from fastkernels.core.kernels import Kernel
from fastkernels.core.problem import ProblemKey
from fastkernels.core.route import Decline, Route
from fastkernels.ops.dsa_topk_indexer.kernels import (
    CHUNK,
    KERNELS,
    MAX_HEADS,
    group_rows,
    workspace_bytes,
)
from fastkernels.ops.dsa_topk_indexer.problem import Inputs
from fastkernels.ops.dsa_topk_indexer.spec import PAGE_SIZE

# Blocks of a grid, positions of a row: kernels count them in int32.
_MOST = 2**31 - 1


def supports(kernel: Kernel, key: ProblemKey, device: DeviceInfo, config: Any) -> Decline | None:
    rows, pages, topk = (key.axis(n) for n in ("batch_size", "max_num_pages", "topk"))
    select, score, most, aside = kernel.tile(config)
    limit = min(most or _MOST, _MOST // PAGE_SIZE)
    if pages > limit:
        return Decline(f"serves max_num_pages <= {limit} with {config}, got {pages}")
    if select == 0 and pages * PAGE_SIZE > topk:
        return Decline(
            f"serves max_num_pages * {PAGE_SIZE} <= topk, got {pages * PAGE_SIZE} and {topk}"
        )
    heads = key.axis("num_index_heads")
    if select > 0 and kernel.language == "cuda" and heads > MAX_HEADS:
        return Decline(f"serves num_index_heads <= {MAX_HEADS}, got {heads}")
    blocks = rows * (select or -(-topk // CHUNK))
    if score > 0:
        blocks = max(blocks, min(rows, group_rows(pages, aside)) * -(-pages // score))
    if blocks > _MOST:
        return Decline(f"would take {blocks} blocks, a grid has at most {_MOST}")
    return None


def workspace(kernel: Kernel, axes: Mapping[str, int], config: Any) -> int:
    _, score, _, aside = kernel.tile(config)
    return workspace_bytes(axes, aside) if score > 0 else 0


def call(
    entry: Any,
    plan: int,
    inputs: Inputs,
    outputs: tuple[torch.Tensor, ...],
    workspace: torch.Tensor | None,
) -> bool:
    """A checked problem to the library; see `Index` in csrc/dsa_topk_indexer/binding.cc."""
    return bool(entry(plan, *inputs[:5], outputs[0], workspace))


def fixed(key: ProblemKey) -> tuple[int, ...]:
    """What a plan is remembered by, besides rows and columns of the block table; see `FindPlan` in
    csrc/dsa_topk_indexer/binding.cc."""
    axes = (key.axis(name) for name in ("num_index_heads", "topk", "num_pages"))
    return (*axes, key.device_index)


ROUTES: tuple[Route, ...] = tuple(
    compiled_route(
        kernel,
        call,
        partial(supports, kernel),
        fixed,
        varying=("batch_size", "max_num_pages"),
        workspace_bytes=partial(workspace, kernel),
    )
    for kernel in KERNELS
)
