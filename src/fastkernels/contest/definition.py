"""The contest's definitions as flashinfer-bench takes them: ours as data, a reference made from the
oracle, and where the definition asks for something else than the library gives."""

from __future__ import annotations

import inspect
import json
from importlib import resources
from typing import Any, NamedTuple

from fastkernels import catalog
from fastkernels.contest import standalone
from fastkernels.contest.flatten import flatten
from fastkernels.core.spec import TensorSpec
from fastkernels.ops._shared.cases import contest_workloads

# How the oracles judge; a reference only computes.
_JUDGING = ("judge", "judge_official", "_judge_output", "_nearest")


class FixUp(NamedTuple):
    """What follows a launch, and what it takes of `contest.standalone`."""

    names: tuple[str, ...] = ()
    after_launch: tuple[str, ...] = ()


_FIX_UPS = {
    "gdn_prefill": FixUp(
        ("zero_empty_sequences",), ("zero_empty_sequences(new_state, cu_seqlens)",)
    ),
}


def fix_up(op: str) -> FixUp:
    """Where the definition of an operator differs from the library's semantics."""
    return _FIX_UPS.get(op, FixUp())


def contest_axes(op: str) -> list[dict[str, int]]:
    """The variable axes of every workload of the contest, in file order."""
    return [dict(workload["axes"]) for workload in contest_workloads(op)]


def definition(op: str) -> dict[str, Any]:
    """The definition of an operator with `reference`."""
    text = resources.files(f"fastkernels.ops.{op}").joinpath("definition.json").read_text("utf-8")
    return {**json.loads(text), "reference": reference_text(op)}


def reference_text(op: str) -> str:
    """Python with a `run` that takes the definition's inputs and returns its outputs, in their
    dtypes and on the inputs' device. The oracle behind it is the one that routes are judged by."""
    spec = catalog.operator(op).spec
    oracle = catalog.module(op, "reference").reference
    roots = {oracle.__module__: [oracle.__name__], f"fastkernels.ops.{op}.problem": ["Inputs"]}
    if fix_up(op).names:
        roots[standalone.__name__] = list(fix_up(op).names)
    arguments = [argument.name for argument in spec.inputs]
    first = next(a.name for a in spec.inputs if isinstance(a, TensorSpec))
    where = f", {first}.device" if "device" in inspect.signature(oracle).parameters else ""
    lines = [
        f"def run({', '.join(arguments)}):",
        f"    expected = reference(Inputs({', '.join(arguments)}){where})",
        *(
            f"    {out.name} = expected.{out.name}.to({first}.device, torch.{out.dtypes[0]})"
            for out in spec.outputs
        ),
        *(f"    {line}" for line in fix_up(op).after_launch),
        f"    return {', '.join(out.name for out in spec.outputs)}",
    ]
    return flatten(roots, without=_JUDGING) + "\n\n" + "\n".join(lines) + "\n"
