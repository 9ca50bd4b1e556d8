"""What a search may try: the legal configs of a route, and what identifies one of them.

A knob takes the values of `Route.candidates` and its default; a knob without candidates keeps its
default. A route of torch operations that names no candidates at all has its counts varied around
their defaults. Which combinations are legal only the route knows: its config refuses the others,
and `Route.declines` those that do not serve a problem.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib.util
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from fastkernels import catalog
from fastkernels.core import dispatch
from fastkernels.core.kernels import Kernel, knobs
from fastkernels.core.problem import ProblemKey
from fastkernels.core.route import Route
from fastkernels_tuner.errors import TunerError
from fastkernels_tuner.model import Candidate, Knob, Workload, canonical, digest

LADDER = (-2, -1, 0, 1, 2)
"""Powers of two by which a count of a torch route without candidates is scaled."""


class SpaceError(TunerError):
    """An unknown route, or candidates for a knob that its config does not have."""


@dataclass(frozen=True)
class Space:
    """The values of every knob of a route, in the order of its config; one value: not searched."""

    op: str
    route: str
    values: dict[str, tuple[Knob, ...]]

    @property
    def definition(self) -> Route:
        return find_route(self.op, self.route)

    @property
    def default(self) -> dict[str, Knob]:
        return knobs(self.definition.default_config)

    @property
    def searched(self) -> tuple[str, ...]:
        """The knobs with more than one value."""
        return tuple(name for name, values in self.values.items() if len(values) > 1)

    @property
    def size(self) -> int:
        """How many configs are legal."""
        return sum(1 for _ in configs(self))

    @property
    def digest(self) -> str:
        """Identity of the values; a widened space is another one."""
        return digest(canonical(dataclasses.asdict(self)))

    def refuses(self, config: Mapping[str, Any]) -> str | None:
        """Why a config is not of this space, if so."""
        try:
            self.definition.make_config(config)
        except ValueError as error:
            return str(error)
        for name, values in self.values.items():
            if config[name] not in values:
                expected = ", ".join(map(str, values))
                return f"knob {name!r} is {config[name]!r}, expected one of {expected}"
        return None

    def declines(self, config: Mapping[str, Any], keys: Sequence[ProblemKey]) -> str | None:
        """Why a legal config does not serve every one of these problems, if so."""
        route = self.definition
        made = route.make_config(config)
        for key in keys:
            decline = route.unsuited(key, made)
            if decline is not None:
                return decline.reason
        # What `Route.declines` asks besides; that it depends on the device alone saves time.
        devices = dict.fromkeys(key.device for key in keys)
        missing = (route.available(device, made) for device in devices)
        return next((decline.reason for decline in missing if decline), None)


def find_route(op: str, route: str | Route) -> Route:
    if isinstance(route, Route):
        return route
    operator = catalog.operator(op)
    found = operator.route(route)
    if found is None:
        known = ", ".join(each.name for each in operator.routes)
        raise SpaceError(f"{op} has no route {route!r}, expected one of {known}")
    return found


def space_of(route: Route, op: str) -> Space:
    """Raises SpaceError where `Route.candidates` names a knob that the config does not have."""
    default = knobs(route.default_config)
    unknown = sorted(set(route.candidates) - set(default))
    if unknown:
        raise SpaceError(f"{op}: route {route.name!r} has candidates for {unknown[0]!r}, no knob")
    values: dict[str, tuple[Knob, ...]] = {}
    for name, value in default.items():
        if route.candidates:
            tried = (*route.candidates.get(name, ()), value)
        elif route.language == "torch":
            tried = _ladder(route, name, value)
        else:
            tried = (value,)
        values[name] = tuple(dict.fromkeys(tried))
    return Space(op, route.name, values)


def _ladder(route: Route, name: str, value: Knob) -> tuple[Knob, ...]:
    """A positive integer scaled by powers of two, where that is whole and legal on its own."""
    if type(value) is not int or value < 1:
        return (value,)
    scaled = (value * 2**power for power in LADDER)
    steps = [int(step) for step in scaled if step == int(step)]
    return tuple(
        step for step in steps if _is_legal(route, knobs(route.default_config) | {name: step})
    )


def _is_legal(route: Route, config: Mapping[str, Any]) -> bool:
    try:
        route.make_config(config)
    except ValueError:
        return False
    return True


def configs(space: Space) -> Iterator[dict[str, Knob]]:
    """Every legal config once, with all its knobs: the default, then by the order of the values."""
    route, default = space.definition, space.default
    yield default
    for values in itertools.product(*space.values.values()):
        config = dict(zip(space.values, values, strict=True))
        if config != default and _is_legal(route, config):
            yield config


def problem_keys(workloads: Sequence[Workload], device: str) -> list[ProblemKey]:
    """What the routes are asked about: each distinct problem of the workloads on a device."""
    keys: dict[ProblemKey, None] = {}
    for workload in workloads:
        case = workload.build()
        operator = catalog.operator(workload.op)
        keys[dispatch.key_for(operator, device, case.mode, case.axes)] = None
    return list(keys)


# ---- identity -----------------------------------------------------------------------------------


def candidate(op: str, route: str | Route, config: Mapping[str, Any]) -> Candidate:
    """The candidate with this config. Raises ValueError on a missing, unknown or illegal knob."""
    found = find_route(op, route)
    made = found.make_config(config)
    return Candidate(op=op, route=found.name, config=knobs(made), source=source_digest(op, found))


def ordered(candidate: Candidate) -> Candidate:
    """With its knobs in the order of the route's config, as tables have them: in a ledger they are
    sorted by name. As it is where there is no such route or config any more."""
    try:
        made = find_route(candidate.op, candidate.route).make_config(candidate.config)
    except (SpaceError, ValueError):
        return candidate
    return candidate.model_copy(update={"config": knobs(made)})


def source_digest(op: str, route: str | Route) -> str:
    """Identity of what a route is made from, by content.

    Of a compiled route these are the kernel's sources; of one in torch its module and what that
    imports, at any remove, from operators and what they share.
    """
    found = find_route(op, route)
    kernel = _kernel(op, found)
    if kernel is not None:
        return kernel.digest()
    total = hashlib.sha256()
    for name, path in sorted(_module_files(found.launch.__module__).items()):
        total.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def _kernel(op: str, route: Route) -> Kernel | None:
    if route.language == "torch" or _spec(f"fastkernels.ops.{op}.kernels") is None:
        return None
    kernels: tuple[Kernel, ...] = catalog.module(op, "kernels").KERNELS
    return next((kernel for kernel in kernels if kernel.name == route.name), None)


def _module_files(module: str) -> dict[str, Path]:
    found: dict[str, Path] = {}
    open_modules = [module]
    while open_modules:
        name = open_modules.pop()
        if name in found:
            continue
        spec = _spec(name)
        if spec is None or spec.origin is None:
            if name == module:
                raise SpaceError(f"module {module!r} has no file to tell its sources by")
            continue
        found[name] = Path(spec.origin)
        imported = _imports(found[name].read_bytes(), spec.parent or "")
        open_modules += [each for each in imported if each.startswith("fastkernels.ops.")]
    return found


@lru_cache(maxsize=256)  # by content: a campaign asks for every candidate that it writes down
def _imports(text: bytes, package: str) -> tuple[str, ...]:
    """Names that a module imports; of `from a import b` both a and a.b, which may be a module."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return tuple(found)


def _spec(name: str) -> ModuleSpec | None:
    if name in sys.modules:
        return sys.modules[name].__spec__
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:  # a name in a module that is no package, or an unknown operator
        return None
