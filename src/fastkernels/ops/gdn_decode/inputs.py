"""Seeded inputs of gdn_decode, and the lists of cases."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastkernels.core.table import Table, gap_values
from fastkernels.ops._shared.cases import contest_seed, contest_workloads, generator, move
from fastkernels.ops._shared.gdn_inputs import (
    between,
    draw_gates,
    draw_heads,
    draw_state,
    pool_layout,
)
from fastkernels.ops.gdn_decode.problem import Inputs


@dataclass(frozen=True)
class Case:
    """Sizes and what shapes the contents.

    keys: unit, raw.   gates: contest, keep (g = 1), forget (g = 0), slow, extreme (g = 1, g = 0,
    beta = 0 and beta = 1 in turn).
    layout: contiguous; fused (q, k, v slices of one projection, a and b of another, padded state).
    state: random, none.   indices, padding: pool form only; padding some (rows 1, 4, ..) or all.
    """

    name: str
    batch_size: int
    seed: int = 0
    num_q_heads: int = 4
    num_v_heads: int = 8
    head_size: int = 128
    mode: str = "functional"
    keys: str = "unit"
    gates: str = "contest"
    layout: str = "contiguous"
    state: str = "random"
    indices: str = "int32"
    padding: str = "some"
    scale: float | None = None
    source: str = ""

    @property
    def axes(self) -> dict[str, int]:
        return {
            "batch_size": self.batch_size,
            "num_q_heads": self.num_q_heads,
            "num_v_heads": self.num_v_heads,
            "head_size": self.head_size,
        }


def make_inputs(
    case: Case, device: torch.device | str = "cpu", *, drawn_on: torch.device | str = "cpu"
) -> Inputs:
    """Inputs of a case, drawn on the CPU in the definition's order, then moved to `device`;
    `drawn_on` another device they are other numbers, which need not come all that way."""
    B, Hk, Hv, D = case.batch_size, case.num_q_heads, case.num_v_heads, case.head_size
    fused = case.layout == "fused"
    with torch.device(drawn_on):
        rng = generator(case.seed, drawn_on)
        q, k, v = (t.unsqueeze(1) for t in draw_heads(rng, B, Hk, Hv, D, fused, case.keys))
        read, write, slots = pool_layout(case.mode, B, case.indices, case.padding)
        state = (
            None
            if case.state == "none"
            else draw_state(rng, slots, Hv, D, padded=fused, is_pool=case.mode == "pool")
        )
        A_log, a, dt_bias, b = draw_gates(rng, B, Hv, case.gates, fused)
    inputs = Inputs(
        q, k, v, state, A_log, a.unsqueeze(1), dt_bias, b.unsqueeze(1), case.scale,
        read, write, inplace=case.mode == "inplace",
    )  # fmt: skip
    return Inputs._make(move(x, device) if isinstance(x, torch.Tensor) else x for x in inputs)


CORRECTNESS: tuple[Case, ...] = (
    *(Case(f"definition-b{size}", size, seed=size) for size in (1, 2, 3, 4, 8, 16, 33)),
    Case("no-state", 5, seed=51, state="none"),
    Case("inplace", 5, seed=52, mode="inplace"),
    Case("pool", 9, seed=53, mode="pool"),
    Case("pool-int64", 9, seed=54, mode="pool", indices="int64"),
    Case("scale", 3, seed=55, scale=0.5),
    Case("scale-zero", 3, seed=56, scale=0.0),
    Case("keep", 4, seed=57, gates="keep"),
    Case("forget", 4, seed=58, gates="forget"),
    Case("slow", 4, seed=59, gates="slow"),
    Case("extreme", 8, seed=60, gates="extreme"),
    Case("raw-keys", 4, seed=61, keys="raw"),
    Case("heads-1-1", 5, seed=62, num_q_heads=1, num_v_heads=1),
    Case("heads-2-8", 5, seed=63, num_q_heads=2, num_v_heads=8),
    Case("heads-16-32", 3, seed=64, num_q_heads=16, num_v_heads=32),
    Case("head-size-64", 5, seed=65, head_size=64),
    Case("head-size-96", 5, seed=66, num_q_heads=2, num_v_heads=6, head_size=96),
    Case("head-size-256", 3, seed=67, num_q_heads=1, num_v_heads=2, head_size=256),
)

CORNER: tuple[Case, ...] = (
    Case("empty", 0, seed=71),
    Case("empty-no-state", 0, seed=72, state="none"),
    Case("empty-inplace", 0, seed=73, mode="inplace"),
    Case("empty-pool", 0, seed=74, mode="pool"),
    Case("one", 1, seed=75),
    Case("one-pool", 1, seed=76, mode="pool"),
    Case("tail", 13, seed=77),
    Case("strided", 6, seed=78, layout="fused"),
    Case("strided-inplace", 6, seed=79, layout="fused", mode="inplace"),
    Case("strided-pool", 6, seed=80, layout="fused", mode="pool"),
    Case("all-invalid", 5, seed=81, mode="pool", padding="all"),
    Case("largest", 64, seed=82),
)

CONTEST: tuple[Case, ...] = tuple(
    Case(
        f"contest-{w['uuid'][:8]}",
        batch_size=w["axes"]["batch_size"],
        seed=contest_seed(w),
        source=w["uuid"],
    )
    for w in contest_workloads("gdn_decode")
)

SERVING: tuple[Case, ...] = tuple(
    Case(f"serving-b{size}", size, seed=size) for size in (96, 128, 256, 512, 1024)
)


def gap_cases(table: Table | None, seed: int = 0) -> tuple[Case, ...]:
    """The batch sizes around every regime boundary of `table`, and a seeded sample between them."""
    rng = generator(seed)
    edges = gap_values(table, "batch_size")
    sizes = sorted({*edges, *between(rng, edges)})
    return tuple(Case(f"gap-b{size}", size, seed=seed + size) for size in sizes)
