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
from fastkernels.ops._shared.gdn import MIXED_INDICES
from fastkernels.ops.gdn_prefill.kernels import CHUNK, HEAD_SIZE, KERNELS, chunk_bound, cut_bound
from fastkernels.ops.gdn_prefill.problem import Inputs

# Blocks of a grid, tokens, sequences: kernels count them in int32.
_MOST = 2**31 - 1


def supports(kernel: Kernel, key: ProblemKey, device: DeviceInfo, config: Any) -> Decline | None:
    if key.axis("head_size") != HEAD_SIZE:
        return Decline(f"serves head_size={HEAD_SIZE}, got {key.axis('head_size')}")
    if MIXED_INDICES in key.traits:
        return Decline("needs read_indices and write_indices of one dtype")
    num_tokens, num_seqs = key.axis("total_seq_len"), key.axis("num_seqs")
    if num_tokens > _MOST - CHUNK:
        return Decline(f"serves total_seq_len <= {_MOST - CHUNK}, got {num_tokens}")
    rows, entry_bytes, *_ = kernel.tile(config)
    heads, slabs = key.axis("num_v_heads"), HEAD_SIZE // rows
    cuts = _cuts(kernel, num_tokens, config)
    blocks = max(
        max(num_seqs + cuts, 1) * heads * slabs,
        chunk_bound(num_tokens, num_seqs) * heads if entry_bytes else 0,
        cuts * heads * 2 * slabs,
    )
    if blocks > _MOST:
        return Decline(f"would take {blocks} blocks, a grid has at most {_MOST}")
    return None


def workspace_bytes(kernel: Kernel, axes: Mapping[str, int], config: Any) -> int:
    num_tokens, heads = axes["total_seq_len"], axes["num_v_heads"]
    chunks = chunk_bound(num_tokens, axes["num_seqs"])
    match kernel.tile(config):
        case (_, entry_bytes):
            return chunks * heads * entry_bytes
        case (_, entry_bytes, keys_bytes):
            return chunks * (heads * entry_bytes + axes["num_q_heads"] * keys_bytes)
        case (_, entry_bytes, _, cut_bytes):
            cuts = _cuts(kernel, num_tokens, config)
            return (chunks * entry_bytes + cuts * cut_bytes) * heads
    raise AssertionError(f"{kernel.name} has another kind of tile")


def _cuts(kernel: Kernel, num_tokens: int, config: Any) -> int:
    """Between segments; 0 for routes that take every sequence as a whole."""
    match kernel.tile(config):
        case (_, _, segment_chunks, _):
            return cut_bound(num_tokens, segment_chunks)
    return 0


def call(
    entry: Any,
    plan: int,
    inputs: Inputs,
    outputs: tuple[torch.Tensor, ...],
    workspace: torch.Tensor | None,
) -> bool:
    """A checked problem to the library; see `Prefill` in csrc/gdn_prefill/binding.cc."""
    output, new_state = outputs
    return bool(
        entry(
            plan,
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.state,
            inputs.A_log,
            inputs.a,
            inputs.dt_bias,
            inputs.b,
            inputs.cu_seqlens,
            float(inputs.scale or 0.0),
            inputs.read_indices,
            inputs.write_indices,
            output,
            None if new_state is inputs.state else new_state,
            workspace,
        )
    )


def fixed(key: ProblemKey) -> tuple[int, ...]:
    """What a plan is remembered by, besides tokens and sequences; see `FindPlan` in
    csrc/gdn_prefill/binding.cc."""
    return (
        *(key.axis(name) for name in ("num_q_heads", "num_v_heads")),
        key.device_index,
        key.mode == "pool",
        key.mode != "functional",
    )


ROUTES: tuple[Route, ...] = tuple(
    compiled_route(
        kernel,
        call,
        partial(supports, kernel),
        fixed,
        varying=("total_seq_len", "num_seqs"),
        workspace_bytes=partial(workspace_bytes, kernel),
    )
    for kernel in KERNELS
)
