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
    device_index: int = 0

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


_MAX_FLOAT = int(torch.finfo(torch.float64).max)


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
    device_index: int = 0,
) -> ProblemKey:
    return ProblemKey(
        spec.name,
        device,
        spec.modes[0] if mode is None else mode,
        tuple((axis.name, axes[axis.name]) for axis in spec.key_axes),
        traits,
        device_index,
    )


def key_from_axes(
    spec: OpSpec,
    axes: Mapping[str, int],
    device: DeviceInfo,
    mode: str | None = None,
    traits: tuple[str, ...] = (),
    device_index: int = 0,
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
        names = ", ".join(repr(name) for name in missing)
        raise ArgumentError(f"{spec.name}: axis {names} is missing, expected an integer each")
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
    return make_key(spec, sizes, device, mode, traits, device_index)


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
        check_tensor(spec, argument, shape, value)
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
        check_shape(spec, argument, shape, value, axes)
        check_strides(spec, argument, shape, value)
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


def gradient_refusal(op: str, name: str) -> str:
    return (
        f"{op}: {name!r} requires grad, expected no gradient: fastkernels is inference only; call "
        "it under torch.inference_mode() or torch.no_grad()"
    )


def check_scalars(spec: OpSpec, inputs: Any) -> None:
    """The types of every argument that is no tensor."""
    for argument in (*spec.inputs, *spec.options):
        if isinstance(argument, ScalarSpec):
            _check_scalar(spec.name, argument, getattr(inputs, argument.name))


def check_tensor(spec: OpSpec, argument: TensorSpec, shape: tuple[str, ...], value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        got = "None" if value is None else f"a {type(value).__name__}"
        raise ArgumentError(f"{spec.name}: {argument.name!r} is {got}, expected a tensor")
    if value.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(gradient_refusal(spec.name, argument.name))
    if value.dtype not in _dtypes(argument.dtypes):
        raise ArgumentError(
            f"{spec.name}: {argument.name!r} is {dtype_name(value.dtype)}, "
            f"expected {' or '.join(argument.dtypes)}" + _hint(argument)
        )
    if value.layout != torch.strided:
        raise ArgumentError(
            f"{spec.name}: {argument.name!r} has layout {value.layout}, expected torch.strided"
        )
    if value.is_neg():
        raise ArgumentError(
            f"{spec.name}: {argument.name!r} is a lazy negation, expected its values; call "
            "resolve_neg()"
        )
    if value.dim() != len(shape):
        raise ArgumentError(
            f"{spec.name}: {argument.name!r} has shape {tuple(value.shape)}, expected "
            f"{len(shape)} axes ({', '.join(shape)})" + _hint(argument)
        )


def check_strides(
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


def check_shape(
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
    if legal and argument.kind == "float" and isinstance(value, int) and abs(value) > _MAX_FLOAT:
        raise ArgumentError(f"{op}: {argument.name!r} is beyond float64, expected a float")
    if not legal:
        kind = {"float": "a float", "int": "an int", "bool": "a bool"}[argument.kind]
        raise ArgumentError(
            f"{op}: {argument.name!r} is {type(value).__name__}, expected {kind}"
            + (" or None" if argument.optional else "")
        )


def _hint(described: TensorSpec | Axis) -> str:
    return f"; {described.hint}" if described.hint else ""


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
    index = 0 if device.index is None else device.index
    return make_key(spec, axes, device_info(device), mode, traits, index)
