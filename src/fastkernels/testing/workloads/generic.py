"""Any operator by its spec, cases and oracle: inputs drawn on the CPU and moved, results judged on
the CPU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from fastkernels import catalog
from fastkernels.core import dispatch
from fastkernels.core.device import DeviceInfo
from fastkernels.core.problem import torch_dtype
from fastkernels.core.route import Operator
from fastkernels.testing.contracts import all_axes


@dataclass(frozen=True)
class Generic:
    """`Workloads` of one operator."""

    operator: Operator

    def rows(
        self, operator: Operator, device: DeviceInfo, modes: Sequence[str], /
    ) -> Iterator[tuple[str, Any]]:
        """The operator's lists, in the modes that their cases have."""
        inputs = self._part("inputs")
        table, _ = dispatch.find_table(operator, device)
        gap = inputs.gap_cases(table, 0)
        for listed, cases in (("contest", inputs.CONTEST), ("serving", inputs.SERVING)):
            yield from ((listed, case) for case in cases if case.mode in modes)
        yield from (("gap", case) for case in gap if case.mode in modes)

    def sweep_rows(self, modes: Sequence[str], /) -> Iterator[tuple[str, Any]]:
        inputs = self._part("inputs")
        for listed, cases in (("contest", inputs.CONTEST), ("serving", inputs.SERVING)):
            yield from ((listed, case) for case in cases if case.mode in modes)

    def details(self, case: Any, /) -> dict[str, int]:
        return {}

    def own_inputs(self, case: Any, device: torch.device, /) -> Any:
        return self._part("inputs").make_inputs(case, device)

    def fresh_inputs(self, case: Any, seed: int, device: torch.device, /) -> Any:
        return self.own_inputs(dataclasses.replace(case, seed=seed), device)

    def updates(self, case: Any, /) -> bool:
        return bool(self.operator.spec.updated) and case.mode != self.operator.spec.modes[0]

    def live(self, inputs: Any, /) -> Any:
        name = self._updated(inputs)
        return inputs._replace(**{name: getattr(inputs, name).clone()}) if name else inputs

    def restore(self, live: Any, inputs: Any, /) -> None:
        name = self._updated(inputs)
        if name:
            getattr(live, name).copy_(getattr(inputs, name))

    def outputs(self, inputs: Any, /) -> tuple[torch.Tensor, ...]:
        filled: tuple[torch.Tensor, ...] = self._part("problem").bind(inputs, None, None).outputs
        given = [x for x in inputs if isinstance(x, torch.Tensor)]
        return tuple(tensor for tensor in filled if not any(tensor is x for x in given))

    def expect(self, inputs: Any, /) -> Any:
        return self._part("reference").reference(inputs)

    def expect_by_oracle(self, many: Sequence[Any], /) -> list[Any]:
        return [self.expect(inputs) for inputs in many]

    def join(self, inputs: Sequence[Any], /) -> Any | None:
        return None

    def oracle(self, case: Any, /) -> bool:
        return True

    def moved_bytes(self, case: Any, /) -> int:
        """Every tensor of the call once, those that may be left out not counted. Of a paged cache a
        call reads less."""
        spec, axes = self.operator.spec, all_axes(self.operator, case)
        return sum(
            math.prod(axes[name] for name in tensor.shape) * torch_dtype(tensor.dtypes[0]).itemsize
            for tensor in (*spec.tensors, *spec.outputs)
            if tensor not in spec.options
        )

    def held_bytes(self, case: Any, sets: int, /) -> int:
        return 3 * (sets + 1) * self.moved_bytes(case)  # a pool has twice the slots

    def _updated(self, inputs: Any) -> str:
        """The argument that the call overwrites, or nothing."""
        spec = self.operator.spec
        given = (getattr(inputs, name) for name in spec.update_options)
        return spec.updated if any(x is not None and x is not False for x in given) else ""

    def _part(self, name: str) -> ModuleType:
        return catalog.module(self.operator.name, name)
