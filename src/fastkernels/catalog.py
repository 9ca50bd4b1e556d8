"""Every operator, in the order of a model's forward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from fastkernels.core import dispatch, torch_ops
from fastkernels.core.device import DeviceInfo
from fastkernels.core.route import Operator
from fastkernels.errors import ArgumentError
from fastkernels.ops.dsa_sparse_attention.op import OPERATOR as DSA_SPARSE_ATTENTION
from fastkernels.ops.dsa_topk_indexer.op import OPERATOR as DSA_TOPK_INDEXER
from fastkernels.ops.gdn_decode.op import OPERATOR as GDN_DECODE
from fastkernels.ops.gdn_prefill.op import OPERATOR as GDN_PREFILL
from fastkernels.ops.moe_fp8_block_scale.op import OPERATOR as MOE_FP8_BLOCK_SCALE

OPERATORS: tuple[Operator, ...] = (
    GDN_DECODE,
    GDN_PREFILL,
    DSA_SPARSE_ATTENTION,
    DSA_TOPK_INDEXER,
    MOE_FP8_BLOCK_SCALE,
)

for _operator in OPERATORS:
    torch_ops.register(_operator)


def operator(name: str) -> Operator:
    """The operator of a public name. Raises ArgumentError with the known names."""
    for candidate in OPERATORS:
        if candidate.name == name:
            return candidate
    known = ", ".join(candidate.name for candidate in OPERATORS)
    raise ArgumentError(f"operator {name!r} is unknown, expected one of {known}")


def module(name: str, part: str) -> ModuleType:
    """A module of an operator by name, such as `inputs` or `reference`, which load late."""
    return import_module(f"fastkernels.ops.{operator(name).name}.{part}")


def explain(
    op: str,
    *,
    device: str | torch.device | DeviceInfo | None = None,
    mode: str | None = None,
    traits: tuple[str, ...] = (),
    **axes: int,
) -> dispatch.Explanation:
    """Which route serves a problem, from which table and regime, and why no other route does.

    `axes` are the definition's axis names; constants default to the definition's values. `device`
    is a torch device or a product that need not be present (such as `"h200"`); None is
    the current GPU, else the CPU. Print the result, or take `.to_dict()`.

    Raises ArgumentError, UnsupportedProblem.
    """
    found = operator(op)
    return dispatch.explain(found, dispatch.key_for(found, device, mode, axes, traits))


def warmup(
    op: str,
    *,
    device: str | torch.device | None = None,
    mode: str | None = None,
    traits: tuple[str, ...] = (),
    **axes: int,
) -> None:
    """Load or compile the kernels of a problem, so that a CUDA graph capture may follow.

    `axes` as for `explain`; without `mode` every mode is warmed up.
    Raises ArgumentError, UnsupportedProblem.
    """
    found = operator(op)
    for each in found.spec.modes if mode is None else (mode,):
        dispatch.warmup(found, dispatch.key_for(found, device, each, axes, traits))


def workspace_size(
    op: str, *, device: str | torch.device | DeviceInfo | None = None, **axes: int
) -> int:
    """Bytes of scratch that suffice for a call on `device` with these axes or smaller ones.

    Pass a uint8 tensor of that size, 256-byte aligned, as `workspace=`; without it the caching
    allocator is used. 0 where no route needs any. Raises ArgumentError.
    """
    found = operator(op)
    return dispatch.workspace_size(found, dispatch.key_for(found, device, None, axes))


def force_route(op: str, name: str, config: Any = None) -> AbstractContextManager[None]:
    """Context manager: every call of `op` in this thread is served by route `name`.

    `config` is the route's config object, a dict of knobs (missing ones as in the default), or
    None. A problem that the route declines raises UnsupportedProblem; nothing falls back.
    """
    return dispatch.force_route(operator(op), name, config)
