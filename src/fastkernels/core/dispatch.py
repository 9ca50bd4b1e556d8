"""From a problem key to a launched route: select, memoise, launch, attest.

Selection is decided by the key alone: a forced route, else the dispatch table of the device's
product, else a table of the same architecture, else the operator's safe route. A route that
declines is replaced by the safe route with a recorded reason; a launch that fails raises and is not
retried.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from fastkernels import envs
from fastkernels.core import device as devices
from fastkernels.core import table as tables
from fastkernels.core.device import DeviceInfo, index_of, named_device
from fastkernels.core.problem import Problem, ProblemKey, key_from_axes
from fastkernels.core.route import Operator, Route, ShortWay
from fastkernels.core.spec import OpSpec
from fastkernels.core.table import Table
from fastkernels.errors import (
    ArgumentError,
    FallbackError,
    FastkernelsError,
    LaunchError,
    NotWarmedUp,
    TableError,
    UnsupportedProblem,
)

# Serving meets ever new token counts; a full memo is dropped, a miss costs tens of microseconds.
_MEMO_LIMIT = 8192
# What the library remembers it looks through one by one (1 us for so many).
_REMEMBERED_LIMIT = 1024


class Selection(NamedTuple):
    """The route and config that serve a key, and why."""

    route: Route
    config: Any
    reason: str
    table: Table | None = None
    hit: tables.Hit | None = None
    is_fallback: bool = False
    notes: tuple[str, ...] = ()


_memo: dict[ProblemKey, Selection] = {}
_remembered: set[ProblemKey] = set()
_short_ways: dict[str, ShortWay] = {}
_fallbacks: set[str] = set()  # operators of which a fallback is remembered
_tables: dict[tuple[str, str, DeviceInfo], tuple[Table | None, tuple[str, ...]]] = {}
_prepared: set[tuple[str, str, Any, DeviceInfo, int]] = set()
_NOTHING: Mapping[str, tuple[Route, Any]] = MappingProxyType({})
_forced: ContextVar[Mapping[str, tuple[Route, Any]]] = ContextVar(
    "fastkernels_forced", default=_NOTHING
)
_witnesses: ContextVar[tuple[list[tuple[ProblemKey, Selection]], ...]] = ContextVar(
    "fastkernels_witnesses", default=()
)


# ---- the call -----------------------------------------------------------------------------------


def run(operator: Operator, problem: Problem) -> tuple[torch.Tensor, ...]:
    """Select a route for a checked problem, launch it, and return the filled outputs."""
    key = problem.key
    selection = select(operator, key)
    route, config = selection.route, selection.config
    workspace = _scratch(route, config, problem)
    for witness in _witnesses.get():
        witness.append((key, selection))
    try:
        if route.language == "torch":
            with _plain_arithmetic(problem.outputs[0].device.type):
                route.launch(problem.inputs, problem.outputs, workspace, config)
        else:
            route.launch(problem.inputs, problem.outputs, workspace, config)
    except (FastkernelsError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise launch_error(key, selection, error) from error
    if route.remember is not None and key not in _remembered:
        _remember(route.remember, key, selection)
    return problem.outputs


def _remember(
    remember: Callable[[ProblemKey, Any, Mapping[str, tables.Interval]], ShortWay],
    key: ProblemKey,
    selection: Selection,
) -> None:
    if key.op in _forced.get() or devices.override is not None:
        return
    if len(_remembered) >= _REMEMBERED_LIMIT:
        forget()
    if selection.is_fallback:
        _fallbacks.add(key.op)
    _short_ways[key.op] = remember(key, selection.config, _ranges(key, selection))
    _remembered.add(key)


def _ranges(key: ProblemKey, selection: Selection) -> Mapping[str, tables.Interval]:
    """The sizes around a key's that the selection holds for: its regime of the table, if the route
    serves both ends. Serving meets ever new sizes, and the long way costs each of them 100 us."""
    entry = None if selection.hit is None else selection.hit.entry
    if not isinstance(entry, tables.Regime) or entry.route != selection.route.name:
        return {}
    axes = entry.axes
    for end in (0, 1):
        corner = tuple((n, axes[n][end] if n in axes else size) for n, size in key.axes)
        if selection.route.unsuited(key._replace(axes=corner), selection.config) is not None:
            return {}
    return axes


def short_way(op: str) -> ShortWay | None:
    """The way straight to the library, for problems of an operator that were served before; None
    where there were none, a route is forced, or somebody watches."""
    if _forced.get() or _witnesses.get() or devices.override is not None:
        return None
    if op in _fallbacks and envs.strict():  # the library does not know which ones they are
        return None
    return _short_ways.get(op)


def forget() -> None:
    """Make every problem take the long way once more."""
    for way in tuple(_short_ways.values()):
        way.forget()
    _short_ways.clear()
    _fallbacks.clear()
    _remembered.clear()


def launch_error(key: ProblemKey, selection: Selection, error: Exception) -> LaunchError:
    return LaunchError(
        f"{key.op}: route {selection.route.name!r} with {selection.config} failed on "
        f"{key.describe()}: {error}"
    )


@contextmanager
def _plain_arithmetic(device_type: str) -> Iterator[None]:
    """Surroundings in which torch computes what a route wrote down.

    The caller's autocast would turn float32 products into bfloat16 ones. Inference mode lets a
    route fill tensors that were made in it, such as a server's pool.
    """
    with torch.inference_mode():
        if torch.is_autocast_enabled(device_type):
            with torch.autocast(device_type, enabled=False):
                yield
        else:
            yield


def _scratch(route: Route, config: Any, problem: Problem) -> torch.Tensor | None:
    size = route.workspace_bytes(dict(problem.key.axes), config)
    if size == 0:
        return None
    if problem.workspace is None:
        return torch.empty(size, dtype=torch.uint8, device=problem.outputs[0].device)
    if problem.workspace.numel() < size:
        raise ArgumentError(
            f"{problem.key.op}: 'workspace' has {problem.workspace.numel()} bytes, expected"
            f" at least {size}; ask fastkernels.workspace_size({problem.key.op!r}, ...)"
        )
    return problem.workspace[:size]


def select(operator: Operator, key: ProblemKey) -> Selection:
    """The selection for a key; decided once per key and process, then a dictionary lookup."""
    forced = _forced.get()
    if operator.name in forced:
        selection = _select_forced(operator, key, *forced[operator.name])
        _prepare(key, selection)
        return selection
    known = _memo.get(key)
    selection = choose(operator, key) if known is None else known
    if selection.is_fallback and envs.strict():
        why = "; ".join((selection.reason, *selection.notes))
        raise FallbackError(f"{key.describe()}: {why} ({envs.STRICT} is set)")
    if known is None:
        _announce(key, selection)
        _prepare(key, selection)
        if len(_memo) >= _MEMO_LIMIT:
            _memo.clear()
        _memo[key] = selection
    return selection


def _select_forced(operator: Operator, key: ProblemKey, route: Route, config: Any) -> Selection:
    decline = route.declines(key, config)
    if decline is not None:
        raise _unsupported(key, "the forced route declines", {route.name: decline.reason})
    return Selection(route, config, "forced by force_route")


def choose(operator: Operator, key: ProblemKey) -> Selection:
    """Decide a key from the tables, without memo, logging or strictness."""
    found, notes = find_table(operator, key.device)
    if found is None:
        if key.device.is_gpu:
            reason = f"no table for {key.device.product} or another {key.device.arch}: safe route"
            return _safe(operator, key, reason, notes, is_fallback=True)
        reason = f"the safe route is what runs on {key.device.arch}"
        return _safe(operator, key, reason, notes, is_fallback=bool(notes))
    hit = found.lookup(dict(key.axes), key.mode)
    if hit is None:
        return _safe(operator, key, "the table has no entry for this problem", notes, True, found)
    route = operator.route(hit.entry.route)
    if route is None:
        reason = f"the table names the unknown route {hit.entry.route!r}: safe route"
        return _safe(operator, key, reason, notes, True, found, hit)
    try:
        config = route.make_config(hit.entry.config)
    except (ValueError, TypeError) as error:
        reason = f"the table's config is illegal ({error}): safe route"
        return _safe(operator, key, reason, notes, True, found, hit)
    decline = route.declines(key, config)
    if decline is not None:
        reason = f"route {route.name!r} of the table declines ({decline.reason}): safe route"
        return _safe(operator, key, reason, notes, True, found, hit)
    # Another product's table is no measurement of this one.
    is_fallback = hit.is_fallback or found.product != key.device.product
    return Selection(route, config, hit.where, found, hit, is_fallback, notes)


def _safe(
    operator: Operator,
    key: ProblemKey,
    reason: str,
    notes: tuple[str, ...],
    is_fallback: bool,
    table: Table | None = None,
    hit: tables.Hit | None = None,
) -> Selection:
    route = operator.safe_route
    if route.declines(key, route.default_config) is not None:
        reasons = {
            r.name: d.reason for r in operator.routes if (d := r.declines(key, r.default_config))
        }
        raise _unsupported(key, "no route serves this", reasons)
    return Selection(route, route.default_config, reason, table, hit, is_fallback, notes)


def _unsupported(key: ProblemKey, what: str, reasons: Mapping[str, str]) -> UnsupportedProblem:
    sizes = ", ".join(f"{name}={size}" for name, size in key.axes)
    lines = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items())
    return UnsupportedProblem(f"{key.op} on {key.device.arch} with {sizes}: {what}.{lines}")


def _announce(key: ProblemKey, selection: Selection) -> None:
    where = (key.op, key.device)
    for note in selection.notes:
        envs.log_once(logging.WARNING, (where, note), f"{key.op} on {key.device.product}: {note}")
    if selection.is_fallback:
        # A reason may name sizes: once per entry of the table, not once per size.
        entry = selection.reason if selection.hit is None else selection.hit.where
        envs.log_once(
            logging.WARNING,
            (where, entry),
            f"{key.describe()}: served by {selection.route.name!r}: {selection.reason}",
        )
    envs.logger().debug("%s: %s %s", key.describe(), selection.route.name, selection.config)


def _prepare(key: ProblemKey, selection: Selection) -> None:
    """Load or compile what the route needs, once per (operator, route, config, device)."""
    prepare = selection.route.prepare
    if prepare is None:
        return
    identity = (key.op, selection.route.name, selection.config, key.device, key.device_index)
    if identity in _prepared:
        return
    if key.device.is_gpu and _is_capturing(key.device_index):
        options = [f"mode={key.mode!r}", *(f"{name}={size}" for name, size in key.axes)]
        if key.traits:
            options.insert(1, f"traits={key.traits!r}")
        raise NotWarmedUp(
            f"{key.op}: {key.describe()} first seen during CUDA graph capture; call "
            f"fastkernels.warmup({key.op!r}, {', '.join(options)}) before capturing"
        )
    try:
        prepare(key, selection.config)
    except FastkernelsError:
        raise
    except Exception as error:
        raise LaunchError(
            f"{key.op}: route {selection.route.name!r} with {selection.config} could not be loaded "
            f"for {key.describe()}: {error}"
        ) from error
    _prepared.add(identity)


def _is_capturing(device_index: int) -> bool:
    if not torch.cuda.is_available():
        return False
    with torch.cuda.device(device_index):
        return torch.cuda.is_current_stream_capturing()


# ---- tables -------------------------------------------------------------------------------------


def shipped_tables() -> Path:
    """The folder with the tables of this package; in a checkout that is not installed, its own."""
    found = importlib.util.find_spec("fastkernels._tables")
    if found is not None and found.origin:
        return Path(found.origin).parent
    return Path(__file__).parents[3] / "dispatch_tables"


def table_folders() -> list[Path]:
    """Where tables are looked for: FASTKERNELS_TABLES, the user's folder, the shipped ones."""
    folders = (envs.tables_folder(), envs.user_tables_folder(), shipped_tables())
    return [folder for folder in folders if folder is not None]


def _listed(folder: Path) -> list[str]:
    """Names in a folder, sorted; nothing where it is absent or may not be read (a container's user
    often has no home of its own)."""
    try:
        return sorted(os.listdir(folder))
    except (OSError, ValueError):
        return []


def find_table(operator: Operator, device: DeviceInfo) -> tuple[Table | None, tuple[str, ...]]:
    """The table for a device, and what is to be said about it (rejected files, drift, status)."""
    spec = operator.spec
    identity = (spec.name, spec.digest, device)
    if identity not in _tables:
        _tables[identity] = _search_table(spec, device)
    return _tables[identity]


def _search_table(spec: OpSpec, device: DeviceInfo) -> tuple[Table | None, tuple[str, ...]]:
    notes: list[str] = []
    asked = envs.tables_folder()
    if asked is not None and not _listed(asked):
        notes.append(f"{envs.TABLES} names {asked}, which is no folder with tables")
    exact = tables.file_name(device.arch, device.product)
    folders = [folder / spec.name for folder in table_folders()]
    own = [folder / exact for folder in folders if exact in _listed(folder)]
    siblings = [
        folder / name
        for folder in folders
        for name in _listed(folder)
        if name.startswith(f"{device.arch}-") and name.endswith(".toml") and name != exact
    ]
    for path in (*own, *siblings):
        try:
            table = tables.read(path, spec)
            if table.arch != device.arch:
                raise TableError(f"{path}: made for {table.arch}, this device is {device.arch}")
        except TableError as error:
            notes.append(f"table rejected: {error}")
            continue
        return table, (*notes, *_remarks(table, device))
    return None, tuple(notes)


def _remarks(table: Table, device: DeviceInfo) -> Iterator[str]:
    name = Path(table.path).name
    if table.product != device.product:
        yield f"table {name} was made for {table.product}, another product of {device.arch}"
    elif table.num_sms != device.num_sms:
        yield f"table {name} was made for {table.num_sms} SMs, this device has {device.num_sms}"
    if table.status == "unmeasured":
        yield f"table {name} is unmeasured: its routes were chosen by rule, not by timing"
    current = {"torch": str(torch.__version__), "cuda": torch.version.cuda}
    for package, version in table.versions.items():
        here = current.get(package)
        if here is not None and here != version:
            yield f"table {name} was measured with {package} {version}, this is {here}"


def reload_tables() -> None:
    """Forget every selection and table, so that the next call reads the files again."""
    _memo.clear()
    _tables.clear()
    forget()


def lint_table(operator: Operator, table: Table) -> list[str]:
    """Everything wrong with a readable table: `core.table.lint`, and routes that are unknown, get
    an illegal config, or decline a corner of their regime."""
    problems = tables.lint(table)
    if table.fallbacks and table.fallbacks[-1].route != operator.safe_route.name:
        problems.append(f"the last [[fallback]] is not the safe route {operator.safe_route.name!r}")
    device = DeviceInfo(table.arch, table.product, table.num_sms)
    entries: list[tuple[str, tables.Regime | tables.Fallback]] = [
        (f"regime {i}", entry) for i, entry in enumerate(table.regimes, 1)
    ]
    entries += [(f"fallback {i}", entry) for i, entry in enumerate(table.fallbacks, 1)]
    for where, entry in entries:
        route = operator.route(entry.route)
        if route is None:
            problems.append(f"{where} names the unknown route {entry.route!r}")
            continue
        try:
            config = route.make_config(entry.config)
        except (ValueError, TypeError) as error:
            problems.append(f"{where}: {error}")
            continue
        if isinstance(entry, tables.Fallback):
            continue
        for end in (0, 1):
            bounds = entry.axes | entry.constants
            corner = {name: interval[end] for name, interval in bounds.items()}
            try:
                key = key_from_axes(operator.spec, corner, device, entry.mode)
            except ArgumentError as error:
                problems.append(f"{where}: {error}")
                continue
            decline = route.unsuited(key, config)  # a table outlives this installation
            if decline is not None:
                problems.append(
                    f"{where}: route {route.name!r} declines {corner}: {decline.reason}"
                )
    return problems


# ---- what users ask -----------------------------------------------------------------------------


@contextmanager
def force_route(operator: Operator, name: str, config: Any = None) -> Iterator[None]:
    """Serve every call of an operator in this context by one route; see fastkernels.force_route."""
    route = operator.route(name)
    if route is None:
        known = ", ".join(r.name for r in operator.routes)
        raise ArgumentError(f"{operator.name}: route {name!r} is unknown, expected one of {known}")
    if config is None:
        config = route.default_config
    elif isinstance(config, Mapping):
        try:
            config = route.make_config({**dataclasses.asdict(route.default_config), **config})
        except ValueError as error:
            raise ArgumentError(f"{operator.name}: 'config': {error}") from None
    elif type(config) is not type(route.default_config):
        raise ArgumentError(
            f"{operator.name}: 'config' is {type(config).__name__}, expected a dict or "
            f"{type(route.default_config).__name__} of route {name!r}"
        )
    token = _forced.set({**_forced.get(), operator.name: (route, config)})
    try:
        yield
    finally:
        _forced.reset(token)


@contextmanager
def attest() -> Iterator[list[tuple[ProblemKey, Selection]]]:
    """Collect which route actually served each call in this context, in order."""
    served: list[tuple[ProblemKey, Selection]] = []
    token = _witnesses.set((*_witnesses.get(), served))
    try:
        yield served
    finally:
        _witnesses.reset(token)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which route serves a problem and why, and why every other route does not."""

    op: str
    device: str
    arch: str
    mode: str
    axes: dict[str, int]
    spec_digest: str
    route: str
    language: str
    config: dict[str, Any]
    reason: str
    is_fallback: bool
    table: str | None
    status: str | None
    regime: str | None
    evidence: dict[str, Any]
    provenance: dict[str, Any]
    notes: tuple[str, ...]
    others: dict[str, str]
    workspace_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.axes.items())
        lines = [
            f"{self.op} ({sizes}, mode={self.mode}) on {self.device} ({self.arch})",
            f"  route      {self.route} ({self.language}) {self.config or ''}".rstrip(),
            f"  why        {self.reason}",
            f"  table      {self.table or 'none'}" + (f" ({self.status})" if self.status else ""),
        ]
        if self.regime:
            lines.append(f"  regime     {self.regime}")
        lines += [f"  {name:<10} {value}" for name, value in self.evidence.items()]
        lines += [f"  {name:<10} {value}" for name, value in self.provenance.items()]
        lines.append(f"  workspace  {self.workspace_bytes} bytes")
        lines.append(f"  spec       {self.spec_digest}")
        lines += [f"  note       {note}" for note in self.notes]
        lines += [f"  not taken  {name}: {reason}" for name, reason in self.others.items()]
        return "\n".join(lines)


def explain(operator: Operator, key: ProblemKey) -> Explanation:
    forced = _forced.get().get(operator.name)
    selection = choose(operator, key) if forced is None else _select_forced(operator, key, *forced)
    others = {}
    for route in operator.routes:
        if route.name == selection.route.name:
            continue
        decline = route.declines(key, route.default_config)
        others[route.name] = decline.reason if decline else "serves this, not chosen"
    table, hit = selection.table, selection.hit
    evidence: Mapping[str, Any] = {}
    if hit and isinstance(hit.entry, tables.Regime) and hit.entry.route == selection.route.name:
        evidence = hit.entry.evidence  # of this route; where it declines, not another's
    return Explanation(
        op=key.op,
        device=key.device.product,
        arch=key.device.arch,
        mode=key.mode,
        axes=dict(key.axes),
        spec_digest=operator.spec.digest,
        route=selection.route.name,
        language=selection.route.language,
        config=dataclasses.asdict(selection.config),
        reason=selection.reason,
        is_fallback=selection.is_fallback,
        table=table.path if table else None,
        status=table.status if table else None,
        regime=hit.where if hit and not hit.is_fallback else None,
        evidence=dict(evidence),
        provenance=dict(table.provenance) if table else {},
        notes=selection.notes,
        others=others,
        workspace_bytes=workspace_size(operator, key),
    )


def workspace_size(operator: Operator, key: ProblemKey) -> int:
    """Scratch bytes that suffice for every route and mode on the key's device, at the key's sizes
    and any smaller ones."""
    table, _ = find_table(operator, key.device)
    size = 0
    for route in operator.routes:
        configs = [route.default_config]
        for knobs in table.configs(route.name) if table else ():
            try:
                configs.append(route.make_config(knobs))
            except (ValueError, TypeError):
                continue  # lint reports it; such an entry is never launched
        for mode in operator.spec.modes:
            asked = key._replace(mode=mode)
            size = max(size, *(route.workspace_bound(asked, config) for config in configs))
    return size


def warmup(operator: Operator, key: ProblemKey) -> None:
    """Load or compile what serves `key`, so that a graph capture may follow."""
    select(operator, key)


def key_for(
    operator: Operator,
    device: str | torch.device | DeviceInfo | None,
    mode: str | None,
    axes: Mapping[str, int],
    traits: tuple[str, ...] = (),
) -> ProblemKey:
    """A key from what a person types: axis values, a mode, a device or product name."""
    found = named_device(device)
    return key_from_axes(operator.spec, axes, found, mode, traits, index_of(device))
