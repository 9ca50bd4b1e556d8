"""An operator with one variable axis and routes that differ in what they take; sweeps of it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastkernels.core.route import ANY_DEVICE, Operator, Route
from fastkernels.core.spec import Axis, OpSpec, TensorSpec

SPEC = OpSpec(
    name="toy",
    definition="toy_h4",
    axes=(Axis("rows"), Axis("heads", value=4, is_open=True, at_least=1)),
    inputs=(TensorSpec("x", ("rows", "heads"), ("float32",)),),
    outputs=(TensorSpec("y", ("rows", "heads"), ("float32",)),),
    modes=("plain", "fancy"),
)


@dataclass(frozen=True)
class Knobs:
    tile: int = 16
    fast: bool = False

    def __post_init__(self) -> None:
        if self.tile > 99:
            raise ValueError("knob 'tile' is above 99")


@dataclass(frozen=True)
class NoKnobs:
    pass


def launch(*_: Any) -> None:
    raise AssertionError("emit launches nothing")


OPERATOR = Operator(
    SPEC,
    (
        Route("tiled", "cuda", ("sm90", "sm100"), Knobs(), launch),
        Route("small", "triton", ("sm90",), NoKnobs(), launch, max_axes={"rows": 8}),
        Route("safe", "torch", ANY_DEVICE, NoKnobs(), launch),
    ),
    launch,
)

TILED16 = ("tiled", {"tile": 16, "fast": False})
TILED32 = ("tiled", {"tile": 32, "fast": True})
SMALL: tuple[str, dict[str, Any]] = ("small", {})
SAFE: tuple[str, dict[str, Any]] = ("safe", {})


def row(
    rows: int,
    candidate: tuple[str, dict[str, Any]],
    us: float,
    *,
    mode: str = "plain",
    spread: float = 0.1,
    case: str = "",
    **constants: int,
) -> dict[str, Any]:
    route, config = candidate
    return {
        "list": "contest",
        "id": case or f"b{rows}",
        "axes": {"rows": rows, **constants},
        "mode": mode,
        "route": route,
        "config": config,
        "us": {"median": us, "p10": us, "p90": us + spread},
        "trials": 50,
        "failures": 0,
        "error": {"metric": "rel_frobenius", "value": 1e-4, "limit": 1e-3},
    }


def crossing(**options: Any) -> list[dict[str, Any]]:
    """`TILED16` wins up to 8 rows, `TILED32` from 32 on."""
    times = {1: (2.0, 4.0), 8: (3.0, 4.1), 32: (8.0, 6.0), 64: (16.0, 9.0)}
    return [
        row(size, candidate, us, **options)
        for size, pair in times.items()
        for candidate, us in zip((TILED16, TILED32), pair, strict=True)
    ]


def both_modes() -> list[dict[str, Any]]:
    return crossing() + crossing(mode="fancy")


def sweep(rows: Iterable[dict[str, Any]], /, **changes: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "op": "toy",
        "kind": "sweep",
        "spec_digest": SPEC.digest,
        "device": {
            "product": "NVIDIA H200",
            "arch": "sm90",
            "num_sms": 132,
            "uuid": "GPU-0",
            "driver": "570.1",
        },
        "code": {"commit": "abc", "dirty": False},
        "versions": {"torch": "2.13.0", "triton": None, "peers": {"other": "1"}},
        "protocol": {"timer": "cupti", "l2": "cold", "iterations": 30},
        "created": "2026-12-01T10:00:00Z",
        "rows": list(rows),
        **changes,
    }


def write_sweep(folder: Path, rows: Iterable[dict[str, Any]], /, **changes: Any) -> Path:
    path = folder / "h200" / "toy.sweep.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(sweep(rows, **changes)))
    return path


RULES = """
schema = 1
op = "toy"
product = "b200"
created = 2026-12-01
[limits]
rows = [0, 64]
[[rule]]
rows = [9, 64]
route = "tiled"
config = { tile = 32, fast = true }
reason = "wide"
[[rule]]
rows = [0, 8]
route = "tiled"
reason = "narrow"
"""


def write_rules(folder: Path, text: str = RULES) -> Path:
    path = folder / "sm100-b200" / "toy.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path
