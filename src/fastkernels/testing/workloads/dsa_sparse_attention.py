"""dsa_sparse_attention: rows, inputs and float64 results on the device, bytes.

The caches of the contest are 624 MB. Drawing them takes 3 s of a CPU and a few milliseconds of a
GPU, so that only the contest's own draws come from the CPU.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch

from fastkernels import catalog
from fastkernels.core import dispatch
from fastkernels.core.device import DeviceInfo
from fastkernels.core.route import Operator
from fastkernels.ops.dsa_sparse_attention.inputs import (
    CONTEST,
    LOCAL_PAGES,
    SERVING,
    Case,
    gap_cases,
    make_inputs,
)
from fastkernels.ops.dsa_sparse_attention.problem import Inputs
from fastkernels.ops.dsa_sparse_attention.reference import LOGIT_SLACK, Expected, reference
from fastkernels.testing.workloads.generic import Generic

_generic = Generic(catalog.operator("dsa_sparse_attention"))

# Rows of the gap list: with two axes, a table has more boundaries than anyone has time for.
MOST_GAP_ROWS = 24
LARGEST_GAP_TOKENS = 8192
# (tokens, pages) of a sweep beyond the lists, up to where a table shall reach: few and many tokens
# on a cache that lies in the L2, and on one of 8 million rows.
BEYOND = (
    (1, 8462), (2, 8462), (4, 8462), (12, 8462), (24, 8462), (48, 8462), (96, 8462), (192, 8462),
    (2048, 8462), (16384, 8462), (1, 32), (512, 32), (1, 131072), (4096, 131072),
)  # fmt: skip
# Heads of TP 16, 4, 2 and 1 (TP 8 is the definition itself), shorter selections, a flat cache.
OTHER_CONSTANTS: tuple[dict[str, int], ...] = (
    {"num_qo_heads": 8},
    {"num_qo_heads": 32},
    {"num_qo_heads": 64},
    {"num_qo_heads": 128},
    {"topk": 512},
    {"topk": 1024},
    {"page_size": 1, "num_pages": 64 * 8462},
)
# Both ends first: a table needs them, should the time run out in between.
OTHER_TOKENS = (1, 4096, 8, 32, 128, 512)
# The oracle takes 30 ms of a CPU for a token of 16 heads with 2048 valid indices.
ORACLE_TOKENS = 32


def rows(
    operator: Operator, device: DeviceInfo, modes: Sequence[str]
) -> Iterator[tuple[str, Case]]:
    """Contest and serving rows, then what lies around the boundaries of the device's table for the
    definition's constants."""
    table, _ = dispatch.find_table(operator, device)
    if table is not None:
        own = tuple(regime for regime in table.regimes if not regime.constants)
        table = dataclasses.replace(table, regimes=own)
    gap = [
        case
        for case in gap_cases(table)
        if 0 < case.num_tokens <= LARGEST_GAP_TOKENS and case.num_pages > 0
    ]
    step = max(1, -(-len(gap) // MOST_GAP_ROWS))
    for listed, cases in (("contest", CONTEST), ("serving", SERVING), ("gap", gap[::step])):
        yield from ((listed, case) for case in cases if case.mode in modes)


def sweep_rows(modes: Sequence[str]) -> Iterator[tuple[str, Case]]:
    """The lists, whose rows of one size differ in their valid indices, and sizes beyond; then few
    sizes with each other choice of constants."""
    found: list[tuple[str, Case]] = [("contest", case) for case in CONTEST]
    found += [("serving", case) for case in SERVING]
    for tokens, pages in BEYOND:
        name = f"t{tokens}-p{pages}"
        found.append(("serving", Case(name, tokens, seed=2000 + tokens, num_pages=pages)))
    for constants in OTHER_CONSTANTS:
        label = "-".join(f"{name}{size}" for name, size in constants.items())
        for tokens in OTHER_TOKENS:
            case = Case(f"t{tokens}-{label}", tokens, seed=3000 + tokens)
            found.append(("serving", dataclasses.replace(case, **constants)))  # type: ignore[arg-type]
    yield from (each for each in found if each[1].mode in modes)


def details(case: Case) -> dict[str, int]:
    """Valid indices of all tokens together, and of the one with most."""
    return {"valid": sum(case.num_valid), "longest": max(case.num_valid, default=0)}


# ---- inputs -------------------------------------------------------------------------------------

updates = _generic.updates
live = _generic.live
restore = _generic.restore
outputs = _generic.outputs

# Values drawn at once: 256 MB of float32 beside the cache that they become.
_CHUNK = 1 << 26


def own_inputs(case: Case, device: torch.device) -> Inputs:
    """The contest's draws as everybody has them, from the CPU; others on the device."""
    if case.source:
        return make_inputs(case, device)
    return fresh_inputs(case, case.seed, device)


def fresh_inputs(case: Case, seed: int, device: torch.device) -> Inputs:
    """By the case's law, with its numbers of valid indices, on the device: other numbers than the
    CPU's from equal seeds. Cases that shape their contents are drawn on the CPU."""
    if _shapes_contents(case):
        return make_inputs(dataclasses.replace(case, seed=seed), device)
    rng = torch.Generator(device).manual_seed(seed)
    T, H = case.num_tokens, case.num_qo_heads
    pages = case.num_pages, case.page_size
    return Inputs(
        _normal((T, H, case.head_dim_ckv), rng),
        _normal((T, H, case.head_dim_kpe), rng),
        _normal((*pages, case.head_dim_ckv), rng),
        _normal((*pages, case.head_dim_kpe), rng),
        _draw_indices(case, rng),
        sm_scale=1.0 / math.sqrt(192.0),
        lse_base=case.lse_base,
    )


def _shapes_contents(case: Case) -> bool:
    """Whether a case wants other contents than the contest's and the serving shapes'."""
    plain = (case.padding, case.contents, case.layout) == (Case.padding, Case.contents, Case.layout)
    return not plain or case.law not in ("contest", "local", "uniform")


def _normal(shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    """bfloat16, rounded from float32: on a CPU torch's own bfloat16 draws have infinities."""
    drawn = torch.empty(shape, dtype=torch.bfloat16, device=rng.device)
    for chunk in drawn.view(-1).split(_CHUNK):
        chunk.copy_(torch.randn(chunk.shape, generator=rng, device=rng.device))
    return drawn


def _draw_indices(case: Case, rng: torch.Generator) -> torch.Tensor:
    """[T, K] int32: each token's valid indices as a prefix, then -1."""
    device, T = rng.device, case.num_tokens
    indices = torch.full((T, case.topk), -1, dtype=torch.int32, device=device)
    longest = max(case.num_valid, default=0)
    if longest == 0:
        return indices
    counts = torch.tensor(case.num_valid, device=device)[:, None]
    columns = torch.arange(longest, device=device)
    if case.law == "local":
        context = torch.randperm(case.num_pages, generator=rng, device=device)[:LOCAL_PAGES]
        inside = _distinct(T, context.numel() * case.page_size, longest, rng)
        found = context[inside // case.page_size] * case.page_size + inside % case.page_size
    else:
        found = _distinct(T, case.num_rows, longest, rng)
    if case.law == "contest":  # even tokens: a run
        start = torch.rand(T, 1, dtype=torch.float64, generator=rng, device=device)
        runs = (start * (case.num_rows - counts + 1)).long() + columns
        found[::2] = runs[::2]
    indices[:, :longest] = torch.where(columns < counts, found, -1)
    return indices


def _distinct(rows: int, size: int, count: int, rng: torch.Generator) -> torch.Tensor:
    """[rows, count]: in each row distinct integers of range(size), uniform and in random order."""
    device = rng.device
    if 16 * count >= size:
        keys = torch.rand(rows, size, generator=rng, device=device)
        return keys.argsort(dim=1)[:, :count]
    # A permutation of the whole cache for each of 4096 tokens would not fit. Of an eighth more
    # draws than needed at most about 4 % repeat others; the 64 are for small counts.
    drawn = torch.randint(size, (rows, count + count // 8 + 64), generator=rng, device=device)
    ordered, order = drawn.sort(dim=1, stable=True)
    is_repeated = torch.zeros_like(drawn, dtype=torch.bool)
    is_repeated.scatter_(1, order[:, 1:], ordered[:, 1:] == ordered[:, :-1])
    first = is_repeated.byte().sort(dim=1, stable=True).indices[:, :count]
    return drawn.gather(1, first)


# ---- results ------------------------------------------------------------------------------------

# Of gathered rows in float64: 56 tokens of 2048 indices at once.
_GATHERED_BYTES = 1 << 29


def expect_by_oracle(many: Sequence[Inputs]) -> list[Expected]:
    return [reference(inputs) for inputs in many]


def join(inputs: Sequence[Inputs]) -> None:
    """Each call has caches of its own."""


def expect(inputs: Inputs) -> Expected:
    """`reference.py` for blocks of tokens, on the inputs' device; tests compare the two."""
    num_tokens, num_heads, width = inputs.q_nope.shape
    num_pages, page_size, _ = inputs.ckv_cache.shape
    topk, key_width = inputs.sparse_indices.shape[1], width + inputs.q_pe.shape[2]
    with torch.device(inputs.q_nope.device):
        output = torch.zeros(num_tokens, num_heads, width, dtype=torch.float64)
        kappa = torch.zeros_like(output)
        lse = torch.full((num_tokens, num_heads), -math.inf, dtype=torch.float64)
        slack = torch.zeros_like(lse)
    block = max(1, _GATHERED_BYTES // (8 * topk * key_width))
    for first in range(0, num_tokens if num_pages * page_size else 0, block):
        tokens = slice(first, first + block)
        output[tokens], kappa[tokens], lse[tokens], slack[tokens] = _attend(inputs, tokens)
    if inputs.lse_base == 2:
        lse /= math.log(2.0)
    return Expected(output, lse, kappa, slack.nan_to_num_(nan=0.0, posinf=0.0))


def _attend(
    inputs: Inputs, tokens: slice
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(output, kappa [t, H, D], natural lse, slack [t, H])` of a block of tokens."""
    num_pages, page_size, _ = inputs.ckv_cache.shape
    scale, rows = inputs.sm_scale, inputs.sparse_indices[tokens].long()
    is_padding = (rows < 0) | (rows >= num_pages * page_size)
    rows.masked_fill_(is_padding, 0)
    ckv, kpe = (
        # Padding named row 0, where there may be a NaN.
        cache[rows // page_size, rows % page_size].double().masked_fill_(is_padding[..., None], 0.0)
        for cache in (inputs.ckv_cache, inputs.kpe_cache)
    )  # [t, K, D]
    q_nope, q_pe = inputs.q_nope[tokens].double(), inputs.q_pe[tokens].double()
    logits = (q_nope @ ckv.mT).baddbmm_(q_pe, kpe.mT).mul_(scale)  # [t, H, K]
    logits.masked_fill_(is_padding[:, None], -math.inf)
    lse = logits.logsumexp(dim=-1)
    # Without a valid index: exp(-inf - 0) instead of exp(-inf + inf).
    weights = logits.sub_(lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp_()
    output = weights @ ckv
    ckv.abs_()
    magnitude = (q_nope.abs() @ ckv.mT).baddbmm_(q_pe.abs(), kpe.abs_().mT)
    return output, weights @ ckv, lse, LOGIT_SLACK * abs(scale) * magnitude.amax(dim=-1)


def oracle(case: Case) -> bool:
    return case.num_tokens * case.num_qo_heads <= ORACLE_TOKENS * 16


# ---- bytes --------------------------------------------------------------------------------------


def moved_bytes(case: Case) -> int:
    """Each row of the caches that a token names once, queries, indices and outputs. How many rows
    those are is what the law makes one expect: draws of the lists differ by less than 1 %."""
    row = 2 * (case.head_dim_ckv + case.head_dim_kpe)
    size = min(case.num_pages, LOCAL_PAGES) * case.page_size
    size = size if case.law == "local" else case.num_rows
    unnamed = math.prod(1.0 - count / size for count in case.num_valid if count)
    return round(size * (1.0 - unnamed)) * row + _call_bytes(case)


def _call_bytes(case: Case) -> int:
    """Queries, indices, output and lse."""
    T, H = case.num_tokens, case.num_qo_heads
    queries = 2 * T * H * (case.head_dim_ckv + case.head_dim_kpe)
    return queries + 4 * T * case.topk + T * H * (2 * case.head_dim_ckv + 4)


def held_bytes(case: Case, sets: int) -> int:
    """Device memory of `sets` input sets with outputs, float64 results, peers and floor, and of
    what judging needs for a while. An estimate from above."""
    caches = 2 * case.num_rows * (case.head_dim_ckv + case.head_dim_kpe)
    result = 8 * case.num_tokens * case.num_qo_heads * case.head_dim_ckv
    # Two peers keep concatenated caches; then a copy of one set, a fresh draw, and what a peer
    # adapts while it is timed.
    held = caches * (3 * sets + 3)
    # Ours, peers that adapt them and the floor; float64 results and norms, then the comparators'.
    held += 4 * sets * (_call_bytes(case) + moved_bytes(case)) + result * (2 * sets + 8)
    drawing = 64 * case.num_tokens * case.topk
    return held + drawing + 4 * _GATHERED_BYTES
