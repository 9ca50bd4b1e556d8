"""Knobs, legality and identity of what a search may try."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fastkernels import catalog
from fastkernels.core.device import DeviceInfo
from fastkernels.core.problem import ProblemKey
from fastkernels.core.route import ANY_DEVICE, Decline, Route
from fastkernels.ops.gdn_decode.kernels import KERNELS
from fastkernels.testing import contracts
from fastkernels_tuner.model import Candidate, Workload, canonical
from fastkernels_tuner.space import (
    Space,
    SpaceError,
    candidate,
    configs,
    ordered,
    problem_keys,
    source_digest,
    space_of,
)

EVERY_ROUTE = [(op.name, route) for op in catalog.OPERATORS for route in op.routes]
NAMES = [f"{op}-{route.name}" for op, route in EVERY_ROUTE]


@dataclass(frozen=True)
class Config:
    tile: int = 16
    depth: int = 6
    shift: int = 0
    fast: bool = False
    name: str = "a"

    def __post_init__(self) -> None:
        if self.tile > 32:
            raise ValueError(f"knob 'tile' is {self.tile}, expected at most 32")
        if self.tile == 32 and self.depth > 6:
            raise ValueError("too deep a tile")


def launch(*_: Any) -> None:
    raise AssertionError("a space launches nothing")


def supports(key: ProblemKey, device: DeviceInfo, config: Config) -> Decline | None:
    if config.tile > 4 * key.axis("batch_size"):
        return Decline(f"tile {config.tile} is too large for {key.axis('batch_size')} rows")
    return None


def available(device: DeviceInfo, config: Config) -> Decline | None:
    return Decline("no such library") if config.fast else None


def toy_route(**options: Any) -> Route:
    return Route(
        "toy_tiles",
        options.pop("language", "torch"),
        ANY_DEVICE,
        Config(),
        launch,
        supports=supports,
        available=available,
        **options,
    )


def toy_space(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Space:
    """gdn_decode with a toy before its safe route, so that its cases and sizes serve."""
    route = toy_route(**options)
    found = catalog.operator("gdn_decode")
    toy = dataclasses.replace(found, routes=(route, found.safe_route))
    monkeypatch.setattr(catalog, "OPERATORS", (toy,))
    return space_of(route, "gdn_decode")


def rows(batch_size: int) -> Workload:
    return Workload(op="gdn_decode", listed="gap", case={"name": "b", "batch_size": batch_size})


# ---- values -------------------------------------------------------------------------------------


def test_a_knob_takes_its_candidates_and_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    space = toy_space(monkeypatch, candidates={"tile": (8, 32), "fast": (False, True)})
    assert space.values == {
        "tile": (8, 32, 16),
        "depth": (6,),
        "shift": (0,),
        "fast": (False, True),
        "name": ("a",),
    }
    assert space.searched == ("tile", "fast")


def test_candidates_for_what_is_no_knob_are_an_error() -> None:
    with pytest.raises(SpaceError, match="'warps', no knob"):
        space_of(toy_route(candidates={"warps": (1, 2)}), "gdn_decode")


def test_a_torch_route_without_candidates_gets_its_counts_scaled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    space = toy_space(monkeypatch)
    assert space.values == {
        "tile": (4, 8, 16, 32),  # 64 is illegal
        "depth": (3, 6, 12, 24),  # 1.5 is no count
        "shift": (0,),
        "fast": (False,),
        "name": ("a",),
    }


def test_a_compiled_route_without_candidates_is_left_as_it_is() -> None:
    space = space_of(toy_route(language="triton"), "gdn_decode")
    assert space.searched == ()


# ---- configs ------------------------------------------------------------------------------------


def test_configs_are_the_default_and_then_every_legal_one_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    space = toy_space(monkeypatch)
    found = list(configs(space))
    assert found[0] == dataclasses.asdict(Config())
    pairs = [(config["tile"], config["depth"]) for config in found]
    wanted = set(itertools.product((4, 8, 16, 32), (3, 6, 12, 24))) - {(32, 12), (32, 24)}
    assert len(pairs) == len(set(pairs)) == space.size
    assert set(pairs) == wanted


@pytest.mark.parametrize(("op", "route"), EVERY_ROUTE, ids=NAMES)
def test_every_route_of_the_catalog_has_a_space(op: str, route: Route) -> None:
    space = space_of(route, op)
    found = list(configs(space))
    assert found[0] == space.default == dataclasses.asdict(route.default_config)
    assert all(space.refuses(config) is None for config in found)
    assert len({candidate(op, route, config).id for config in found}) == len(found)
    legal = 0
    for values in itertools.product(*space.values.values()):
        try:
            route.make_config(dict(zip(space.values, values, strict=True)))
        except ValueError:
            continue
        legal += 1
    assert len(found) == space.size == legal


def test_a_config_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    space = toy_space(monkeypatch, candidates={"tile": (8, 64)})
    default = space.default
    assert space.refuses(default) is None
    assert space.refuses(default | {"tile": 64}) == "knob 'tile' is 64, expected at most 32"
    assert space.refuses(default | {"tile": 12}) == "knob 'tile' is 12, expected one of 8, 64, 16"
    assert space.refuses(default | {"depth": 3}) == "knob 'depth' is 3, expected one of 6"
    assert "no knob 'warps'" in str(space.refuses(default | {"warps": 1}))
    assert "expected int" in str(space.refuses(default | {"tile": 8.0}))
    assert "needs a value for knob 'tile'" in str(space.refuses({}))


def test_a_config_must_serve_every_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    space = toy_space(monkeypatch, candidates={"tile": (8,), "fast": (True,)})
    keys = problem_keys([rows(2), rows(4)], "cpu")
    default = space.default  # of tile 16
    assert space.declines(default | {"tile": 8}, keys) is None
    assert space.declines(default, keys[1:]) is None
    assert space.declines(default, keys) == "tile 16 is too large for 2 rows"
    assert space.declines(default | {"fast": True}, keys[1:]) == "no such library"


def test_workloads_of_one_problem_are_one_key() -> None:
    first = rows(4)
    again = first.with_seed(7)
    found = problem_keys([first, again, rows(5)], "cpu")
    assert [key.axis("batch_size") for key in found] == [4, 5]
    assert all(key.device.arch == "cpu" and key.mode == "functional" for key in found)


@pytest.mark.parametrize("op", [op.name for op in catalog.OPERATORS])
def test_every_contest_case_has_a_key(op: str) -> None:
    cases = contracts.cases(catalog.operator(op), "CONTEST")
    workloads = [
        Workload(op=op, listed="contest", case=dataclasses.asdict(case))  # type: ignore[call-overload]
        for case in cases
    ]
    assert problem_keys(workloads, "h200")


# ---- identity -----------------------------------------------------------------------------------


def test_widening_changes_the_digest_and_nothing_else_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    narrow = toy_space(monkeypatch, candidates={"tile": (8,)})
    again = toy_space(monkeypatch, candidates={"tile": (8,)})
    wide = toy_space(monkeypatch, candidates={"tile": (8, 32)})
    assert narrow.digest == again.digest != wide.digest


def test_a_candidate_is_its_route_config_and_source(monkeypatch: pytest.MonkeyPatch) -> None:
    toy_space(monkeypatch, candidates={"tile": (8,)})
    config = dataclasses.asdict(Config())
    made = candidate("gdn_decode", "toy_tiles", config)
    reordered = dict(reversed(config.items()))
    assert made.id == candidate("gdn_decode", "toy_tiles", reordered).id
    assert made.id != candidate("gdn_decode", "toy_tiles", config | {"tile": 8}).id
    assert made.id != made.model_copy(update={"source": "0" * 64}).id
    assert made.bind()[1] == Config()
    with pytest.raises(ValueError, match="needs a value"):
        candidate("gdn_decode", "toy_tiles", {})
    with pytest.raises(SpaceError, match="expected one of toy_tiles, torch_recurrent"):
        candidate("gdn_decode", "gone", config)


def test_a_candidate_from_a_ledger_has_the_name_that_tables_give_it() -> None:
    """JSON of a ledger has sorted keys; a report looks candidates up by name."""
    route = catalog.operator("gdn_decode").route("warp_rows")
    assert route is not None
    made = candidate("gdn_decode", route, dataclasses.asdict(route.default_config))
    stored = Candidate.model_validate_json(canonical(made.model_dump(mode="json")))
    assert stored == made
    assert str(stored) != str(made)
    assert str(ordered(stored)) == str(made)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_compiled_route_is_known_by_its_kernel(kernel: Any) -> None:
    assert source_digest("gdn_decode", kernel.name) == kernel.digest()


@pytest.mark.parametrize(
    ("op", "route", "edited", "matters"),
    [
        ("gdn_decode", "torch_recurrent", "gdn_decode/routes/torch_recurrent.py", True),
        ("gdn_decode", "torch_recurrent", "_shared/gdn.py", True),
        ("gdn_decode", "torch_recurrent", "gdn_decode/reference.py", False),
        ("gdn_decode", "torch_recurrent", "gdn_prefill/routes/torch_chunked.py", False),
        ("gdn_prefill", "torch_chunked", "_shared/gdn.py", True),
        ("moe_fp8_block_scale", "torch_grouped", "moe_fp8_block_scale/routing.py", True),
        ("moe_fp8_block_scale", "torch_grouped", "_shared/gdn.py", False),
    ],
)
def test_a_torch_route_is_known_by_its_module_and_what_that_imports(
    op: str, route: str, edited: str, matters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = source_digest(op, route)
    read = Path.read_bytes
    hits = []

    def edited_read(path: Path) -> bytes:
        if path.as_posix().endswith(f"/ops/{edited}"):
            hits.append(path)
            return read(path) + b"# edited\n"
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", edited_read)
    assert (source_digest(op, route) != before) == matters == bool(hits)


def test_a_route_outside_the_package_is_known_by_its_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toy_space(monkeypatch)
    before = source_digest("gdn_decode", "toy_tiles")
    read = Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: read(path) + b"#" * (path == Path(__file__))
    )
    assert source_digest("gdn_decode", "toy_tiles") != before
