"""Arguments of gdn_decode, their checks, and the key they give."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fastkernels import envs
from fastkernels.core.outputs import check_workspace, prepare_outputs
from fastkernels.core.problem import Problem, check_inputs, input_device, problem_key
from fastkernels.ops._shared.gdn import POOL_STATE, check_slots, check_updated_state, state_form
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
    """Check a call and prepare its outputs. In pool and in-place form the second output of the
    problem is `state` itself."""
    form = state_form(SPEC, inputs)
    axes = check_inputs(SPEC, inputs, {"state": POOL_STATE} if form.mode == "pool" else None)
    device = input_device(inputs, SPEC)
    if form.updates_state:
        check_updated_state(SPEC, inputs)
        (output,) = prepare_outputs(SPEC, inputs, axes, device, out, SPEC.outputs[:1])
        assert inputs.state is not None
        outputs: tuple[torch.Tensor, ...] = (output, inputs.state)
    else:
        outputs = prepare_outputs(SPEC, inputs, axes, device, out)
    check_workspace(SPEC, inputs, workspace, outputs, device)
    if envs.check_values() and form.mode == "pool":
        check_slots(SPEC.name, inputs)
    return Problem(problem_key(SPEC, axes, device, form.mode), inputs, outputs, workspace)
