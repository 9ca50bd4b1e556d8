"""What an operator takes and gives, as data: axes, tensors, dtypes, constraints, tolerances.

A spec is the twin of the contest definition (same names, same order) plus what we accept beyond it.
It imports no torch: dtypes are torch's names as strings (`"bfloat16"`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Derived:
    """An axis that follows from another: `axis * mul // div + add`."""

    axis: str
    mul: int = 1
    div: int = 1
    add: int = 0

    def value(self, axes: Mapping[str, int]) -> int:
        return axes[self.axis] * self.mul // self.div + self.add

    def base(self, size: int) -> int | None:
        """The size of `axis` that gives `size`; None where several do."""
        return max(size - self.add, 0) if self.mul == self.div else None


@dataclass(frozen=True)
class Axis:
    """A named size.

    `value` is the definition's constant, None for a variable axis. A constant axis takes other
    values only if `is_open`; `at_least`, `at_most` and `multiple_of` bound what is accepted.
    Derived axes are checked, but are no part of a problem key or a table. `hint` ends the error
    message about a size that is not accepted.
    """

    name: str
    doc: str = ""
    value: int | None = None
    is_open: bool = False
    at_least: int = 0
    at_most: int | None = None
    multiple_of: int = 1
    derived: Derived | None = None
    hint: str = ""

    @property
    def is_variable(self) -> bool:
        return self.value is None and self.derived is None

    def accepted(self) -> str:
        """What this axis accepts, for error messages and documentation."""
        if self.value is not None and not self.is_open:
            return str(self.value)
        text = f">= {self.at_least}"
        if self.at_most is not None:
            text = f"{self.at_least}..{self.at_most}"
        return text + (f", a multiple of {self.multiple_of}" if self.multiple_of > 1 else "")

    def accepts(self, size: int) -> bool:
        if self.value is not None and not self.is_open:
            return size == self.value
        return (
            size >= self.at_least
            and (self.at_most is None or size <= self.at_most)
            and size % self.multiple_of == 0
        )


@dataclass(frozen=True)
class TensorSpec:
    """A tensor argument or output.

    `shape` names axes. `dtypes` are all accepted ones, the definition's first. The last `dense`
    axes must be contiguous among themselves; strides of the others are free. `hint` ends the error
    message about a wrong dtype or rank.
    """

    name: str
    shape: tuple[str, ...]
    dtypes: tuple[str, ...]
    optional: bool = False
    dense: int = 1
    doc: str = ""
    hint: str = ""


@dataclass(frozen=True)
class ScalarSpec:
    """A number, flag or word: `kind` is `float`, `int`, `bool` or `choice` (of `choices`)."""

    name: str
    kind: str
    optional: bool = False
    default: Any = None
    doc: str = ""
    choices: tuple[int | str, ...] = ()


ArgumentSpec = TensorSpec | ScalarSpec


@dataclass(frozen=True)
class Constraint:
    """A relation between axes; `text` is what the user reads, `argument` is the one to blame."""

    argument: str
    text: str
    holds: Callable[[Mapping[str, int]], bool] = field(compare=False)


@dataclass(frozen=True)
class Tolerance:
    """Ours: `metric` of `output` at most `limit` per row. Official: each element fails only if it
    exceeds both `official_abs` and `official_rel`; at least `official_share` must not fail."""

    output: str
    metric: str
    limit: float
    official_abs: float = 1e-2
    official_rel: float = 1e-2
    official_share: float = 1.0


@dataclass(frozen=True)
class OpSpec:
    """One operator. `inputs` are positional in the definition's order; `options` are keyword-only.

    `modes` are the forms of a call that tables distinguish. `updated` names the argument that a
    call overwrites if one of `update_options` is given. `revision` counts changes of meaning that
    no other field shows.
    """

    name: str
    definition: str
    axes: tuple[Axis, ...]
    inputs: tuple[ArgumentSpec, ...]
    outputs: tuple[TensorSpec, ...]
    options: tuple[ArgumentSpec, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    tolerances: tuple[Tolerance, ...] = ()
    modes: tuple[str, ...] = ("default",)
    updated: str = ""
    update_options: tuple[str, ...] = ()
    revision: int = 1

    @cached_property
    def axis(self) -> dict[str, Axis]:
        return {axis.name: axis for axis in self.axes}

    @cached_property
    def key_axes(self) -> tuple[Axis, ...]:
        """Axes that identify a problem: all that can differ on their own between two calls."""
        return tuple(a for a in self.axes if a.derived is None and (a.is_variable or a.is_open))

    @cached_property
    def variable_axes(self) -> tuple[str, ...]:
        """The key axes without a value in the definition."""
        return tuple(axis.name for axis in self.axes if axis.is_variable)

    @cached_property
    def constants(self) -> dict[str, int]:
        """The definition's value of every constant axis that is open to others."""
        return {axis.name: axis.value for axis in self.key_axes if axis.value is not None}

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Every tensor argument, in order, options last."""
        return tuple(a for a in (*self.inputs, *self.options) if isinstance(a, TensorSpec))

    @cached_property
    def digest(self) -> str:
        """Identity of everything that gives a table its meaning; documentation is left out."""
        data = asdict(self)
        for group in ("axes", "inputs", "outputs", "options", "constraints"):
            for entry in data[group]:
                for prose in ("doc", "hint", "holds"):
                    entry.pop(prose, None)
        text = json.dumps(data, sort_keys=True, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
