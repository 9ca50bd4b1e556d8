"""A small operator for tests of dispatch, y = x * factor, with routes for absent GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fastkernels.core import dispatch
from fastkernels.core.outputs import check_workspace, prepare_outputs
from fastkernels.core.problem import Problem, check_inputs, input_device, problem_key
from fastkernels.core.route import ANY_DEVICE, Decline, Operator, Route
from fastkernels.core.spec import Axis, Constraint, Derived, OpSpec, ScalarSpec, TensorSpec

SPEC = OpSpec(
    name="toy",
    definition="toy_h4",
    axes=(
        Axis("rows"),
        Axis("cols"),
        Axis("heads", value=4, is_open=True, at_least=1, at_most=64),
        Axis("fixed", value=2),
        Axis("rows_plus_one", derived=Derived("rows", add=1)),
    ),
    inputs=(
        TensorSpec("x", ("rows", "cols", "heads"), ("float32",), hint="toys are float32"),
        TensorSpec("offsets", ("rows_plus_one",), ("int64", "int32"), optional=True, dense=0),
        ScalarSpec("factor", "float", optional=True),
    ),
    outputs=(TensorSpec("y", ("rows", "cols", "heads"), ("float32",)),),
    constraints=(Constraint("x", "heads other than 7", lambda axes: axes["heads"] != 7),),
    modes=("plain", "fancy"),
)


class Inputs(NamedTuple):
    x: torch.Tensor
    offsets: torch.Tensor | None = None
    factor: float | None = None


@dataclass(frozen=True)
class Knobs:
    tile: int = 16
    fast: bool = False


@dataclass(frozen=True)
class NoKnobs:
    pass


def scale(inputs: Inputs, outputs: tuple[torch.Tensor, ...], workspace: Any, config: Any) -> None:
    outputs[0].copy_(inputs.x * (1.0 if inputs.factor is None else inputs.factor))


def crash(inputs: Inputs, outputs: tuple[torch.Tensor, ...], workspace: Any, config: Any) -> None:
    raise ValueError("illegal instruction")


def no_rows_ending_in_1(key: Any, device: Any, config: Knobs) -> Decline | None:
    rows = key.axis("rows")
    return Decline(f"needs rows not ending in 1, got {rows}") if rows % 10 == 1 else None


TILED = Route(
    "tiled", "cuda", ("sm90", "sm100"), Knobs(), scale,
    candidates={"tile": (16, 32), "fast": (False, True)},
    supports=no_rows_ending_in_1,
    workspace_bytes=lambda axes, config: axes["rows"] * config.tile,
)  # fmt: skip
SMALL = Route(
    "small", "triton", ("sm90",), Knobs(), scale, max_axes={"rows": 8},
    workspace_bytes=lambda axes, config: 1000 * axes["rows"],
)  # fmt: skip
CRASHING = Route("crashing", "torch", ANY_DEVICE, NoKnobs(), crash)
SAFE = Route("safe", "torch", ANY_DEVICE, NoKnobs(), scale)


def toy(
    x: Any, offsets: Any = None, factor: Any = None, *, out: Any = None, workspace: Any = None
) -> torch.Tensor:
    inputs = Inputs(x, offsets, factor)
    axes = check_inputs(SPEC, inputs)
    device = input_device(inputs, SPEC)
    outputs = prepare_outputs(SPEC, inputs, axes, device, out)
    check_workspace(SPEC, inputs, workspace, outputs, device)
    key = problem_key(SPEC, axes, device)
    (y,) = dispatch.run(OPERATOR, Problem(key, inputs, outputs, workspace))
    return y


OPERATOR = Operator(SPEC, (TILED, SMALL, CRASHING, SAFE), toy)

TABLE = f"""
schema = 1
op = "toy"
status = "measured"
spec_digest = "{SPEC.digest}"
[device]
arch = "sm90"
product = "NVIDIA H200"
num_sms = 132
[provenance]
tool = "hand"
commit = "0"
created = 2026-12-01
versions = {{ torch = "{torch.__version__}" }}
protocol = "none"
evidence_sha256 = "0"
[limits]
rows = [1, 100]
cols = [1, 1000]
[[regime]]
mode = "plain"
rows = [1, 8]
cols = [1, 1000]
route = "small"
config = {{ tile = 16, fast = false }}
evidence = {{ cases = 4, worst_us = 9.0, spread_us = 0.1, margin = 0.07, trials = 9, failures = 0 }}
[[regime]]
mode = "plain"
rows = [9, 100]
cols = [1, 1000]
route = "tiled"
config = {{ tile = 32, fast = true }}
evidence = {{ cases = 4, worst_us = 9.0, spread_us = 0.1, margin = 0.07, trials = 9, failures = 0 }}
[[fallback]]
heads = [1, 2]
route = "small"
reason = "few heads"
[[fallback]]
route = "safe"
reason = "outside measured range"
"""
