"""Seeded inputs of gdn_prefill, and the lists of cases."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from fastkernels.core.table import Table, gap_values
from fastkernels.ops._shared.cases import contest_seed, contest_workloads, generator, move
from fastkernels.ops._shared.gdn_inputs import (
    between,
    draw_gates,
    draw_heads,
    draw_state,
    pool_layout,
    split_tokens,
)
from fastkernels.ops.gdn_prefill.problem import Inputs


@dataclass(frozen=True)
class Case:
    """Sizes and what shapes the contents.

    lengths: tokens of each sequence, in order; `stray` tokens of no sequence follow.
    keys: unit, parallel, long, raw.   gates: contest, keep (g = 1), forget (g = 0), slow, extreme
    (g = 1, g = 0, beta = 0 and beta = 1 in turn), parallel (g and beta near 1).
    layout: contiguous; fused (q, k, v slices of one projection, a and b of another, padded state).
    state: random, none.   offsets: dtype of cu_seqlens.   indices, padding: pool form only; padding
    some (sequences 1, 4, ..) or all.
    """

    name: str
    lengths: tuple[int, ...]
    seed: int = 0
    stray: int = 0
    num_q_heads: int = 4
    num_v_heads: int = 8
    head_size: int = 128
    mode: str = "functional"
    keys: str = "unit"
    gates: str = "contest"
    layout: str = "contiguous"
    state: str = "random"
    offsets: str = "int64"
    indices: str = "int32"
    padding: str = "some"
    scale: float | None = None
    source: str = ""

    @property
    def axes(self) -> dict[str, int]:
        return {
            "total_seq_len": sum(self.lengths) + self.stray,
            "num_seqs": len(self.lengths),
            "num_q_heads": self.num_q_heads,
            "num_v_heads": self.num_v_heads,
            "head_size": self.head_size,
        }


def make_inputs(
    case: Case, device: torch.device | str = "cpu", *, drawn_on: torch.device | str = "cpu"
) -> Inputs:
    """Inputs of a case, drawn on the CPU in the definition's order, then moved to `device`;
    `drawn_on` another device they are other numbers, which need not come all that way."""
    T, N = case.axes["total_seq_len"], case.axes["num_seqs"]
    Hk, Hv, D = case.num_q_heads, case.num_v_heads, case.head_size
    fused = case.layout == "fused"
    with torch.device(drawn_on):
        rng = generator(case.seed, drawn_on)
        q, k, v = draw_heads(rng, T, Hk, Hv, D, fused, case.keys)
        read, write, slots = pool_layout(case.mode, N, case.indices, case.padding)
        state = (
            None
            if case.state == "none"
            else draw_state(rng, slots, Hv, D, padded=fused, is_pool=case.mode == "pool")
        )
        A_log, a, dt_bias, b = draw_gates(rng, T, Hv, case.gates, fused)
        offsets = torch.tensor([0, *accumulate(case.lengths)], dtype=getattr(torch, case.offsets))
    inputs = Inputs(
        q, k, v, state, A_log, a, dt_bias, b, offsets, case.scale,
        read, write, inplace=case.mode == "inplace",
    )  # fmt: skip
    return Inputs._make(move(x, device) if isinstance(x, torch.Tensor) else x for x in inputs)


# Lengths around the chunk sizes 16, 32, 64 and 128, one token and none among them.
_AROUND = (1, 15, 16, 17, 0, 31, 32, 33, 63, 64, 65)
_SMALL: dict[str, Any] = {"num_q_heads": 1, "num_v_heads": 2, "head_size": 64}

CORRECTNESS: tuple[Case, ...] = (
    Case("definition", (40, 3, 86), seed=1),
    Case("no-state", (70, 5), seed=2, state="none"),
    Case("one-sequence", (150,), seed=3),
    Case("around-chunks", _AROUND, seed=4, **_SMALL),
    Case("many-short", tuple(1 + i * 7 % 5 for i in range(90)), seed=5, **_SMALL),
    Case("one-long-many-short", (1,) * 20 + (400,) + (2,) * 10, seed=6, **_SMALL),
    Case("inplace", (9, 67), seed=7, mode="inplace"),
    Case("pool", (30, 4, 65, 7, 11, 1, 3), seed=8, mode="pool"),
    Case("pool-int64", (17, 0, 5, 2, 9), seed=9, mode="pool", indices="int64", offsets="int32"),
    Case("scale", (33,), seed=10, scale=0.5),
    Case("scale-zero", (5,), seed=11, scale=0.0),
    Case("keep", (130, 7), seed=12, gates="keep"),
    Case("forget", (66, 7), seed=13, gates="forget"),
    Case("slow", (200, 7), seed=14, gates="slow"),
    Case("extreme", (130, 7), seed=15, gates="extreme"),
    Case("parallel", (128,), seed=16, keys="parallel", gates="parallel", state="none"),
    Case("parallel-keep", (128, 31), seed=17, keys="parallel", gates="keep"),
    Case("long-keys", (100, 31), seed=18, keys="long"),
    Case("raw-keys", (1, 5, 9), seed=19, keys="raw"),
    Case("heads-1-1", (40, 8), seed=20, num_q_heads=1, num_v_heads=1),
    Case("heads-2-8", (40, 8), seed=21, num_q_heads=2, num_v_heads=8, head_size=64),
    Case("heads-16-32", (20, 3), seed=22, num_q_heads=16, num_v_heads=32),
    Case("head-size-96", (40, 8), seed=23, num_q_heads=2, num_v_heads=6, head_size=96),
    Case("head-size-256", (20, 8), seed=24, num_q_heads=1, num_v_heads=2, head_size=256),
)

CORNER: tuple[Case, ...] = (
    Case("empty", (), seed=31),
    Case("empty-sequences", (0, 0), seed=32),
    Case("empty-no-state", (0, 0), seed=33, state="none"),
    Case("empty-inplace", (0, 0), seed=34, mode="inplace"),
    Case("one", (1,), seed=35),
    Case("tail", (129, 1, 63), seed=36),
    Case("strided", (3, 66, 5), seed=37, layout="fused"),
    Case("strided-inplace", (3, 20), seed=38, layout="fused", mode="inplace"),
    Case("strided-pool", (3, 20, 5, 9), seed=39, layout="fused", mode="pool"),
    Case("empty-in-the-middle", (3, 0, 2), seed=40),
    Case("empty-around", (0, 0, 7, 0, 70, 0), seed=41, mode="pool", padding="some"),
    Case("stray-tokens", (5, 30), seed=42, stray=9),
    Case("only-stray-tokens", (), seed=43, stray=9),
    Case("all-invalid", (5, 0, 30), seed=44, mode="pool", padding="all"),
    Case("largest", (1, 700, 276, 47), seed=45),
)

CONTEST: tuple[Case, ...] = tuple(
    Case(
        f"contest-{w['uuid'][:8]}",
        lengths=tuple(w["draw"]["lengths"]),
        seed=contest_seed(w),
        source=w["uuid"],
    )
    for w in contest_workloads("gdn_prefill")
)


def split_case(name: str, total: int, num_seqs: int, seed: int) -> Case:
    """`total` tokens in a seeded log-normal split over `num_seqs` sequences."""
    rng = generator(seed)
    lengths = tuple(split_tokens(rng, total, num_seqs))
    return Case(name, lengths, seed=seed, stray=total - sum(lengths))


SERVING: tuple[Case, ...] = tuple(
    split_case(f"serving-t{total}-n{num_seqs}", total, num_seqs, seed=total + num_seqs)
    for total in (16384, 65536)
    for num_seqs in (1, 4, 32)
)


def gap_cases(table: Table | None, seed: int = 0) -> tuple[Case, ...]:
    """Sizes around every regime boundary of `table`, and a seeded sample between them.

    Each number of tokens is paired with one drawn number of sequences and each number of sequences
    with one drawn number of tokens: the full product would be hundreds of cases.
    """
    rng = generator(seed)
    sizes = {}
    for axis in ("total_seq_len", "num_seqs"):
        edges = gap_values(table, axis)
        sizes[axis] = sorted({*edges, *between(rng, edges)})
    tokens, seqs = sizes["total_seq_len"], sizes["num_seqs"]
    if not tokens or not seqs:
        return ()

    def pick(values: list[int]) -> int:
        return values[int(torch.randint(len(values), (), generator=rng))]

    pairs = [(total, pick(seqs)) for total in tokens] + [(pick(tokens), n) for n in seqs]
    return tuple(
        split_case(f"gap-t{total}-n{n}", total, n, seed=seed + i)
        for i, (total, n) in enumerate(dict.fromkeys(pairs))
    )
