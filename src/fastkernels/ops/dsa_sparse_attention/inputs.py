"""Seeded inputs of dsa_sparse_attention, and the lists of cases."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch

from fastkernels.core.table import Table, gap_values
from fastkernels.ops._shared.cases import contest_seed, contest_workloads, generator
from fastkernels.ops.dsa_sparse_attention.problem import Inputs

INT32 = torch.iinfo(torch.int32)
LOCAL_PAGES = 1024  # a context of 64 K tokens
HUGE = 8192.0  # logits near 1e4; a power of two, so that q stays exact
MAX_GAP_PAGES = 16384  # 1.2 GB of caches; boundaries beyond are reached by no gap case
_CHUNK = 1 << 20  # values drawn at once


@dataclass(frozen=True)
class Case:
    """Sizes and what shapes the contents.

    valid: valid indices of each token; empty: topk for all (as many as the cache has rows).
    law: contest (even tokens a contiguous run, odd ones random distinct positions); uniform (random
    distinct positions of the cache); local (of one context of LOCAL_PAGES pages); repeated (few
    positions, each many times).
    padding: prefix (valid indices first, then -1); scattered (-1 anywhere); outside (scattered,
    with indices below -1 and beyond the cache).
    contents: normal; huge (logits near 1e4); identical (every cache row the same); poisoned (NaN
    in every row that no valid index names).
    layout: contiguous; packed (both caches views of one [pages, page_size, ckv + kpe] buffer, the
    queries of one projection, the indices of a wider table); padded (gaps between rows and pages).
    """

    name: str
    num_tokens: int
    seed: int = 0
    num_qo_heads: int = 16
    head_dim_ckv: int = 512
    head_dim_kpe: int = 64
    page_size: int = 64
    topk: int = 2048
    num_pages: int = 8462
    valid: tuple[int, ...] = ()
    law: str = "uniform"
    padding: str = "prefix"
    contents: str = "normal"
    layout: str = "contiguous"
    lse_base: Literal[2, "e"] = 2
    mode: str = "default"
    source: str = ""

    @property
    def axes(self) -> dict[str, int]:
        return {
            "num_tokens": self.num_tokens,
            "num_qo_heads": self.num_qo_heads,
            "head_dim_ckv": self.head_dim_ckv,
            "head_dim_kpe": self.head_dim_kpe,
            "page_size": self.page_size,
            "topk": self.topk,
            "num_pages": self.num_pages,
        }

    @property
    def num_rows(self) -> int:
        return self.num_pages * self.page_size

    @property
    def num_valid(self) -> tuple[int, ...]:
        """Valid indices of each token."""
        full = self.topk if self.law == "repeated" else min(self.topk, self.num_rows)
        return self.valid or (full,) * self.num_tokens


def make_inputs(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """Inputs of a case, drawn on the CPU in the definition's order, then moved to `device`."""
    rng = generator(case.seed)
    T, H = case.num_tokens, case.num_qo_heads
    q_nope = torch.randn(T, H, case.head_dim_ckv, generator=rng).bfloat16()
    q_pe = torch.randn(T, H, case.head_dim_kpe, generator=rng).bfloat16()
    if case.contents == "huge":
        q_nope, q_pe = q_nope * HUGE, q_pe * HUGE
    ckv, kpe = _draw_caches(case, rng)
    indices = _draw_indices(case, rng)
    if case.contents == "poisoned":
        _poison(ckv, kpe, indices)
    if case.layout == "packed":
        caches = torch.cat([ckv, kpe], dim=2).to(device)
        queries = torch.cat([q_nope, q_pe], dim=2).to(device)
        table = torch.nn.functional.pad(indices, (0, 8)).to(device)
        widths = [case.head_dim_ckv, case.head_dim_kpe]
        (ckv, kpe), (q_nope, q_pe) = caches.split(widths, dim=2), queries.split(widths, dim=2)
        indices = table[:, : case.topk]
    elif case.layout == "padded":
        ckv, kpe = (_padded(cache).to(device)[:-1, :-1, :-8] for cache in (ckv, kpe))
    elif case.layout != "contiguous":
        raise ValueError(f"unknown layout {case.layout!r}")
    return Inputs(
        q_nope.to(device),
        q_pe.to(device),
        ckv.to(device),
        kpe.to(device),
        indices.to(device),
        sm_scale=1.0 / math.sqrt(192.0),
        lse_base=case.lse_base,
    )


def _draw_caches(case: Case, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    caches = []
    for width in (case.head_dim_ckv, case.head_dim_kpe):
        shape = (case.num_pages, case.page_size, width)
        if case.contents == "identical":
            row = torch.randn(width, generator=rng).bfloat16()
            caches.append(row.expand(shape).contiguous())
            continue
        cache = torch.empty(shape, dtype=torch.bfloat16)
        flat = cache.view(-1)
        for first in range(0, flat.numel(), _CHUNK):
            chunk = flat[first : first + _CHUNK]
            chunk.copy_(torch.randn(chunk.shape, generator=rng))
        caches.append(cache)
    return caches[0], caches[1]


def _padded(cache: torch.Tensor) -> torch.Tensor:
    """One page, one row a page and 8 values a row more than asked for, all NaN."""
    return torch.nn.functional.pad(cache, (0, 8, 0, 1, 0, 1), value=math.nan)


def _poison(ckv: torch.Tensor, kpe: torch.Tensor, indices: torch.Tensor) -> None:
    num_rows = ckv.shape[0] * ckv.shape[1]
    named = torch.zeros(num_rows, dtype=torch.bool)
    named[indices[(indices >= 0) & (indices < num_rows)].long()] = True
    for cache in (ckv, kpe):
        cache.view(num_rows, -1)[~named] = math.nan


# ---- indices ------------------------------------------------------------------------------------


def _draw_indices(case: Case, rng: torch.Generator) -> torch.Tensor:
    indices = torch.full((case.num_tokens, case.topk), -1, dtype=torch.int32)
    context = distinct(case.num_pages, min(LOCAL_PAGES, case.num_pages), rng)
    for token, count in enumerate(case.num_valid):
        if case.padding == "outside":
            outside = (-2, INT32.min, INT32.max, case.num_rows, case.num_rows + 5, -1)
            repeats = -(-case.topk // len(outside))
            indices[token] = torch.tensor(outside, dtype=torch.int32).repeat(repeats)[: case.topk]
        if count == 0:
            continue
        slots = torch.arange(count)
        if case.padding != "prefix":
            slots = distinct(case.topk, count, rng)
        indices[token, slots] = _positions(case, token, count, context, rng).int()
    return indices


def _positions(
    case: Case, token: int, count: int, context: torch.Tensor, rng: torch.Generator
) -> torch.Tensor:
    if case.law == "repeated":
        few = distinct(case.num_rows, min(7, case.num_rows), rng)
        return few[torch.randint(few.numel(), (count,), generator=rng)]
    if case.law == "local":
        inside = distinct(context.numel() * case.page_size, count, rng)
        return context[inside // case.page_size] * case.page_size + inside % case.page_size
    if case.law == "contest" and token % 2 == 0:
        start = torch.randint(case.num_rows - count + 1, (), generator=rng)
        return start + torch.arange(count)
    if case.law in ("contest", "uniform"):
        return distinct(case.num_rows, count, rng)
    raise ValueError(f"unknown law {case.law!r}")


def distinct(size: int, count: int, rng: torch.Generator) -> torch.Tensor:
    """`count` distinct integers of range(size), uniform and in random order."""
    if count > size:
        raise ValueError(f"{count} distinct positions out of {size}")
    if 4 * count >= size:
        return torch.randperm(size, generator=rng)[:count]
    # Rejection: a permutation of the whole cache for every token would take minutes at 4096 tokens.
    found = torch.empty(0, dtype=torch.int64)
    while found.numel() < count:
        found = torch.randint(size, (2 * count,), generator=rng).unique()
    return found[torch.randperm(found.numel(), generator=rng)[:count]]


# ---- lists --------------------------------------------------------------------------------------

_SMALL = 64  # pages: 4096 rows

CORRECTNESS = (
    Case("t1", 1, seed=1, num_pages=_SMALL),
    Case("t2-contest", 2, seed=2, num_pages=_SMALL, valid=(106, 2048), law="contest"),
    Case("t8-contest", 8, seed=3, num_pages=_SMALL, law="contest",
         valid=(29, 19, 121, 1997, 333, 692, 1, 0)),
    Case("t17", 17, seed=4, num_pages=_SMALL, valid=(64,) * 16 + (2048,)),
    Case("h128", 2, seed=5, num_qo_heads=128, num_pages=_SMALL, valid=(2048, 700)),
    Case("k64-page16", 65, seed=6, num_pages=32, page_size=16, topk=64, num_qo_heads=8),
    Case("k4096", 1, seed=7, num_pages=_SMALL + 1, topk=4096, num_qo_heads=4),
    Case("odd", 5, seed=8, num_qo_heads=3, head_dim_ckv=40, head_dim_kpe=9, page_size=7, topk=13,
         num_pages=5),
)  # fmt: skip

CORNER = (
    Case("empty", 0, num_pages=_SMALL),
    Case("one-index", 1, seed=11, num_pages=_SMALL, valid=(1,)),
    Case("tail", 17, seed=27, num_pages=_SMALL, topk=193, valid=(193, 0, 65) * 5 + (64, 1)),
    Case("topk-1", 3, seed=12, num_pages=_SMALL, topk=1),
    Case("all-invalid", 2, seed=13, num_pages=_SMALL, valid=(0, 0)),
    Case("first-invalid", 2, seed=14, num_pages=_SMALL, valid=(0, 300)),
    Case("scattered", 3, seed=15, num_pages=_SMALL, valid=(5, 1024, 2047), padding="scattered"),
    Case("outside", 3, seed=16, num_pages=_SMALL, valid=(0, 7, 1500), padding="outside"),
    Case("repeated", 2, seed=17, num_pages=_SMALL, valid=(2048, 9), law="repeated"),
    Case("huge", 3, seed=18, num_pages=_SMALL, valid=(2048, 33, 1), contents="huge"),
    Case("identical", 2, seed=19, num_pages=_SMALL, contents="identical"),
    Case("poisoned", 3, seed=20, num_pages=_SMALL, valid=(0, 40, 1), padding="outside",
         contents="poisoned"),
    Case("strided-packed", 3, seed=21, num_pages=_SMALL, valid=(2048, 0, 77), layout="packed"),
    Case("strided-padded", 3, seed=22, num_pages=_SMALL, valid=(2048, 0, 77), layout="padded"),
    Case("no-pages", 3, seed=23, num_pages=0, padding="outside"),
    Case("one-page", 2, seed=24, num_pages=1, valid=(64, 3)),
    Case("natural-lse", 2, seed=25, num_pages=_SMALL, valid=(2048, 0), lse_base="e"),
    Case("largest", 24, seed=26, num_pages=_SMALL),
)  # fmt: skip

CONTEST = tuple(
    Case(
        f"contest-{w['uuid'][:8]}",
        num_tokens=w["axes"]["num_tokens"],
        num_pages=w["axes"]["num_pages"],
        seed=contest_seed(w),
        valid=tuple(w["draw"]["valid"]),
        law="contest",
        source=w["uuid"],
    )
    for w in contest_workloads("dsa_sparse_attention")
)

SERVING = tuple(
    Case(f"serving-{law}-t{tokens}", tokens, seed=1000 + tokens, law=law)
    for law in ("local", "uniform")
    for tokens in (8, 16, 32, 64, 128, 256, 512, 1024, 4096)
)


def gap_cases(table: Table | None, seed: int = 0) -> list[Case]:
    """Token and page counts around every regime boundary, and one token count between any two."""
    rng = random.Random(seed)
    tokens = gap_values(table, "num_tokens", at_least=1)
    between = [rng.randint(low + 1, high - 1) for low, high in pairwise(tokens) if high - low > 1]
    cases = [
        Case(
            f"gap-t{count}", count, seed=rng.randrange(2**31), law=rng.choice(("local", "uniform"))
        )
        for count in (*tokens, *between)
    ]
    cases += [
        Case(f"gap-p{pages}", rng.randint(1, 16), seed=rng.randrange(2**31), num_pages=pages)
        for pages in gap_values(table, "num_pages", at_least=0)
        if pages <= MAX_GAP_PAGES
    ]
    return cases
