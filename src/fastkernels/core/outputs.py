"""What a call writes to: outputs allocated or given, the caller's workspace, and overlaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fastkernels.core.problem import (
    check_shape,
    check_strides,
    check_tensor,
    dtype_name,
    torch_dtype,
)
from fastkernels.core.spec import OpSpec, TensorSpec
from fastkernels.errors import ArgumentError

WORKSPACE_ALIGNMENT = 256


def allocate(
    outputs: Sequence[TensorSpec], axes: Mapping[str, int], device: torch.device
) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.empty(
            [axes[name] for name in out.shape], dtype=torch_dtype(out.dtypes[0]), device=device
        )
        for out in outputs
    )


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous whatever the tensor is; the option costs as much as the question saves twice."""
    if tensor.is_contiguous():
        return torch.empty_like(tensor)
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def prepare_outputs(
    spec: OpSpec,
    inputs: Any,
    axes: Mapping[str, int],
    device: torch.device,
    out: Any,
    outputs: Sequence[TensorSpec] | None = None,
) -> tuple[torch.Tensor, ...]:
    """The tensors to fill: allocated, or the caller's `out` after its checks.

    `outputs` are the specs of what is returned (default: all of the spec's); with one of them `out`
    is a tensor, with several a tuple in the definition's order.
    """
    outputs = spec.outputs if outputs is None else outputs
    if out is None:
        return allocate(outputs, axes, device)
    names = ", ".join(output.name for output in outputs)
    if len(outputs) == 1:
        if not isinstance(out, torch.Tensor):
            raise ArgumentError(
                f"{spec.name}: 'out' is a {type(out).__name__}, expected one tensor ({names})"
            )
        tensors: tuple[torch.Tensor, ...] = (out,)
    else:
        if not isinstance(out, (tuple, list)) or len(out) != len(outputs):
            got = f"{len(out)} entries" if isinstance(out, (tuple, list)) else type(out).__name__
            raise ArgumentError(f"{spec.name}: 'out' is {got}, expected a tuple ({names})")
        tensors = tuple(out)
    for output, tensor in zip(outputs, tensors, strict=True):
        check_tensor(spec, output, output.shape, tensor)
        if tensor.device != device:
            raise ArgumentError(
                f"{spec.name}: out {output.name!r} is on {tensor.device}, expected {device}"
            )
        check_shape(spec, output, output.shape, tensor, axes)
        check_strides(spec, output, output.shape, tensor)
        if overlaps_itself(tensor):
            raise ArgumentError(
                f"{spec.name}: out {output.name!r} has strides {tuple(tensor.stride())}, expected "
                "every element at its own address"
            )
    check_no_overlap(spec, inputs, tensors, tuple(output.name for output in outputs))
    return tensors


def check_no_overlap(
    spec: OpSpec, inputs: Any, outputs: Sequence[torch.Tensor], names: Sequence[str]
) -> None:
    """Refuse outputs that share memory with an input or with each other."""
    others = [(a.name, getattr(inputs, a.name)) for a in spec.tensors]
    for position, (name, tensor) in enumerate(zip(names, outputs, strict=True)):
        for other_name, other in others:
            if other is not None and overlaps(tensor, other):
                raise ArgumentError(
                    f"{spec.name}: {name!r} overlaps {other_name!r}, expected memory of its own"
                )
        for other_name, other in zip(names[:position], outputs[:position], strict=True):
            if overlaps(tensor, other):
                raise ArgumentError(
                    f"{spec.name}: {name!r} overlaps {other_name!r}, expected memory of its own"
                )


def check_workspace(
    spec: OpSpec,
    inputs: Any,
    workspace: Any,
    outputs: Sequence[torch.Tensor],
    device: torch.device,
) -> None:
    """Dtype, layout, alignment and ownership of the caller's scratch; dispatch checks its size."""
    if workspace is None:
        return
    op = spec.name
    if not isinstance(workspace, torch.Tensor) or workspace.dtype != torch.uint8:
        tensor = isinstance(workspace, torch.Tensor)
        got = dtype_name(workspace.dtype) if tensor else type(workspace).__name__
        raise ArgumentError(f"{op}: 'workspace' is {got}, expected a uint8 tensor")
    if workspace.dim() != 1 or not workspace.is_contiguous():
        raise ArgumentError(
            f"{op}: 'workspace' has shape {tuple(workspace.shape)} and strides "
            f"{tuple(workspace.stride())}, expected one contiguous axis"
        )
    if workspace.device != device:
        raise ArgumentError(f"{op}: 'workspace' is on {workspace.device}, expected {device}")
    if workspace.numel() and workspace.data_ptr() % WORKSPACE_ALIGNMENT:
        raise ArgumentError(
            f"{op}: 'workspace' is at address {workspace.data_ptr():#x}, "
            f"expected a multiple of {WORKSPACE_ALIGNMENT}"
        )
    check_no_overlap(spec, inputs, (workspace,), ("workspace",))
    for output, filled in zip(spec.outputs, outputs, strict=True):
        if overlaps(workspace, filled):
            raise ArgumentError(
                f"{op}: 'workspace' overlaps {output.name!r}, expected memory of its own"
            )


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and one past the last byte that the tensor's elements touch."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def overlaps(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share memory.

    Exact for tensors whose byte ranges are apart and for rows of one buffer side by side (slices of
    a fused projection); other interleavings count as overlap.
    """
    if a.numel() == 0 or b.numel() == 0 or a.device != b.device:
        return False
    a_start, a_end = _byte_range(a)
    b_start, b_end = _byte_range(b)
    if a_end <= b_start or b_end <= a_start:
        return False
    for pitch in {stride * a.element_size() for stride in a.stride() if stride}:
        a_window, b_window = _window(a, pitch), _window(b, pitch)
        if a_window is None or b_window is None:
            continue
        shift = (b_start - a_start) % pitch
        if a_window <= shift and shift + b_window <= pitch:
            return False
    return True


def _window(tensor: torch.Tensor, pitch: int) -> int | None:
    """Bytes `w` such that every address is in `[start, start + w)` modulo `pitch`, if any."""
    window = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        step = stride * tensor.element_size()
        if size > 1 and step < pitch:
            window += (size - 1) * step
        elif size > 1 and step % pitch:
            return None
    return window


def overlaps_itself(tensor: torch.Tensor) -> bool:
    reach = 0
    order = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    for stride, size in order:
        if size <= 1:
            continue
        if stride <= reach:
            return tensor.numel() > 0
        reach += (size - 1) * stride
    return False
