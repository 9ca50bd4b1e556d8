"""Seeded inputs of gdn_decode, and the lists of cases."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastkernels.ops._shared.cases import contest_seed, contest_workloads, generator, move
from fastkernels.ops._shared.gdn_inputs import (
    draw_gates,
    draw_heads,
    draw_state,
    pool_layout,
)
from fastkernels.ops.gdn_decode.problem import Inputs


@dataclass(frozen=True)
class Case:
    """Sizes and what shapes the contents.

    gates: contest, keep (g = 1), forget (g = 0), extreme (both, and beta 0 and 1).
    layout: contiguous; fused (q, k, v slices of one projection, a and b of another, padded state).
    state: random, none.   indices: int32, int64 (pool form only; rows 1, 4, .. are padding).
    """

    name: str
    batch_size: int
    seed: int = 0
    num_q_heads: int = 4
    num_v_heads: int = 8
    head_size: int = 128
    mode: str = "functional"
    gates: str = "contest"
    layout: str = "contiguous"
    state: str = "random"
    indices: str = "int32"
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


def make_inputs(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """Inputs of a case, drawn on the CPU in the definition's order, then moved to `device`."""
    rng = generator(case.seed)
    B, Hk, Hv, D = case.batch_size, case.num_q_heads, case.num_v_heads, case.head_size
    fused = case.layout == "fused"
    q, k, v = (t.unsqueeze(1) for t in draw_heads(rng, B, Hk, Hv, D, fused))
    read, write, slots = pool_layout(case.mode, B, case.indices)
    state = None if case.state == "none" else draw_state(rng, slots, Hv, D, padded=fused)
    A_log, a, dt_bias, b = draw_gates(rng, B, Hv, case.gates, fused)
    inputs = Inputs(
        q, k, v, state, A_log, a.unsqueeze(1), dt_bias, b.unsqueeze(1), case.scale,
        read, write, inplace=case.mode == "inplace",
    )  # fmt: skip
    return Inputs(*(move(x, device) if isinstance(x, torch.Tensor) else x for x in inputs))


CONTEST = tuple(
    Case(
        f"contest-{w['uuid'][:8]}",
        batch_size=w["axes"]["batch_size"],
        seed=contest_seed(w),
        source=w["uuid"],
    )
    for w in contest_workloads("gdn_decode")
)
