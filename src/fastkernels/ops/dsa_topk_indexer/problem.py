"""Arguments of dsa_topk_indexer, their checks, and the key they give."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fastkernels import envs
from fastkernels.core.outputs import check_workspace, prepare_outputs
from fastkernels.core.problem import Problem, check_inputs, input_device, problem_key
from fastkernels.errors import ArgumentError
from fastkernels.ops.dsa_topk_indexer.spec import PAGE_SIZE, SPEC


class Inputs(NamedTuple):
    """The arguments of the public function, by their public names."""

    q_index_fp8: torch.Tensor
    k_index_cache_fp8: torch.Tensor
    weights: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    topk: int = 2048


def bind(inputs: Inputs, out: torch.Tensor | None, workspace: torch.Tensor | None) -> Problem:
    """Check a call and prepare its output."""
    axes = check_inputs(SPEC, inputs)
    device = input_device(inputs, SPEC)
    outputs = prepare_outputs(SPEC, inputs, axes, device, out)
    check_workspace(SPEC, inputs, workspace, outputs, device)
    if envs.check_values():
        _check_rows(inputs)
    return Problem(problem_key(SPEC, axes, device), inputs, outputs, workspace)


def _check_rows(inputs: Inputs) -> None:
    """Value checks (FASTKERNELS_CHECK=values): lengths and used pages. Synchronises."""
    num_pages, max_num_pages = inputs.k_index_cache_fp8.shape[0], inputs.block_table.shape[1]
    lengths = inputs.seq_lens.long()
    wrong = ((lengths < 0) | (lengths > max_num_pages * PAGE_SIZE)).nonzero()
    if wrong.numel():
        row = int(wrong[0])
        raise ArgumentError(
            f"{SPEC.name}: 'seq_lens'[{row}] is {int(lengths[row])}, "
            f"expected 0..{max_num_pages * PAGE_SIZE} (max_num_pages * page_size)"
        )
    pages = inputs.block_table
    column = torch.arange(max_num_pages, device=pages.device)
    is_used = column * PAGE_SIZE < lengths[:, None]
    wrong = (is_used & ((pages < 0) | (pages >= num_pages))).nonzero()
    if wrong.numel():
        row, page = wrong[0].tolist()
        raise ArgumentError(
            f"{SPEC.name}: 'block_table'[{row}, {page}] is {int(pages[row, page])}, expected a "
            f"page of the cache (num_pages={num_pages}) within the row's length {int(lengths[row])}"
        )
