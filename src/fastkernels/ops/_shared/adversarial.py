"""What the adversarial generators of the operators have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from fastkernels.ops._shared.cases import generator, move

STREAM = 0x9E3779B9  # so that changes do not repeat the numbers of the inputs they change


@dataclass(frozen=True)
class Draws:
    """Draws of `case` under any seed, each `change`d afterwards by numbers of its own. An
    operator's `Stratum` adds its `make_inputs`, and says whether that has `drawn_on`: then a device
    draws for itself, and equal seeds give other numbers there than on the CPU."""

    make_inputs: ClassVar[Any]  # mypy takes a Callable for a method
    draws_anywhere: ClassVar[bool] = False

    case: Any
    change: Callable[[Any, torch.Generator], Any] | None = None

    def draw(self, seed: int, device: torch.device | str = "cpu", **fields: Any) -> tuple[Any, Any]:
        """Inputs on `device`, and their case. `fields` replace other fields of the case."""
        case = replace(self.case, seed=seed, **fields)
        where = torch.device(device if self.draws_anywhere else "cpu")
        drawn = {"device": where, "drawn_on": where} if self.draws_anywhere else {}
        inputs = self.make_inputs(case, **drawn)
        if self.change is not None:
            with where:
                inputs = self.change(inputs, generator(seed ^ STREAM, where))
        moved = (move(x, device) if isinstance(x, torch.Tensor) else x for x in inputs)
        return type(inputs)._make(moved), case


def in_turn(values: Sequence[float], count: int) -> torch.Tensor:
    """`count` numbers, the values in turn."""
    return torch.tensor(values).repeat(-(-count // len(values)))[:count]
