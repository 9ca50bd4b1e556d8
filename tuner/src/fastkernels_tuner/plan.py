"""What a campaign sets out to do: workloads, regimes, routes, and what is to be beaten."""

from __future__ import annotations

import dataclasses
import importlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fastkernels import catalog
from fastkernels.core import dispatch
from fastkernels.core.device import DeviceInfo, named_device
from fastkernels.core.problem import ProblemKey, key_from_axes
from fastkernels.core.route import Operator, Route
from fastkernels.errors import ArgumentError
from fastkernels.ops._shared.cases import Case
from fastkernels_tuner.errors import SourceError
from fastkernels_tuner.model import CampaignSpec, Candidate, Environment, Policy, Regime, Workload
from fastkernels_tuner.model import digest as sha256
from fastkernels_tuner.space import candidate

Constants = tuple[tuple[str, int], ...]
Group = tuple[str, Constants]


def operator_of(name: str) -> Operator:
    try:
        return catalog.operator(name)
    except ArgumentError as error:
        raise SourceError(str(error)) from None


def make(
    op: str,
    device: str,
    policy: Policy,
    environment: Environment,
    *,
    routes: Sequence[str] = (),
    seed: int = 0,
) -> CampaignSpec:
    """The spec of a campaign. Raises SourceError over an unknown operator or route, or where no
    route has anything to search or measure on this device."""
    operator = operator_of(op)
    info = named_device(device)
    workloads = tuple(to_search(operator, info, policy))
    found = routes_of(operator, info, workloads, routes)
    return CampaignSpec(
        op=op,
        device=device,
        environment=environment,
        policy=policy,
        routes=tuple(route.name for route in found),
        regimes=tuple(regimes_of(operator, workloads, policy)),
        workloads=workloads,
        champion=champion(operator, info),
        seed=seed,
    )


def routes_of(
    operator: Operator, info: DeviceInfo, workloads: Sequence[Workload], wanted: Sequence[str]
) -> list[Route]:
    """Those that serve some workload on this device; all of `wanted` must."""
    for name in wanted:
        if operator.route(name) is None:
            known = ", ".join(route.name for route in operator.routes)
            raise SourceError(f"{operator.name}: no route {name!r}, expected one of {known}")
    keys = [key_of(operator, workload, info) for workload in workloads]
    found, reasons = [], []
    for route in operator.routes:
        if wanted and route.name not in wanted:
            continue
        declines = [route.declines(key, route.default_config) for key in keys]
        if all(declines):
            reason = next(decline.reason for decline in declines if decline is not None)
            reasons.append(f"{route.name}: {reason}")
        else:
            found.append(route)
    if not found or (wanted and reasons):
        head = f"{operator.name}: routes that serve nothing here:"
        raise SourceError("\n  ".join([head, *reasons]))
    # On a GPU the torch route is no rival of compiled ones: it is measured where nothing else is.
    compiled = [route for route in found if route.language != "torch"]
    return compiled if compiled and info.is_gpu and not wanted else found


# ---- workloads ----------------------------------------------------------------------------------


def to_search(operator: Operator, info: DeviceInfo, policy: Policy) -> Iterator[Workload]:
    """One workload for each mode and choice of sizes: what is measured, while every draw of the
    lists is judged before a promotion. Where the policy wants few: the smallest ones, of the
    definition's constants alone, since a table's limits are those of all its groups."""
    chosen: dict[Group, list[Workload]] = defaultdict(list)
    seen = set()
    for listed, case in _rows(operator, info):
        identity = (case.mode, tuple(sorted(case.axes.items())))
        if identity in seen:
            continue
        seen.add(identity)
        try:
            key = key_from_axes(operator.spec, case.axes, info, case.mode)
        except ArgumentError as error:
            raise SourceError(f"workload {listed}:{case.name}: {error}") from None
        if any(route.declines(key, route.default_config) is None for route in operator.routes):
            group = group_of(operator, key)
            chosen[group].append(Workload.of(operator.name, listed, case))
    is_short = any(len(found) > policy.max_workloads for found in chosen.values())
    for mode, constants in sorted(chosen):
        if not (is_short and constants):
            found = chosen[mode, constants]
            ordered = sorted(found, key=lambda w: _size(operator, w.build()))
            yield from ordered[: policy.max_workloads]


def _rows(operator: Operator, info: DeviceInfo) -> Iterator[tuple[str, Case]]:
    own = _measured_rows(operator.name) if info.is_gpu else None
    if own is not None:
        yield from own(operator.spec.modes)
        return
    for listed in ("contest", "serving"):
        for mode in operator.spec.modes:
            for case in _listed(operator.name, listed):
                yield listed, _in_mode(case, mode)


def _measured_rows(op: str) -> Any:
    """`sweep_rows` of an operator that says which problems its tables are made from."""
    try:
        module = importlib.import_module(f"fastkernels.testing.workloads.{op}")
    except ModuleNotFoundError:
        return None
    return getattr(module, "sweep_rows", None)


def to_promote(operator: Operator, info: DeviceInfo, table: Any) -> Iterator[Workload]:
    """Every workload that has to be right before a table is promoted: the contest and serving lists
    in every mode, and what lies around the boundaries of the table."""
    inputs = catalog.module(operator.name, "inputs")
    gap = inputs.gap_cases(table)
    for listed, cases in (
        ("contest", _listed(operator.name, "contest")),
        ("serving", _listed(operator.name, "serving")),
        ("gap", gap),
    ):
        for mode in operator.spec.modes:
            for case in cases:
                yield Workload.of(operator.name, listed, _in_mode(case, mode))


def _listed(op: str, listed: str) -> tuple[Case, ...]:
    found: tuple[Case, ...] = getattr(catalog.module(op, "inputs"), listed.upper())
    return found


def _in_mode(case: Case, mode: str) -> Case:
    changed: Case = dataclasses.replace(case, mode=mode)  # type: ignore[type-var]
    return changed


def _size(operator: Operator, case: Case) -> tuple[int, ...]:
    axes = [case.axes[name] for name in operator.spec.variable_axes]
    product = 1
    for size in axes:
        product *= max(size, 1)
    return product, *axes


# ---- regimes ------------------------------------------------------------------------------------


def key_of(operator: Operator, workload: Workload, info: DeviceInfo) -> ProblemKey:
    case = workload.build()
    return key_from_axes(operator.spec, case.axes, info, case.mode)


def group_of(operator: Operator, key: ProblemKey) -> Group:
    """The mode, and constants that differ from the definition's."""
    sizes = dict(key.axes)
    constants = operator.spec.constants.items()
    return key.mode, tuple((n, sizes[n]) for n, value in constants if sizes[n] != value)


def regimes_of(
    operator: Operator, workloads: Iterable[Workload], policy: Policy
) -> Iterator[Regime]:
    """Per mode and constants up to `policy.buckets` groups of neighbouring sizes."""
    groups: dict[Group, list[Case]] = defaultdict(list)
    info = named_device("cpu")  # only sizes matter here
    for workload in workloads:
        groups[group_of(operator, key_of(operator, workload, info))].append(workload.build())
    for mode, constants in sorted(groups):
        cases = sorted(groups[mode, constants], key=lambda case: _size(operator, case))
        count = min(policy.buckets, len(cases))
        for i in range(count):
            part = cases[len(cases) * i // count : len(cases) * (i + 1) // count]
            yield Regime(
                op=operator.name,
                mode=mode,
                constants=dict(constants),
                bounds={
                    name: (min(c.axes[name] for c in part), max(c.axes[name] for c in part))
                    for name in operator.spec.variable_axes
                },
            )


def inside(operator: Operator, regime: Regime, workload: Workload) -> bool:
    """Whether a workload lies in a regime; where regimes meet, the first one has it."""
    case = workload.build()
    key = key_from_axes(operator.spec, case.axes, named_device("cpu"), case.mode)
    return (regime.mode, tuple(regime.constants.items())) == group_of(operator, key) and all(
        low <= case.axes[name] <= high for name, (low, high) in regime.bounds.items()
    )


def workloads_of(operator: Operator, spec: CampaignSpec, regime: Regime) -> list[Workload]:
    """The workloads of a regime, from its middle outwards, so that the first few speak for all."""
    own = [
        workload
        for workload in spec.workloads
        if next(r for r in spec.regimes if inside(operator, r, workload)) == regime
    ]
    middle = (len(own) - 1) / 2
    return [own[i] for i in sorted(range(len(own)), key=lambda i: (abs(i - middle), i))]


# ---- the champion -------------------------------------------------------------------------------


def champion(operator: Operator, info: DeviceInfo) -> dict[str, Any]:
    """The table that serves this device today: its path and digest; empty where none does."""
    table, _ = dispatch.find_table(operator, info)
    if table is None:
        return {}
    return {"path": table.path, "sha256": sha256(Path(table.path).read_bytes())}


def served(operator: Operator, workload: Workload, info: DeviceInfo) -> Candidate:
    """What serves a workload today, the safe route where nothing else does."""
    selection = dispatch.choose(operator, key_of(operator, workload, info))
    return candidate(operator.name, selection.route.name, dataclasses.asdict(selection.config))
