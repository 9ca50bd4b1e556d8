"""torch.library operators, generated from the specs, for torch.compile and torch.export.

Each operator has a functional form `fastkernels::<op>` and `fastkernels::<op>_out`, which fills
given outputs; one that can overwrite an argument has `fastkernels::<op>_update`, too. The public
functions call them under a compiler only, so a direct call does not pay for the dispatcher. Route
selection happens inside the opaque operator, at run time, on concrete sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from fastkernels.core.outputs import WORKSPACE_ALIGNMENT
from fastkernels.core.problem import gradient_refusal, torch_dtype
from fastkernels.core.route import Operator
from fastkernels.core.spec import ArgumentSpec, OpSpec, ScalarSpec, TensorSpec
from fastkernels.errors import ArgumentError

NAMESPACE = "fastkernels"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_SCALAR_TYPES = {"float": "float", "int": "SymInt", "bool": "bool", "choice": "str"}


class _Size(NamedTuple):
    """A size: axis `dim` of tensor `argument`, or the number `argument` itself, plus `add`."""

    argument: str
    dim: int | None
    add: int


class _Plan(NamedTuple):
    """What `call` and the fake kernels need, as plain tuples that a tracer reads through."""

    arguments: tuple[str, ...]  # every argument, in the order of the schema
    functional: tuple[str, ...]  # those of the functional form
    choices: tuple[tuple[str, tuple[tuple[Any, str], ...]], ...]  # argument, (value, its text)
    update_options: tuple[str, ...]
    outputs: tuple[tuple[tuple[_Size, ...], torch.dtype], ...]
    first: str  # a tensor argument that is always given


_PLANS: dict[str, _Plan] = {}


def register(operator: Operator) -> None:
    """Define the operator's forms with their CPU/GPU implementation and fake kernels."""
    spec = operator.spec
    arguments = (*spec.inputs, *spec.options)
    functional = tuple(a for a in arguments if a.name not in spec.update_options)
    plan = _Plan(
        arguments=tuple(a.name for a in arguments),
        functional=tuple(a.name for a in functional),
        choices=tuple(
            (a.name, tuple((choice, str(choice)) for choice in a.choices))
            for a in arguments
            if isinstance(a, ScalarSpec) and a.kind == "choice"
        ),
        update_options=spec.update_options,
        outputs=tuple(
            (tuple(_size(spec, axis) for axis in out.shape), torch_dtype(out.dtypes[0]))
            for out in spec.outputs
        ),
        first=next(t.name for t in spec.tensors if not t.optional),
    )
    _PLANS[spec.name] = plan
    results = ", ".join("Tensor" for _ in spec.outputs)
    _define(
        spec.name,
        f"({_schema(functional)}) -> {results if len(spec.outputs) == 1 else f'({results})'}",
        _functional(operator, plan),
        lambda *values: _fake(plan, dict(zip(plan.functional, values, strict=True))),
    )
    filled = ", ".join(f"Tensor(o{i}!) out_{out.name}" for i, out in enumerate(spec.outputs))
    _define(
        f"{spec.name}_out",
        f"({_schema(functional)}, {filled}, Tensor(w!)? workspace) -> ()",
        _filling(operator, plan, plan.functional, len(spec.outputs)),
        lambda *values: None,
    )
    if spec.updated:
        _define(
            f"{spec.name}_update",
            f"({_schema(arguments, spec.updated)}, Tensor(o0!) out_{spec.outputs[0].name}, "
            "Tensor(w!)? workspace) -> ()",
            _filling(operator, plan, plan.arguments, 1),
            lambda *values: None,
        )


def is_traced(inputs: Any) -> bool:
    """Whether an argument stands for a tensor without memory (FakeTensor): a kernel would follow a
    null pointer, so such a call goes through the registered operator and its fake."""
    return any(isinstance(value, FakeTensor) for value in inputs)


def call(
    spec: OpSpec,
    inputs: Any,
    out: Any,
    workspace: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """The public call under a compiler: pick the form, allocate outputs where it wants them given.

    Returns what the direct call returns, always as a tuple.
    """
    plan = _PLANS[spec.name]
    if torch.is_grad_enabled():
        for name in plan.arguments:
            value = getattr(inputs, name)
            if isinstance(value, torch.Tensor) and value.requires_grad:
                raise ArgumentError(gradient_refusal(spec.name, name))
    values = encoded(plan, inputs._asdict())
    updates = any(
        values[name] is not None and values[name] is not False for name in plan.update_options
    )
    if updates:
        output = _empty_outputs(plan, values)[0] if out is None else out
        operation = getattr(torch.ops.fastkernels, spec.name + "_update")
        operation(*[values[name] for name in plan.arguments], output, workspace)
        return output, values[spec.updated]
    given = [values[name] for name in plan.functional]
    if out is None and workspace is None:
        result = getattr(torch.ops.fastkernels, spec.name)(*given)
        return result if isinstance(result, tuple) else (result,)
    if out is None:
        outputs = _empty_outputs(plan, values)
    else:
        outputs = (out,) if isinstance(out, torch.Tensor) else tuple(out)
        if len(outputs) != len(plan.outputs):
            raise ArgumentError(
                f"{spec.name}: 'out' is {len(outputs)} entries, expected {len(plan.outputs)}"
            )
    getattr(torch.ops.fastkernels, spec.name + "_out")(*given, *outputs, workspace)
    return outputs


def _define(
    name: str, schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)


def _functional(operator: Operator, plan: _Plan) -> Callable[..., Any]:
    def implementation(*values: Any) -> Any:
        return operator.function(**_named(operator.spec, plan.functional, values))

    return implementation


def _filling(
    operator: Operator, plan: _Plan, names: tuple[str, ...], num_outputs: int
) -> Callable[..., None]:
    def implementation(*values: Any) -> None:
        *given, workspace = values
        given, outputs = given[: len(names)], given[len(names) :]
        # AOTAutograd hands over a copy of what is mutated, and torch aligns CPU memory to 64 bytes.
        if workspace is not None and workspace.data_ptr() % WORKSPACE_ALIGNMENT:
            workspace = None
        out = outputs[0] if num_outputs == 1 else tuple(outputs)
        named = _named(operator.spec, names, given)
        operator.function(**named, out=out, workspace=workspace)

    return implementation


def _named(spec: OpSpec, names: tuple[str, ...], values: Sequence[Any]) -> dict[str, Any]:
    named = dict(zip(names, values, strict=True))
    for name, texts in _PLANS[spec.name].choices:
        if name in named:
            named[name] = {text: choice for choice, text in texts}.get(named[name], named[name])
    return named


def encoded(plan: _Plan, values: dict[str, Any]) -> dict[str, Any]:
    """The arguments as the schema has them: a choice as its text."""
    for name, texts in plan.choices:
        value = values[name]
        for choice, text in texts:
            if value == choice:
                values[name] = text
    return values


def _fake(plan: _Plan, values: dict[str, Any]) -> Any:
    outputs = _empty_outputs(plan, values)
    return outputs if len(outputs) > 1 else outputs[0]


def _empty_outputs(plan: _Plan, values: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    device = values[plan.first].device
    outputs = []
    for sizes, dtype in plan.outputs:
        shape = []
        for argument, dim, add in sizes:
            value: Any = values[argument] if argument else 0
            shape.append((value if dim is None else value.shape[dim]) + add)
        outputs.append(torch.empty(shape, dtype=dtype, device=device))
    return tuple(outputs)


def _size(spec: OpSpec, axis: str) -> _Size:
    """Where an output's axis can be read off: a number argument, a tensor's axis, a derived axis
    that follows from it by an offset, else the definition's constant."""
    if any(a.name == axis for a in (*spec.inputs, *spec.options) if not isinstance(a, TensorSpec)):
        return _Size(axis, None, 0)
    for tensor in spec.tensors:
        if not tensor.optional and axis in tensor.shape:
            return _Size(tensor.name, tensor.shape.index(axis), 0)
    for other in spec.axes:
        derived = other.derived
        if derived and derived.axis == axis and derived.mul == derived.div == 1:
            found = _size(spec, other.name)
            return found._replace(add=found.add - derived.add)
    constant = spec.axis[axis].value
    assert constant is not None, f"{spec.name}: nothing gives the size of {axis}"
    return _Size("", None, constant)


def _schema(arguments: tuple[ArgumentSpec, ...], updated: str = "") -> str:
    parts = []
    for argument in arguments:
        if isinstance(argument, TensorSpec):
            kind = "Tensor(u!)" if argument.name == updated else "Tensor"
        else:
            kind = _SCALAR_TYPES[argument.kind]
        parts.append(f"{kind}{'?' if argument.optional else ''} {argument.name}")
    return ", ".join(parts)
