"""The public function of dsa_topk_indexer."""

from __future__ import annotations

from typing import Any

import torch

from fastkernels import envs
from fastkernels.core import dispatch, torch_ops
from fastkernels.core.extension import LaunchFailed
from fastkernels.core.route import Operator
from fastkernels.ops.dsa_topk_indexer.problem import Inputs, bind
from fastkernels.ops.dsa_topk_indexer.routes import ROUTES
from fastkernels.ops.dsa_topk_indexer.spec import SPEC


def dsa_topk_indexer(
    q_index_fp8: torch.Tensor,
    k_index_cache_fp8: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    *,
    topk: int = 2048,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """The topk best cache positions of every row by the indexer's score; returns topk_indices.

    `score[t] = sum_h weights[h] * relu(scale_t * (q_h . k_t))`, t over the row's first seq_len
    positions.

    q_index_fp8: [B, H, 128] float8_e4m3fn, any number of heads.   weights: [B, H] float32.
    k_index_cache_fp8: [pages, 64, 1, 132] int8 or uint8 bytes; a page is 64 rows of 128 e4m3 bytes,
    then 64 float32 scales (its last axis is no token's), at any page stride.
    seq_lens: [B] int32, any stride, clamped to 0..max_num_pages * 64.
    block_table: [B, max_num_pages] int32, any strides. Entries beyond a row's pages are not used;
    positions of a page outside 0..pages - 1 are no candidates.

    topk: width of the output; it may exceed max_num_pages * 64.
    out: topk_indices.   workspace: uint8, see fastkernels.workspace_size.

    topk_indices: [B, topk] int32, page * 64 + offset: the min(topk, candidates) best ones in any
    order, then -1. Among equal scores the lowest position of the row wins; NaN ranks above +inf,
    and -0.0 equals +0.0. A page listed twice may give an index twice.

    Equations and sources: ops/dsa_topk_indexer/README.md.
    Raises ArgumentError, UnsupportedProblem, NotWarmedUp.
    """
    is_compiling = torch.compiler.is_compiling()
    if workspace is None and not is_compiling:
        result = _enter(q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, topk, out)
        if result is not None:
            return result
    inputs = Inputs(q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, topk)
    if is_compiling or torch_ops.is_traced(inputs):
        (topk_indices,) = torch_ops.call(SPEC, inputs, out, workspace)
    else:
        (topk_indices,) = dispatch.run(OPERATOR, bind(inputs, out, workspace))
    return topk_indices


def _enter(
    q_index_fp8: torch.Tensor,
    k_index_cache_fp8: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    topk: Any,
    out: Any,
) -> torch.Tensor | None:
    """The short way of a call whose sizes were served before, as in gdn_decode's op.py. None, with
    nothing launched, where `bind` has to look."""
    way = dispatch.short_way(SPEC.name)
    if way is None or envs.check_values():
        return None
    try:
        if type(topk) is not int:
            return None
        if out is None:
            output = block_table.new_empty((q_index_fp8.shape[0], topk), dtype=torch.int32)
        else:
            output = out
            if output.shape[1] != topk:
                return None
        if torch.is_grad_enabled() and (q_index_fp8.requires_grad or weights.requires_grad):
            return None
        # The library would read and write the values without their sign.
        tensors = (q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, output)
        if any(tensor.is_neg() for tensor in tensors):
            return None
        is_served = way.call(
            0, q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, output, None
        )
    except LaunchFailed as error:
        inputs = Inputs(q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, topk)
        key = bind(inputs, out, None).key
        raise dispatch.launch_error(key, dispatch.select(OPERATOR, key), error) from error
    except torch.OutOfMemoryError:
        raise
    except Exception:  # not what the types say: `bind` has the words
        return None
    return output if is_served else None


OPERATOR = Operator(SPEC, ROUTES, dsa_topk_indexer)
