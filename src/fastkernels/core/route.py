"""A route: one way to compute an operator, and what it can serve. An operator: spec plus routes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fastkernels.core import archs
from fastkernels.core.device import DeviceInfo
from fastkernels.core.problem import ProblemKey
from fastkernels.core.spec import OpSpec
from fastkernels.core.table import Interval

ANY_DEVICE: tuple[str, ...] = ("any",)


class Decline(NamedTuple):
    """Why a route does not serve a problem: one sentence for the user."""

    reason: str


def require_positive(config: Any) -> None:
    """For `__post_init__` of a config whose integers count something. Raises ValueError."""
    for knob in dataclasses.fields(config):
        value = getattr(config, knob.name)
        if type(value) is int and value < 1:
            raise ValueError(f"knob {knob.name!r} is {value}, expected at least 1")


def _no_objection(key: ProblemKey, device: DeviceInfo, config: Any) -> Decline | None:
    return None


def _always_available(device: DeviceInfo, config: Any) -> Decline | None:
    return None


def no_workspace(axes: Mapping[str, int], config: Any) -> int:
    return 0


class ShortWay(NamedTuple):
    """The library's entry for problems that it remembers the kernels of; the same for every route.

    `call(...)` launches and gives True, or gives False where it does not remember the sizes or the
    arguments are not plainly legal; it raises LaunchFailed where the launch fails, anything else
    over arguments of the wrong kind. `forget()` forgets all problems of the operator.
    """

    call: Callable[..., bool]
    forget: Callable[[], None]


@dataclass(frozen=True)
class Route:
    """One implementation of an operator.

    `default_config` is an instance of a frozen dataclass; its fields are the knobs, spelled as in
    tables and kernels. `candidates` lists the values a tuner may try for each knob.
    `supports(key, device, config)` gives a Decline where the route cannot serve a problem of its
    architectures; upper limits of variable axes go into `max_axes` instead, so that a workspace
    bound stays monotone. `launch(inputs, outputs, workspace, config)` fills `outputs`.
    `available(device, config)` gives a Decline where this installation lacks what the route needs.
    `prepare(key, config)` loads or compiles what a launch needs; a route that has one cannot be
    first seen inside a graph capture. `remember(key, config, ranges)` makes the library serve
    problems of this key by itself, without further ado, also those whose axes differ within
    `ranges`, and gives the way there. `workspace_bytes(axes,
    config)` must not decrease in any variable axis.
    """

    name: str
    language: str
    archs: tuple[str, ...]
    default_config: Any
    launch: Callable[[Any, tuple[torch.Tensor, ...], torch.Tensor | None, Any], None]
    candidates: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    supports: Callable[[ProblemKey, DeviceInfo, Any], Decline | None] = _no_objection
    max_axes: Mapping[str, int] = field(default_factory=dict)
    workspace_bytes: Callable[[Mapping[str, int], Any], int] = no_workspace
    available: Callable[[DeviceInfo, Any], Decline | None] = _always_available
    prepare: Callable[[ProblemKey, Any], None] | None = None
    remember: Callable[[ProblemKey, Any, Mapping[str, Interval]], ShortWay] | None = None

    def declines(self, key: ProblemKey, config: Any) -> Decline | None:
        """Why this installation does not serve `key` with this route and `config`, if so."""
        return self.unsuited(key, config) or self.available(key.device, config)

    def unsuited(self, key: ProblemKey, config: Any) -> Decline | None:
        """Why no installation serves `key` with this route and `config`, if so."""
        if not self.is_for(key.device):
            return Decline(f"needs {' or '.join(self.archs)}, this device is {_name(key.device)}")
        for name, limit in self.max_axes.items():
            if key.axis(name) > limit:
                return Decline(f"serves {name} <= {limit}, got {key.axis(name)}")
        return self.supports(key, key.device, config)

    def make_config(self, knobs: Mapping[str, Any] | None) -> Any:
        """The config that a table names, the default where it names none.

        Raises ValueError on a missing, unknown or illegal knob.
        """
        if knobs is None:
            return self.default_config
        fields = {f.name: f for f in dataclasses.fields(self.default_config)}
        unknown = sorted(set(knobs) - set(fields), key=str)
        if unknown:
            raise ValueError(f"route {self.name!r} has no knob {unknown[0]!r}")
        for name in fields:
            if name not in knobs:
                raise ValueError(f"route {self.name!r} needs a value for knob {name!r}")
            expected = type(getattr(self.default_config, name))
            if type(knobs[name]) is not expected:
                raise ValueError(
                    f"knob {name!r} of route {self.name!r} is {knobs[name]!r}, "
                    f"expected {expected.__name__}"
                )
        return type(self.default_config)(**knobs)

    def workspace_bound(self, key: ProblemKey, config: Any) -> int:
        """Scratch bytes for `key` and smaller ones; sizes beyond `max_axes` count as the largest.

        `supports` is not asked: a size that it declines may lie above one that it takes.
        """
        if not self.is_for(key.device):
            return 0
        axes = {n: min(size, self.max_axes.get(n, size)) for n, size in key.axes}
        return self.workspace_bytes(axes, config)

    def is_for(self, device: DeviceInfo) -> bool:
        return self.archs == ANY_DEVICE or device.arch in self.archs


def _name(device: DeviceInfo) -> str:
    if device.is_gpu and device.arch not in archs.ARCHS:
        known = ", ".join(archs.ARCHS)
        return f"{device.arch} ({device.product}; kernels are built for {known})"
    return device.arch


@dataclass(frozen=True)
class Operator:
    """What the catalog lists: spec, routes with the safe one last, public function."""

    spec: OpSpec
    routes: tuple[Route, ...]
    function: Callable[..., Any]

    def __post_init__(self) -> None:
        assert len({route.name for route in self.routes}) == len(self.routes)
        assert self.safe_route.archs == ANY_DEVICE

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def safe_route(self) -> Route:
        return self.routes[-1]

    def route(self, name: str) -> Route | None:
        return next((route for route in self.routes if route.name == name), None)
