"""Arguments of gdn_prefill, their checks, and the key they give."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fastkernels import envs
from fastkernels.core.problem import Problem
from fastkernels.errors import ArgumentError
from fastkernels.ops._shared.gdn import bind_call
from fastkernels.ops.gdn_prefill.spec import SPEC


class Inputs(NamedTuple):
    """The arguments of the public function, by their public names."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    state: torch.Tensor | None
    A_log: torch.Tensor
    a: torch.Tensor
    dt_bias: torch.Tensor
    b: torch.Tensor
    cu_seqlens: torch.Tensor
    scale: float | None = None
    read_indices: torch.Tensor | None = None
    write_indices: torch.Tensor | None = None
    inplace: bool = False


def bind(
    inputs: Inputs,
    out: tuple[torch.Tensor, torch.Tensor] | torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> Problem:
    """Check a call and prepare its outputs; see `ops._shared.gdn.bind_call`."""
    problem = bind_call(SPEC, inputs, out, workspace)
    if envs.check_values():
        check_offsets(inputs)
    return problem


def check_offsets(inputs: Inputs) -> None:
    """Value check of cu_seqlens (FASTKERNELS_CHECK=values): 0 first, never decreasing, the number
    of tokens last. Synchronises."""
    total = inputs.q.shape[0]
    offsets = inputs.cu_seqlens.tolist()
    previous = 0
    for i, offset in enumerate(offsets):
        if i == 0 and offset != 0:
            expected = "0"
        elif offset < previous:
            expected = f">= {previous}, the offset before it"
        elif offset > total or (i == len(offsets) - 1 and offset != total):
            expected = f"{'at most ' if i < len(offsets) - 1 else ''}{total}, the number of tokens"
        else:
            previous = offset
            continue
        raise ArgumentError(f"{SPEC.name}: 'cu_seqlens'[{i}] is {offset}, expected {expected}")
