"""What a benchmark on a GPU must know about an operator beyond its cases.

`bench/workloads/<op>.py` offers, as functions of a case (an instance of the operator's `Case`):

- `rows(operator, device, modes)`: `(list, case)` of the published file, contest rows first;
- `sweep_rows(modes)`: `(list, case)` of a sweep;
- `own_inputs(case, device)`: as the case's seed draws them;
- `fresh_inputs(case, seed, device)`: drawn on the device itself;
- `live(inputs)`, `restore(live, inputs)`: inputs that a call may overwrite, and putting them back;
- `outputs(inputs)`: tensors to pass as `out`;
- `expect(inputs)`: what a call must give, in float64 on the inputs' device, with `judge(outputs)`;
- `oracle(case)`: whether the oracle on the CPU can be waited for;
- `moved_bytes(case)`: what a call must read and write;
- `held_bytes(case, sets)`: device memory that measuring it on so many input sets takes;
- `updates(case)`: whether the call writes what it reads.
"""

from __future__ import annotations

import importlib
from types import ModuleType


def load(op: str) -> ModuleType:
    return importlib.import_module(f"bench.workloads.{op}")
