"""Solutions that call this package, and their traces: with them flashinfer-bench's `apply` puts the
operators in where a program asks for one of the definitions. See docs/flashinfer.md.

A package of `pack` stands alone; these need the package installed, and serve whatever sizes its
tables and torch routes serve. Traces are what the official evaluator says on this machine's GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fastkernels import catalog
from fastkernels.contest import standalone
from fastkernels.contest.definition import definition, fix_up
from fastkernels.contest.flatten import flatten
from fastkernels.version import __version__

ENTRY_FILE = "main.py"


def solution(op: str) -> dict[str, Any]:
    """The solution of an operator's definition that calls the operator."""
    spec = catalog.operator(op).spec
    return {
        "name": f"fastkernels_{__version__}_{op}",
        "definition": spec.definition,
        "author": "fastkernels",
        "description": f"{op} of the installed fastkernels, which chooses the kernel",
        "spec": {
            "language": "python",
            "target_hardware": ["cuda"],
            "entry_point": f"{ENTRY_FILE}::run",
            "dependencies": ["fastkernels"],
            "destination_passing_style": True,
        },
        "sources": [{"path": ENTRY_FILE, "content": _text(op)}],
    }


def _text(op: str) -> str:
    spec = catalog.operator(op).spec
    arguments = [argument.name for argument in spec.inputs]
    outputs = [output.name for output in spec.outputs]
    given = outputs[0] if len(outputs) == 1 else f"({', '.join(outputs)})"
    own = fix_up(op)
    # What it begins with has to come first.
    parts = [flatten({standalone.__name__: list(own.names)})] if own.names else []
    parts.append("import fastkernels")
    call = f"fastkernels.{op}({', '.join(f'{name}={name}' for name in arguments)}, out={given})"
    body = "\n".join(f"    {line}" for line in (call, *own.after_launch))
    parts.append(f"def run({', '.join((*arguments, *outputs))}):\n{body}\n")
    return "\n\n\n".join(part.strip("\n") for part in parts) + "\n"


def write_trace_set(op: str, root: Path, traces: Iterable[Mapping[str, Any]]) -> list[Path]:
    """The operator's definition, its solution, and traces of it (documents of flashinfer-bench)
    below `root`; what is there of other operators stays. Returns the files."""
    document = definition(op)
    where = Path(document["op_type"], document["name"])
    own = solution(op)
    files = {
        root / "definitions" / f"{where}.json": json.dumps(document, indent=1),
        root / "solutions" / where / f"{own['name']}.json": json.dumps(own, indent=1),
        root / "traces" / f"{where}.jsonl": "".join(json.dumps(t) + "\n" for t in traces),
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(files)


def without_files(trace: Mapping[str, Any]) -> dict[str, Any]:
    """A trace whose workload's tensors are random ones: the files that it was evaluated on, our
    draws, are not part of the set."""
    workload = trace["workload"]
    inputs = {
        name: {"type": "random"} if given["type"] == "safetensors" else given
        for name, given in workload["inputs"].items()
    }
    return {**trace, "workload": {**workload, "inputs": inputs}}


def largest_errors(traces: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """Absolute and relative, over all traces: what `ApplyConfig` has to allow."""
    found = [trace["evaluation"]["correctness"] for trace in traces]
    return (
        max(float(each["max_absolute_error"]) for each in found),
        max(float(each["max_relative_error"]) for each in found),
    )
