"""The contest's verdict on outputs, from our oracle: what flashinfer-bench would say of them.

`judge_official` of an oracle knows the numeric rule; the evaluator asks other things before it.
Ours is stricter in one place: a finite value where the reference is infinite or NaN is wrong, which
the evaluator lets pass (infinity over infinity exceeds no relative tolerance).
"""

from __future__ import annotations

from typing import Any

import torch

from fastkernels import catalog
from fastkernels.core.problem import torch_dtype

PASSED = "PASSED"
SHAPE = "INCORRECT_SHAPE"
DTYPE = "INCORRECT_DTYPE"
NUMERICAL = "INCORRECT_NUMERICAL"


def verdict(op: str, expected: Any, outputs: tuple[torch.Tensor, ...]) -> str:
    """The status of outputs against an oracle's answer, as a trace spells it.

    expected: what the operator's `reference` returned.   outputs: in the definition's order.
    """
    spec = catalog.operator(op).spec
    for output, got in zip(spec.outputs, outputs, strict=True):
        want = getattr(expected, output.name)
        if got.shape != want.shape:
            return SHAPE
        if got.dtype != torch_dtype(output.dtypes[0]):
            return DTYPE
        # An infinity is wrong even where the reference has it, as in the lse of an empty row.
        if not bool((got.isfinite() & want.to(got.device).isfinite()).all()):
            return NUMERICAL
    if op == "dsa_topk_indexer" and not _selects_reachable_once(expected, outputs[0]):
        return NUMERICAL
    return PASSED if all(error.ok for error in expected.judge_official(outputs)) else NUMERICAL


def _selects_reachable_once(expected: Any, indices: torch.Tensor) -> bool:
    """Every index that is not negative names a position of its row, and no two are equal. (By
    value: our own judge lets a page that is listed twice give an index twice.)"""
    for row, entries in zip(expected.rows, indices.cpu().long(), strict=True):
        named = entries[entries >= 0]
        if named.unique().numel() != named.numel() or not bool(
            torch.isin(named, row.indices).all()
        ):
            return False
    return True
