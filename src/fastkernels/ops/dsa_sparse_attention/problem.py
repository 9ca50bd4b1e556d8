"""Arguments of dsa_sparse_attention, their checks, and the key they give."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from fastkernels import envs
from fastkernels.core.outputs import check_workspace, prepare_outputs
from fastkernels.core.problem import Problem, check_inputs, input_device, problem_key
from fastkernels.errors import ArgumentError
from fastkernels.ops.dsa_sparse_attention.spec import SPEC


class Inputs(NamedTuple):
    """The arguments of the public function, by their public names."""

    q_nope: torch.Tensor
    q_pe: torch.Tensor
    ckv_cache: torch.Tensor
    kpe_cache: torch.Tensor
    sparse_indices: torch.Tensor
    sm_scale: float
    lse_base: Literal[2, "e"] = 2


def bind(
    inputs: Inputs,
    out: tuple[torch.Tensor, torch.Tensor] | None,
    workspace: torch.Tensor | None,
) -> Problem:
    """Check a call and prepare its outputs."""
    axes = check_inputs(SPEC, inputs)
    device = input_device(inputs, SPEC)
    outputs = prepare_outputs(SPEC, inputs, axes, device, out)
    check_workspace(SPEC, inputs, workspace, outputs, device)
    if envs.check_values():
        _check_indices(inputs.sparse_indices, axes["num_pages"] * axes["page_size"])
    return Problem(problem_key(SPEC, axes, device), inputs, outputs, workspace)


def _check_indices(indices: torch.Tensor, num_rows: int) -> None:
    """Value checks (FASTKERNELS_CHECK=values): only -1 is padding. Synchronises."""
    wrong = ((indices < -1) | (indices.long() >= num_rows)).nonzero()
    if wrong.numel():
        token, column = wrong[0].tolist()
        legal = f"-1 or 0..{num_rows - 1}" if num_rows else "-1 (the cache has no rows)"
        raise ArgumentError(
            f"{SPEC.name}: 'sparse_indices'[{token}, {column}] is {int(indices[token, column])}, "
            f"expected {legal}"
        )
