"""Small calls of gdn_decode and gdn_prefill, for tests of the way into the library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fastkernels import ArgumentError, catalog
from fastkernels.core.route import Operator

MODES = ("functional", "inplace", "pool")
OUTPUTS = ("output", "new_state")


@dataclass(frozen=True)
class Calls:
    """Calls of one operator with three rows (tokens of gdn_decode, sequences of gdn_prefill).

    rows, none: the field of a `Case` that says so, with rows and without any.   rest: what the
    library's entry takes after `new_state`.
    """

    name: str
    rows: dict[str, Any]
    none: dict[str, Any]
    rest: tuple[Any, ...] = ()

    @property
    def operator(self) -> Operator:
        return catalog.operator(self.name)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of every tensor argument."""
        return tuple(argument.name for argument in self.operator.spec.tensors)

    def inputs(self, mode: str = "functional", device: str = "cpu", **fields: Any) -> Any:
        module = catalog.module(self.name, "inputs")
        small = {"num_q_heads": 1, "num_v_heads": 2, "mode": mode, "seed": 1}
        return module.make_inputs(module.Case("small", **(self.rows | small | fields)), device)

    def outputs(self, inputs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As the library takes them: no `new_state` where the state is updated."""
        output = torch.empty(inputs.v.shape, dtype=torch.bfloat16)
        is_updated = inputs.inplace or inputs.read_indices is not None
        return output, None if is_updated else torch.empty(inputs.state.shape)

    def arguments(self, inputs: Any, output: Any, new_state: Any) -> tuple[Any, ...]:
        """What the library's entry takes after the plan."""
        given = inputs._asdict()
        leading = [given[argument.name] for argument in self.operator.spec.inputs]
        leading[-1] = given["scale"] or 0.0
        indices = given["read_indices"], given["write_indices"]
        return (*leading, *indices, output, new_state, *self.rest)

    def library_takes(
        self, entry: Any, inputs: Any, output: Any, new_state: Any, is_checked: bool = False
    ) -> bool:
        """Plans -1 and -2 launch nothing."""
        try:
            return bool(entry(-2 if is_checked else -1, *self.arguments(inputs, output, new_state)))
        except Exception:  # as `op._enter`
            return False

    def python_takes(self, inputs: Any, output: Any, new_state: Any) -> bool:
        out = output if new_state is None else (output, new_state)
        try:
            catalog.module(self.name, "problem").bind(inputs, out, None)
        except ArgumentError:
            return False
        return True


DECODE = Calls("gdn_decode", {"batch_size": 3}, {"batch_size": 0})
PREFILL = Calls("gdn_prefill", {"lengths": (2, 0, 3)}, {"lengths": ()}, rest=(None,))
