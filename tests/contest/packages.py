"""Tables to pack from, calls of a package's entry in a fresh process that has torch alone, and
flashinfer-bench where it is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from fastkernels import catalog
from fastkernels.contest.package import Package
from fastkernels.core import dispatch
from fastkernels.core import table as tables
from fastkernels.core.device import named_device
from fastkernels.core.problem import torch_dtype
from fastkernels.core.spec import TensorSpec
from fastkernels.testing.hostile import poison


def bench(module: str = "flashinfer_bench") -> Any:
    """A module of flashinfer-bench, or a skip that says why not."""
    try:
        return import_module(module)
    except ImportError as error:
        pytest.skip(f"flashinfer-bench cannot be imported: {error}")


# What is left: torch and the standard library. torch warns where NumPy is missing.
CHILD = """
import importlib.abc, importlib.util, sys, warnings
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
BLOCKED = set({blocked!r})
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)
sys.meta_path.insert(0, Block())
import torch
torch.set_num_threads(1)
spec = importlib.util.spec_from_file_location("main", {entry!r})
module = importlib.util.module_from_spec(spec)
sys.modules["main"] = module
spec.loader.exec_module(module)
results = []
for inputs, outputs in torch.load({calls!r}):
    before = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
    with torch.no_grad():
        result = module.run(*inputs, *outputs)
    for now, then in zip(inputs, before):
        if isinstance(now, torch.Tensor):
            bits = [t.contiguous().view(-1).view(torch.uint8) for t in (now, then)]
            assert torch.equal(*bits), "changed an input"
    results.append(outputs if result is None else result)
torch.save(results, {results!r})
"""

NOT_NEEDED = (
    "fastkernels", "tvm_ffi", "triton", "numpy", "click", "rich", "tomli", "cutlass",
    "flashinfer", "flashinfer_bench", "safetensors",
)  # fmt: skip


Calls = Sequence[tuple[Sequence[object], Sequence[torch.Tensor]]]
"""Inputs in the definition's order, and outputs to fill (none: they are returned)."""


def run_text(text: str, calls: Calls, folder: Path) -> list[tuple[torch.Tensor, ...]]:
    """What `run` of a Python text makes of each (inputs, outputs to fill)."""
    entry, given, results = (folder / name for name in ("main.py", "calls.pt", "results.pt"))
    entry.write_text(text)
    torch.save([(list(inputs), list(outputs)) for inputs, outputs in calls], given)
    script = CHILD.format(
        blocked=NOT_NEEDED, entry=str(entry), calls=str(given), results=str(results)
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [
        tuple(result) if isinstance(result, (list, tuple)) else (result,)
        for result in torch.load(results)
    ]


def entry_of(package: Package) -> str:
    """The one source of a package."""
    (source,) = package.solution["sources"]
    return str(source["content"])


FALLBACK = """
schema = 1
op = "{op}"
status = "unmeasured"
spec_digest = "{digest}"
[device]
arch = "{device.arch}"
product = "{device.product}"
num_sms = {device.num_sms}
[provenance]
tool = "a test"
created = 2026-11-29
[[fallback]]
route = "{route}"
reason = "a test"
"""


def user_table(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    op: str,
    route: str | None = None,
    product: str = "h200",
) -> None:
    """A table of the user's that names one route for everything: the torch route, or another."""
    operator, device = catalog.operator(op), named_device(product)
    (folder / op).mkdir(parents=True)
    text = FALLBACK.format(
        op=op, digest=operator.spec.digest, route=route or operator.safe_route.name, device=device
    )
    (folder / op / tables.file_name(device.arch, device.product)).write_text(text)
    monkeypatch.setenv("FASTKERNELS_TABLES", str(folder))
    dispatch.reload_tables()


def arguments(op: str, inputs: Any) -> list[Any]:
    """The definition's inputs, in its order; a scalar as a number."""
    spec = catalog.operator(op).spec
    values = [getattr(inputs, argument.name) for argument in spec.inputs]
    return [
        0.0 if value is None and not isinstance(argument, TensorSpec) else value
        for argument, value in zip(spec.inputs, values, strict=True)
    ]


def poisoned_outputs(op: str, axes: dict[str, int]) -> list[torch.Tensor]:
    spec = catalog.operator(op).spec
    sizes = dict(axes)
    for axis in spec.axes:
        if axis.name not in sizes:
            sizes[axis.name] = axis.derived.value(sizes) if axis.derived else axis.value or 0
    return [
        poison(torch.zeros([sizes[n] for n in out.shape], dtype=torch_dtype(out.dtypes[0])))
        for out in spec.outputs
    ]
