"""Argument checks that read metadata only, and the key that identifies a problem to dispatch.

The rules come from the operator's spec; what a spec cannot say (pool form, value checks) stands in
`ops/<op>/problem.py`. Nothing here reads a tensor's contents, so nothing here synchronises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from fastkernels.core.device import DeviceInfo, device_info
from fastkernels.core.spec import Axis, OpSpec, ScalarSpec, TensorSpec
from fastkernels.errors import ArgumentError

WORKSPACE_ALIGNMENT = 256


class ProblemKey(NamedTuple):
    """Everything that may decide a route: hashable, from metadata only.

    `axes` holds the spec's key axes in order. `traits` are facts that are no axis (an index dtype,
    an alignment); routes may decline on them, tables never see them.
    """

    op: str
    device: DeviceInfo
    mode: str
    axes: tuple[tuple[str, int], ...]
    traits: tuple[str, ...] = ()

    def axis(self, name: str) -> int:
        return dict(self.axes)[name]

    def describe(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.axes)
        return f"{self.op}({sizes}, mode={self.mode}) on {self.device.arch}"


class Problem(NamedTuple):
    """A checked call: key, the operator's `Inputs`, tensors to fill, the caller's scratch."""

    key: ProblemKey
    inputs: Any
    outputs: tuple[torch.Tensor, ...]
    workspace: torch.Tensor | None


@cache
def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


@cache
def _dtypes(names: tuple[str, ...]) -> frozenset[torch.dtype]:
    return frozenset(torch_dtype(name) for name in names)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def make_key(
    spec: OpSpec,
    axes: Mapping[str, int],
    device: DeviceInfo,
    mode: str | None = None,
    traits: tuple[str, ...] = (),
) -> ProblemKey:
    return ProblemKey(
        spec.name,
        device,
        spec.modes[0] if mode is None else mode,
        tuple((axis.name, axes[axis.name]) for axis in spec.key_axes),
        traits,
    )


def key_from_axes(
    spec: OpSpec, axes: Mapping[str, int], device: DeviceInfo, mode: str | None = None
) -> ProblemKey:
    """A key from axis values alone, constants defaulting to the definition's.

    Raises ArgumentError on an unknown or missing axis, a value that the spec does not accept, or an
    unknown mode.
    """
    sizes = {axis.name: axis.value for axis in spec.axes if axis.value is not None} | dict(axes)
    for name, size in sizes.items():
        if name not in spec.axis:
            raise ArgumentError(
                f"{spec.name}: axis {name!r} is unknown, expected one of "
                + ", ".join(axis.name for axis in spec.key_axes)
            )
        if isinstance(size, bool) or not isinstance(size, int):
            raise ArgumentError(f"{spec.name}: axis {name!r} is {size!r}, expected an integer")
    missing = [name for name in spec.variable_axes if name not in sizes]
    if missing:
        raise ArgumentError(f"{spec.name}: axis {missing[0]!r} is missing, expected an integer")
    if mode is not None and mode not in spec.modes:
        raise ArgumentError(
            f"{spec.name}: mode {mode!r} is unknown, expected one of {', '.join(spec.modes)}"
        )
    for name, size in sizes.items():
        derived = spec.axis[name].derived
        if derived is not None and size != derived.value(sizes):
            raise ArgumentError(
                f"{spec.name}: axis {name!r} is {size}, expected {derived.value(sizes)}"
            )
    _check_axes(spec, sizes, {})
    return make_key(spec, sizes, device, mode)


# ---- checks -------------------------------------------------------------------------------------


def check_inputs(
    spec: OpSpec, inputs: Any, shapes: Mapping[str, tuple[str, ...]] | None = None
) -> dict[str, int]:
    """Check every argument of `inputs` against the spec and return all axis sizes.

    `shapes` replaces the shape of single tensors (the pool form's state). Axis names in it that the
    spec does not know are free sizes, and are returned, too.
    """
    shapes = shapes or {}
    axes: dict[str, int] = {}
    blame: dict[str, str] = {}
    device: torch.device | None = None
    first = ""
    given: list[tuple[TensorSpec, tuple[str, ...], torch.Tensor]] = []
    for argument in (*spec.inputs, *spec.options):
        value = getattr(inputs, argument.name)
        if isinstance(argument, ScalarSpec):
            _check_scalar(spec.name, argument, value)
            if argument.name in spec.axis:  # an option that is a size, as topk is
                axes[argument.name], blame[argument.name] = value, argument.name
            continue
        if value is None and argument.optional:
            continue
        shape = shapes.get(argument.name, argument.shape)
        _check_tensor(spec, argument, shape, value)
        if device is None:
            device, first = value.device, argument.name
        elif value.device != device:
            raise ArgumentError(
                f"{spec.name}: {argument.name!r} is on {value.device}, "
                f"expected {device} like {first!r}"
            )
        given.append((argument, shape, value))
        for name, size in zip(shape, value.shape, strict=True):
            axis = spec.axis.get(name)
            if name not in axes and (axis is None or axis.derived is None):
                axes[name] = size
                blame[name] = argument.name
    _bind_bases(spec, given, axes, blame)
    for axis in spec.axes:
        if axis.name not in axes and axis.value is not None:
            axes[axis.name] = axis.value
    for axis in spec.axes:
        if axis.derived is not None:
            axes[axis.name] = axis.derived.value(axes)
    _check_axes(spec, axes, blame)
    for argument, shape, value in given:
        _check_shape(spec, argument, shape, value, axes)
        _check_strides(spec, argument, shape, value)
    return axes


def _bind_bases(
    spec: OpSpec,
    given: Sequence[tuple[TensorSpec, tuple[str, ...], torch.Tensor]],
    axes: dict[str, int],
    blame: dict[str, str],
) -> None:
    """Sizes that no tensor names, from derived axes that one does (num_seqs from cu_seqlens)."""
    for axis in spec.axes:
        if axis.derived is None or axis.derived.axis in axes:
            continue
        for argument, shape, value in given:
            if axis.name in shape:
                base = axis.derived.base(value.shape[shape.index(axis.name)])
                if base is not None:
                    axes[axis.derived.axis] = base
                    blame[axis.derived.axis] = argument.name
                break


def _check_tensor(spec: OpSpec, argument: TensorSpec, shape: tuple[str, ...], value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        got = "None" if value is None else f"a {type(value).__name__}"
        raise ArgumentError(f"{spec.name}: {argument.name!r} is {got}, expected a tensor")
    if value.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            f"{spec.name}: {argument.name!r} requires grad, expected no gradient: fastkernels is "
            "inference only; call it under torch.inference_mode() or torch.no_grad()"
        )
    if value.dtype not in _dtypes(argument.dtypes):
        raise ArgumentError(
            f"{spec.name}: {argument.name!r} is {dtype_name(value.dtype)}, "
            f"expected {' or '.join(argument.dtypes)}" + _hint(argument)
        )
    if value.layout != torch.strided:
        raise ArgumentError(
            f"{spec.name}: {argument.name!r} has layout {value.layout}, expected torch.strided"
        )
    if value.dim() != len(shape):
        raise ArgumentError(
            f"{spec.name}: {argument.name!r} has shape {tuple(value.shape)}, expected "
            f"{len(shape)} axes ({', '.join(shape)})" + _hint(argument)
        )


def _check_strides(
    spec: OpSpec, argument: TensorSpec, shape: tuple[str, ...], value: torch.Tensor
) -> None:
    if not argument.dense or value.is_contiguous() or not value.numel():
        return
    expected = 1
    for position in range(len(shape) - 1, len(shape) - 1 - argument.dense, -1):
        size = value.shape[position]
        if size > 1 and value.stride(position) != expected:
            raise ArgumentError(
                f"{spec.name}: {argument.name!r} has strides {tuple(value.stride())}, expected "
                f"contiguous ({', '.join(shape[-argument.dense :])}); it is never copied in secret"
            )
        expected *= size


def _check_shape(
    spec: OpSpec,
    argument: TensorSpec,
    shape: tuple[str, ...],
    value: torch.Tensor,
    axes: Mapping[str, int],
) -> None:
    if tuple([axes[name] for name in shape]) == value.shape:
        return
    expected = ", ".join(f"{name}={axes[name]}" for name in shape)
    raise ArgumentError(
        f"{spec.name}: {argument.name!r} has shape {tuple(value.shape)}, expected ({expected})"
    )


def _check_axes(spec: OpSpec, axes: Mapping[str, int], blame: Mapping[str, str]) -> None:
    for axis in spec.axes:
        if axis.derived is not None:
            continue
        size = axes[axis.name]
        if not axis.accepts(size):
            culprit = f"{blame[axis.name]!r} has" if axis.name in blame else "got"
            raise ArgumentError(
                f"{spec.name}: {culprit} {axis.name}={size}, expected {axis.accepted()}"
                + _hint(axis)
            )
    for constraint in spec.constraints:
        if not constraint.holds(axes):
            names = [n for n in axes if n in constraint.text.replace("*", " ").split()]
            got = ", ".join(f"{name}={axes[name]}" for name in names)
            raise ArgumentError(
                f"{spec.name}: {constraint.argument!r} gives {got}, expected {constraint.text}"
            )


def _check_scalar(op: str, argument: ScalarSpec, value: Any) -> None:
    if value is None and argument.optional:
        return
    if argument.kind == "choice":
        if not any(value is c or (type(value) is type(c) and value == c) for c in argument.choices):
            expected = " or ".join(repr(choice) for choice in argument.choices)
            raise ArgumentError(f"{op}: {argument.name!r} is {value!r}, expected {expected}")
        return
    if argument.kind == "bool":
        legal = isinstance(value, bool)
    elif argument.kind == "int":
        legal = isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    else:
        legal = isinstance(value, (int, float, torch.SymFloat)) and not isinstance(value, bool)
    if not legal:
        kind = {"float": "a float", "int": "an int", "bool": "a bool"}[argument.kind]
        raise ArgumentError(
            f"{op}: {argument.name!r} is {type(value).__name__}, expected {kind}"
            + (" or None" if argument.optional else "")
        )


def _hint(described: TensorSpec | Axis) -> str:
    return f"; {described.hint}" if described.hint else ""


# ---- outputs and workspace ----------------------------------------------------------------------


def allocate(
    outputs: Sequence[TensorSpec], axes: Mapping[str, int], device: torch.device
) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.empty(
            [axes[name] for name in out.shape], dtype=torch_dtype(out.dtypes[0]), device=device
        )
        for out in outputs
    )


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
        _check_tensor(spec, output, output.shape, tensor)
        if tensor.device != device:
            raise ArgumentError(
                f"{spec.name}: out {output.name!r} is on {tensor.device}, expected {device}"
            )
        _check_shape(spec, output, output.shape, tensor, axes)
        _check_strides(spec, output, output.shape, tensor)
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


def input_device(inputs: Any, spec: OpSpec) -> torch.device:
    """The device of the first tensor argument; `check_inputs` made sure that all agree."""
    for argument in spec.tensors:
        value = getattr(inputs, argument.name)
        if value is not None:
            device = value.device
            assert isinstance(device, torch.device)
            return device
    raise AssertionError("an operator without tensor arguments")


def problem_key(
    spec: OpSpec,
    axes: Mapping[str, int],
    device: torch.device,
    mode: str | None = None,
    traits: tuple[str, ...] = (),
) -> ProblemKey:
    return make_key(spec, axes, device_info(device), mode, traits)
