"""What measuring and judging an operator needs beyond its cases: inputs drawn on the device, what a
call on them must give, bytes.

`Generic` serves any operator, drawn and judged on the CPU. One with a module here has ways of its
own: gdn_decode, gdn_prefill and dsa_sparse_attention draw and compute their results on the device,
moe_fp8_block_scale keeps its weights.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, cast

import torch

from fastkernels import catalog
from fastkernels.core.device import DeviceInfo
from fastkernels.core.route import Operator
from fastkernels.ops._shared.compare import Error
from fastkernels.testing.workloads.generic import Generic


class Expected(Protocol):
    """What a call must give."""

    def judge(self, outputs: tuple[torch.Tensor, ...], /) -> list[Error]:
        """By our limits."""

    def judge_official(self, outputs: tuple[torch.Tensor, ...], /) -> list[Error]:
        """By the contest's, which apply to inputs drawn as the contest draws them."""


class Workloads(Protocol):
    """Functions of a case (an instance of the operator's `Case`) or of its inputs."""

    def rows(
        self, operator: Operator, device: DeviceInfo, modes: Sequence[str], /
    ) -> Iterator[tuple[str, Any]]:
        """`(list, case)` of the published file, contest rows first."""

    def sweep_rows(self, modes: Sequence[str], /) -> Iterator[tuple[str, Any]]:
        """`(list, case)` of a sweep."""

    def details(self, case: Any, /) -> dict[str, int]:
        """What sizes do not tell of the work in a case, by names of the operator's own."""

    def own_inputs(self, case: Any, device: torch.device, /) -> Any:
        """As the case's seed draws them."""

    def fresh_inputs(self, case: Any, seed: int, device: torch.device, /) -> Any:
        """Drawn by another seed, on the device itself where the operator has a way to."""

    def updates(self, case: Any, /) -> bool:
        """Whether the call writes what it reads."""

    def live(self, inputs: Any, /) -> Any:
        """Inputs that a call may overwrite; the same ones where it does not."""

    def restore(self, live: Any, inputs: Any, /) -> None:
        """Put back what a call overwrote."""

    def outputs(self, inputs: Any, /) -> tuple[torch.Tensor, ...]:
        """Tensors to pass as `out`."""

    def expect(self, inputs: Any, /) -> Expected:
        """What a call must give, in float64."""

    def expect_by_oracle(self, many: Sequence[Any], /) -> Sequence[Expected]:
        """The same of each of several, by the oracle's own equations in their own order; on the
        inputs' device where the operator has a way to."""

    def join(self, inputs: Sequence[Any], /) -> Any | None:
        """Several inputs of one case as one, for `expect` and `expect_by_oracle`: outputs are those
        of the calls, one after the other along their first axis. None where there is no such one.
        """

    def oracle(self, case: Any, /) -> bool:
        """Whether the oracle on the CPU can be waited for."""

    def moved_bytes(self, case: Any, /) -> int:
        """What a call must read and write."""

    def held_bytes(self, case: Any, sets: int, /) -> int:
        """Device memory that measuring the case on so many input sets takes, from above."""


def load(op: str) -> Workloads:
    """Those of an operator. Raises ArgumentError over an unknown one."""
    operator = catalog.operator(op)
    name = f"{__name__}.{operator.name}"
    if importlib.util.find_spec(name) is None:
        return Generic(operator)
    return cast(Workloads, importlib.import_module(name))
