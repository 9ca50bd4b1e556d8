"""Arguments of moe_fp8_block_scale, their checks, and the key they give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from fastkernels import envs
from fastkernels.core.outputs import check_workspace, prepare_outputs
from fastkernels.core.problem import Problem, check_inputs, check_scalars, input_device, problem_key
from fastkernels.errors import ArgumentError
from fastkernels.ops.moe_fp8_block_scale.spec import SPEC

_INT32 = torch.iinfo(torch.int32)


class Inputs(NamedTuple):
    """The arguments of the public function, by their public names."""

    routing_logits: torch.Tensor | None
    routing_bias: torch.Tensor | None
    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor
    gemm1_weights: torch.Tensor
    gemm1_weights_scale: torch.Tensor
    gemm2_weights: torch.Tensor
    gemm2_weights_scale: torch.Tensor
    local_expert_offset: int
    routed_scaling_factor: float
    topk: int = 8
    num_groups: int = 8
    topk_groups: int = 4
    topk_ids: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None
    deterministic: bool = False


def bind(inputs: Inputs, out: torch.Tensor | None, workspace: torch.Tensor | None) -> Problem:
    """Check a call and prepare its output.

    With given routing the group arguments mean nothing and are set to the definition's values, so
    that such calls share their keys. `deterministic` is a trait of the key: a route may decline it.
    """
    mode = _routing_mode(inputs)
    check_scalars(SPEC, inputs)
    if mode == "precomputed":
        groups = SPEC.constants
        inputs = inputs._replace(num_groups=groups["num_groups"], topk_groups=groups["topk_groups"])
    axes = check_inputs(SPEC, inputs)
    if mode == "logits":
        _check_candidates(axes)
    offset = inputs.local_expert_offset
    if not _INT32.min <= offset <= _INT32.max:
        raise ArgumentError(f"{SPEC.name}: 'local_expert_offset' is {offset}, expected an int32")
    device = input_device(inputs, SPEC)
    outputs = prepare_outputs(SPEC, inputs, axes, device, out)
    check_workspace(SPEC, inputs, workspace, outputs, device)
    if envs.check_values() and inputs.topk_ids is not None:
        _check_ids(inputs.topk_ids)
    traits = ("deterministic",) if inputs.deterministic else ()
    return Problem(problem_key(SPEC, axes, device, mode, traits), inputs, outputs, workspace)


def _check_ids(topk_ids: torch.Tensor) -> None:
    """Value check (FASTKERNELS_CHECK=values): only -1 is padding; any expert may live on another
    rank. Synchronises."""
    wrong = (topk_ids < -1).nonzero()
    if wrong.numel():
        token, column = wrong[0].tolist()
        raise ArgumentError(
            f"{SPEC.name}: 'topk_ids'[{token}, {column}] is {int(topk_ids[token, column])}, "
            "expected an expert, or -1 for padding"
        )


def _routing_mode(inputs: Inputs) -> str:
    """Whether routing is computed or given; refuses half of either and both."""
    given = [name for name in ("topk_ids", "topk_weights") if getattr(inputs, name) is not None]
    source = [
        name for name in ("routing_logits", "routing_bias") if getattr(inputs, name) is not None
    ]
    if len(given) == 1:
        missing = "topk_weights" if given == ["topk_ids"] else "topk_ids"
        raise ArgumentError(
            f"{SPEC.name}: {missing!r} is None, expected a tensor beside {given[0]!r}"
        )
    if given and source:
        raise ArgumentError(
            f"{SPEC.name}: {source[0]!r} is given, expected None beside 'topk_ids' and "
            "'topk_weights'"
        )
    if not given and len(source) < 2:
        missing = "routing_bias" if source == ["routing_logits"] else "routing_logits"
        raise ArgumentError(
            f"{SPEC.name}: {missing!r} is None, expected a tensor, or 'topk_ids' and 'topk_weights'"
        )
    return "precomputed" if given else "logits"


def _check_candidates(axes: Mapping[str, int]) -> None:
    """A token must find `topk` experts in its groups; a matter of computed routing only."""
    candidates = axes["topk_groups"] * (axes["num_experts"] // axes["num_groups"])
    if axes["topk"] > candidates:
        raise ArgumentError(
            f"{SPEC.name}: 'topk' is {axes['topk']}, expected at most {candidates}, the experts of "
            f"topk_groups={axes['topk_groups']} groups"
        )
