"""A data set of flashinfer-bench with one definition: all workloads of the contest, as files.

The recorded tensors are not public, so every row holds our seeded draw (`inputs.CONTEST`). Large
inputs of one shape in all rows (caches, weights) are written once, from the first row's draw: with
a cache per row the indexer's alone would take 13 GB.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from fastkernels import catalog
from fastkernels.contest.definition import definition
from fastkernels.core.spec import ScalarSpec, TensorSpec

SHARED_BYTES = 2**24
MAX_PROCESSES = 8  # one draws up to 2 GB


def write_dataset(
    op: str, root: Path, solutions: Sequence[Mapping[str, Any]], limit: int | None = None
) -> list[str]:
    """Definition, workloads and solutions below `root`; returns the workloads' uuids.

    limit: only so many rows (for tests). Needs safetensors.
    """
    document = definition(op)
    where = Path(document["op_type"], document["name"])
    _write(root / "definitions" / f"{where}.json", document)
    for solution in solutions:
        _write(root / "solutions" / where / f"{solution['name']}.json", solution)
    cases = catalog.module(op, "inputs").CONTEST[:limit]
    first = catalog.module(op, "inputs").make_inputs(cases[0])
    shared = _shared(op, first)
    blobs = Path("blob", "workloads", where)
    (root / blobs).mkdir(parents=True)
    for name in shared:
        _save({name: getattr(first, name)}, root / blobs / f"{name}.safetensors")
    processes = min(MAX_PROCESSES, len(os.sched_getaffinity(0)), len(cases))
    jobs = [(op, case, root, blobs, shared) for case in cases]
    if processes == 1:
        rows = list(map(_row, jobs))
    else:
        context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        with ProcessPoolExecutor(processes, context, torch.set_num_threads, (1,)) as pool:
            rows = list(pool.map(_row, jobs))
    path = root / "workloads" / f"{where}.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [case.source for case in cases]


def _write(path: Path, document: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1))


def _shared(op: str, first: Any) -> frozenset[str]:
    """Large inputs whose shape is the same in every row."""
    cases = catalog.module(op, "inputs").CONTEST
    spec = catalog.operator(op).spec
    sizes = {axis: {case.axes[axis] for case in cases} for axis in spec.variable_axes}
    differing = {axis for axis, found in sizes.items() if len(found) > 1}
    return frozenset(
        argument.name
        for argument in spec.inputs
        if isinstance(argument, TensorSpec)
        and getattr(first, argument.name).nbytes >= SHARED_BYTES
        and not any(
            differing & {axis, getattr(spec.axis[axis].derived, "axis", axis)}
            for axis in argument.shape
        )
    )


def _row(job: tuple[str, Any, Path, Path, frozenset[str]]) -> dict[str, Any]:
    """Draws one workload, writes its own tensors, and returns its line."""
    op, case, root, blobs, shared = job
    spec = catalog.operator(op).spec
    inputs = catalog.module(op, "inputs").make_inputs(case)
    described: dict[str, dict[str, Any]] = {}
    own: dict[str, torch.Tensor] = {}
    for argument in spec.inputs:
        value = getattr(inputs, argument.name)
        if isinstance(argument, ScalarSpec):
            # None is for callers of the library; the definition's default is head_size ** -0.5.
            number = spec.constants["head_size"] ** -0.5 if value is None else value
            described[argument.name] = {"type": "scalar", "value": number}
            continue
        file = argument.name if argument.name in shared else case.source
        described[argument.name] = {
            "type": "safetensors",
            "path": (blobs / f"{file}.safetensors").as_posix(),
            "tensor_key": argument.name,
        }
        if argument.name not in shared:
            own[argument.name] = value
    _save(own, root / blobs / f"{case.source}.safetensors")
    names = definition(op)["axes"]
    sizes = {n: _size(spec, case, n) for n, axis in names.items() if axis["type"] == "var"}
    return {
        "definition": spec.definition,
        "workload": {"uuid": case.source, "axes": sizes, "inputs": described},
        "solution": None,
        "evaluation": None,
    }


def _size(spec: Any, case: Any, axis: str) -> int:
    derived = spec.axis[axis].derived
    return int(case.axes[axis] if derived is None else derived.value(case.axes))


def _save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    import_module("safetensors.torch").save_file(contiguous, str(path))
