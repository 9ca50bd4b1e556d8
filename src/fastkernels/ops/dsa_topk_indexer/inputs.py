"""Seeded inputs of dsa_topk_indexer, and the lists of cases."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import pairwise

import torch

from fastkernels.core.table import Table, gap_values
from fastkernels.ops._shared.cases import contest_seed, contest_workloads, generator, move
from fastkernels.ops.dsa_topk_indexer.problem import Inputs
from fastkernels.ops.dsa_topk_indexer.spec import (
    KEY_BYTES,
    PAGE_BYTES,
    PAGE_KEY_BYTES,
    PAGE_SIZE,
)

INT32 = torch.iinfo(torch.int32)
E4M3_MAX = 448.0
E4M3_NAN = 0x7F
PAGE_GAP = 64  # bytes between pages of a padded cache
MAX_GAP_POSITIONS = 2**20  # a gap case scores no more than this in all rows together
CONTEST_PAGES = 11923
_CHUNK_PAGES = 512  # drawn at once


@dataclass(frozen=True)
class Case:
    """Sizes and what shapes the contents.

    seq_lens: of every row, as they stand in the tensor (they may be out of range).
    keys: normal; lognormal (norms e**N(0, 1), so that scales differ by token); equal (every score
    the same non-zero number, exactly, in any order of summation); zero (every score exactly 0);
    plateau (as zero, but every third position normal); crowded (one key with 0.1 % noise);
    nonfinite (NaN key bytes, NaN and infinite scales here and there; weights of rows 1, 2, 3 with a
    NaN, inf, -inf); signed (half of the scales negative).
    weights: normal; negative (and every fourth 0).
    pages: distinct; repeated (each page listed twice in its row); invalid (every third used entry
    is negative or beyond the cache).
    tail: what unused block-table entries hold: zero; junk (-1, num_pages, 10**6, ..).
    poisoned: NaN in every position that no row reaches.
    layout: contiguous; strided (a gap after every page, seq_lens and block table every second
    element, queries and weights of wider tensors).
    """

    name: str
    seq_lens: tuple[int, ...]
    max_num_pages: int
    num_pages: int = CONTEST_PAGES
    seed: int = 0
    num_index_heads: int = 64
    topk: int = 2048
    keys: str = "normal"
    weights: str = "normal"
    pages: str = "distinct"
    tail: str = "zero"
    poisoned: bool = False
    layout: str = "contiguous"
    cache_dtype: str = "int8"
    mode: str = "default"
    source: str = ""

    @property
    def batch_size(self) -> int:
        return len(self.seq_lens)

    @property
    def axes(self) -> dict[str, int]:
        return {
            "batch_size": self.batch_size,
            "num_index_heads": self.num_index_heads,
            "topk": self.topk,
            "max_num_pages": self.max_num_pages,
            "num_pages": self.num_pages,
        }

    def used_pages(self, row: int) -> int:
        """Block-table entries of a row that its (clamped) length reaches."""
        length = min(max(self.seq_lens[row], 0), self.max_num_pages * PAGE_SIZE)
        return -(-length // PAGE_SIZE)


def make_inputs(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """Inputs of a case, drawn on the CPU in the definition's order, then moved to `device`."""
    rng = generator(case.seed)
    B, H = case.batch_size, case.num_index_heads
    q = torch.randn(B, H, KEY_BYTES, generator=rng).clamp(-2.0, 2.0)
    if case.keys == "equal":
        q = torch.ones_like(q)
    elif case.keys in ("zero", "plateau"):
        q = q.abs().clamp(min=0.25)
    cache = _draw_cache(case, rng)
    weights = _draw_weights(case, rng)
    seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32)
    table = _draw_table(case, rng)
    if case.poisoned:
        _poison(cache, seq_lens, table)
    q = q.to(torch.float8_e4m3fn)
    if case.layout == "strided":
        cache = torch.nn.functional.pad(cache, (0, PAGE_GAP), value=E4M3_NAN)[:, :PAGE_BYTES]
        q = torch.cat([q, q], dim=1)[:, :H]
        weights = torch.cat([weights, weights], dim=1)[:, :H]
        seq_lens = torch.stack([seq_lens, torch.full_like(seq_lens, INT32.max)], dim=1)[:, 0]
        table = torch.stack([table, torch.full_like(table, INT32.min)], dim=2)[:, :, 0]
    elif case.layout != "contiguous":
        raise ValueError(f"unknown layout {case.layout!r}")
    pages = cache.view(getattr(torch, case.cache_dtype)).unflatten(1, (PAGE_SIZE, 1, -1))
    return Inputs(
        move(q, device),
        move(pages, device),
        move(weights, device),
        move(seq_lens, device),
        move(table, device),
        case.topk,
    )


# ---- cache --------------------------------------------------------------------------------------


def pack_pages(keys: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Bytes [pages, 8448] uint8 of e4m3 keys [pages * 64, 128] and float32 scales [pages * 64]."""
    key_bytes = keys.view(torch.uint8).reshape(-1, PAGE_KEY_BYTES)
    scale_bytes = scales.view(torch.uint8).reshape(key_bytes.shape[0], -1)
    return torch.cat([key_bytes, scale_bytes], dim=1)


def quantise(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`(e4m3 keys, float32 scales)` of float32 keys [n, 128], each scaled by its amax / 448."""
    scales = keys.abs().amax(1) / E4M3_MAX
    return (keys / scales[:, None]).to(torch.float8_e4m3fn), scales


def _draw_cache(case: Case, rng: torch.Generator) -> torch.Tensor:
    """[num_pages, 8448] uint8."""
    cache = torch.empty((case.num_pages, PAGE_BYTES), dtype=torch.uint8)
    centre = torch.randn(KEY_BYTES, generator=rng)
    for first in range(0, case.num_pages, _CHUNK_PAGES):
        chunk = cache[first : first + _CHUNK_PAGES]
        keys = torch.randn(chunk.shape[0] * PAGE_SIZE, KEY_BYTES, generator=rng)
        if case.keys == "lognormal":
            keys *= torch.randn(keys.shape[0], 1, generator=rng).exp()
        elif case.keys == "equal":
            keys = torch.ones_like(keys)
        elif case.keys == "zero":
            keys = -keys.abs().clamp(min=0.25)
        elif case.keys == "plateau":
            is_normal = torch.arange(keys.shape[0])[:, None] % 3 == 0
            keys = torch.where(is_normal, keys, -keys.abs().clamp(min=0.25))
        elif case.keys == "crowded":
            keys = centre * (1.0 + 1e-3 * keys)
        elif case.keys not in ("normal", "nonfinite", "signed"):
            raise ValueError(f"unknown keys {case.keys!r}")
        quantised, scales = quantise(keys)
        if case.keys == "signed":
            scales[::2] *= -1.0
        elif case.keys == "nonfinite":
            quantised.view(torch.uint8)[7::101, 5] = E4M3_NAN
            quantised.view(torch.uint8)[9::103, 127] = E4M3_NAN | 0x80
            scales[3::97], scales[5::89], scales[11::83] = math.nan, math.inf, -math.inf
        chunk.copy_(pack_pages(quantised, scales))
    return cache


def _poison(cache: torch.Tensor, seq_lens: torch.Tensor, table: torch.Tensor) -> None:
    num_pages, max_num_pages = cache.shape[0], table.shape[1]
    position = torch.arange(max_num_pages * PAGE_SIZE)
    entries = table.long().repeat_interleave(PAGE_SIZE, dim=1)
    is_reached = (position < seq_lens[:, None]) & (entries >= 0) & (entries < num_pages)
    reached = (entries * PAGE_SIZE + position % PAGE_SIZE)[is_reached]
    is_free = torch.ones(num_pages * PAGE_SIZE, dtype=torch.bool)
    is_free[reached] = False
    keys = cache[:, :PAGE_KEY_BYTES].unflatten(1, (PAGE_SIZE, KEY_BYTES))
    keys[is_free.view(num_pages, PAGE_SIZE)] = E4M3_NAN
    scales = cache[:, PAGE_KEY_BYTES:].unflatten(1, (PAGE_SIZE, 4))
    scales[is_free.view(num_pages, PAGE_SIZE)] = 0xFF  # NaN, too


# ---- weights and block table --------------------------------------------------------------------


def _draw_weights(case: Case, rng: torch.Generator) -> torch.Tensor:
    weights = torch.randn(case.batch_size, case.num_index_heads, generator=rng)
    if case.keys == "equal":
        weights = torch.ones_like(weights)
    if case.weights == "negative":
        weights = -weights.abs()
        weights[:, ::4] = 0.0
    elif case.weights != "normal":
        raise ValueError(f"unknown weights {case.weights!r}")
    if case.keys == "nonfinite":
        for row, value in enumerate((math.nan, math.inf, -math.inf), start=1):
            weights[row : row + 1, row] = value
    return weights


def _draw_table(case: Case, rng: torch.Generator) -> torch.Tensor:
    """Rows take pages of one random permutation of the cache, which starts over when used up."""
    table = torch.zeros((case.batch_size, case.max_num_pages), dtype=torch.int32)
    if case.tail == "junk":
        junk = (-1, case.num_pages, 10**6, INT32.min, INT32.max)
        repeats = -(-case.max_num_pages // len(junk))
        table[:] = torch.tensor(junk, dtype=torch.int32).repeat(repeats)[: case.max_num_pages]
    elif case.tail != "zero":
        raise ValueError(f"unknown tail {case.tail!r}")
    permutation = torch.randperm(max(case.num_pages, 1), generator=rng).int()
    taken = 0
    for row in range(case.batch_size):
        used = case.used_pages(row)
        entries = permutation[(taken + torch.arange(used)) % permutation.numel()]
        taken += used
        if case.pages == "repeated":
            entries = entries[torch.arange(used) // 2]
        elif case.pages == "invalid":
            outside = torch.tensor([-1, case.num_pages, INT32.min, INT32.max], dtype=torch.int32)
            entries[::3] = outside[torch.arange(entries[::3].numel()) % 4]
        elif case.pages != "distinct":
            raise ValueError(f"unknown pages {case.pages!r}")
        table[row, :used] = entries
    return table


# ---- lists --------------------------------------------------------------------------------------

_SMALL = 256  # pages
_SHORT = (0, 1, 2047, 2048, 2049, 2112)

CORRECTNESS = (
    Case("b1-one-page", (61,), 1, _SMALL, seed=1),
    Case("b2-short", (301, 320), 5, _SMALL, seed=2),
    Case("b1-long", (5806,), 91, _SMALL, seed=3),
    Case("b3-long", (8192, 2049, 4000), 128, _SMALL, seed=4),
    Case("b9-mixed", (8, 2900, 507, 226, 2048, 11, 3, 79, 2112), 46, _SMALL, seed=5),
    Case("lognormal", (4096, 3000), 64, _SMALL, seed=6, keys="lognormal"),
    Case("h32-topk512", (1700, 513, 512), 27, _SMALL, seed=7, num_index_heads=32, topk=512),
    Case("h3-topk1", (700, 1, 0), 11, _SMALL, seed=8, num_index_heads=3, topk=1),
    Case("topk-3000", (4000, 2999), 63, _SMALL, seed=9, num_index_heads=8, topk=3000),
)

CORNER = (
    Case("empty", (), 5, _SMALL),
    Case("one", (1,), 1, _SMALL, seed=11),
    Case("short", _SHORT, 33, _SMALL, seed=12),
    Case("no-positions", (0, 0), 40, _SMALL, seed=13, tail="junk"),
    Case("no-columns", (0, 5), 0, _SMALL, seed=14),
    Case("no-pages", (2500, 64), 40, 0, seed=15),
    Case("topk-beyond", (129, 192), 3, _SMALL, seed=16),
    Case("impossible-lengths", (-1, INT32.min, 2113, INT32.max), 33, _SMALL, seed=17),
    Case("equal", (2500, 2048), 40, _SMALL, seed=18, keys="equal"),
    Case("zero", (3000, 2049), 47, _SMALL, seed=19, keys="zero"),
    Case("plateau", (5000, 2049), 79, _SMALL, seed=20, keys="plateau"),
    Case("zero-weights", (2500,), 40, _SMALL, seed=21, keys="signed", weights="negative"),
    Case("crowded", (12000,), 188, _SMALL, seed=22, keys="crowded"),
    Case("nonfinite", (2600, 2600, 2600, 2600, 2600), 41, _SMALL, seed=23, keys="nonfinite"),
    Case("nonfinite-topk32", (2600, 2600, 40), 41, _SMALL, seed=24, keys="nonfinite", topk=32),
    Case("signed", (2700, 100), 43, _SMALL, seed=25, keys="signed"),
    Case("repeated-pages", (4096, 100), 64, _SMALL, seed=26, pages="repeated"),
    Case("invalid-pages", (4096, 2048, 30), 64, _SMALL, seed=27, pages="invalid"),
    Case("junk-tail", (65, 2049, 0), 50, _SMALL, seed=28, tail="junk"),
    Case("poisoned", (65, 2049, 130), 50, _SMALL, seed=29, tail="junk", poisoned=True),
    Case("strided", (2500, 65, 0), 40, _SMALL, seed=30, layout="strided"),
    Case("uint8", (2500,), 40, _SMALL, seed=31, cache_dtype="uint8"),
    Case("largest", (16384,) + (33,) * 12, 256, _SMALL, seed=32),
)

CONTEST = tuple(
    Case(
        f"contest-{w['uuid'][:8]}",
        seq_lens=tuple(w["draw"]["seq_lens"]),
        max_num_pages=w["axes"]["max_num_pages"],
        num_pages=w["axes"]["num_pages"],
        seed=contest_seed(w),
        source=w["uuid"],
    )
    for w in contest_workloads("dsa_topk_indexer")
)


def _full_rows(name: str, rows: int, length: int, seed: int) -> Case:
    pages = -(-length // PAGE_SIZE)
    return Case(name, (length,) * rows, pages, max(CONTEST_PAGES, rows * pages), seed)


SERVING = tuple(
    _full_rows(f"serving-b{rows}-{length}", rows, length, seed=1000 + rows)
    for rows, length in (
        (31, 5806),
        (64, 8192),
        (128, 8192),
        (64, 32768),
        (1, 131072),
        (8, 131072),
    )
)


def gap_cases(table: Table | None, seed: int) -> list[Case]:
    """Row counts, widths and cache sizes around every regime boundary, one at a time beside seeded
    values of the others, and one seeded row count and width between any two."""
    rng = random.Random(seed)
    batches = _with_samples(gap_values(table, "batch_size", at_least=1), rng)
    widths = _with_samples(gap_values(table, "max_num_pages", at_least=1), rng)
    sizes = [(rows, rng.choice((33, 91, 128))) for rows in batches]
    sizes += [(rng.choice((1, 4, 31)), width) for width in widths]
    cases = [
        _gap_case(f"gap-b{rows}-m{width}", rows, width, CONTEST_PAGES, rng) for rows, width in sizes
    ]
    cases += [
        _gap_case(f"gap-p{pages}", 4, 91, pages, rng)
        for pages in gap_values(table, "num_pages")
        if pages * PAGE_SIZE <= MAX_GAP_POSITIONS
    ]
    return cases


def _with_samples(values: list[int], rng: random.Random) -> list[int]:
    between = [rng.randint(a + 1, b - 1) for a, b in pairwise(values) if b - a > 1]
    return [*values, *between]


def _gap_case(name: str, rows: int, width: int, pages: int, rng: random.Random) -> Case:
    """The first row is full, the others have any length, as far as MAX_GAP_POSITIONS reaches."""
    full = width * PAGE_SIZE
    share = max(MAX_GAP_POSITIONS // rows, PAGE_SIZE)
    lengths = (full, *(rng.randint(0, min(full, share)) for _ in range(rows - 1)))
    return Case(name, lengths, width, pages, rng.randrange(2**31))
