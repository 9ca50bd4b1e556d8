"""Arguments of gdn_decode, their checks, and the key they give."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fastkernels.core.problem import Problem
from fastkernels.ops._shared.gdn import bind_call
from fastkernels.ops.gdn_decode.spec import SPEC


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
    return bind_call(SPEC, inputs, out, workspace)
