"""Inputs that implementations of dsa_topk_indexer get wrong, by name: what a candidate is judged on
beside its workloads. Where a list in `inputs` has them already, its case is taken."""

from __future__ import annotations

import torch

from fastkernels.ops._shared.adversarial import Draws
from fastkernels.ops.dsa_topk_indexer.inputs import CORNER, Case, make_inputs
from fastkernels.ops.dsa_topk_indexer.problem import Inputs
from fastkernels.ops.dsa_topk_indexer.reference import Row, reference
from fastkernels.ops.dsa_topk_indexer.spec import PAGE_BYTES, PAGE_KEY_BYTES, PAGE_SIZE, SPEC

MARGINS = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Score differences across the boundary of `near_ties`, a row each, in units of the band."""

BOUNDARY = 32
"""Positions on either side of it that have the same score."""


class Stratum(Draws):
    make_inputs = staticmethod(make_inputs)


def _listed(name: str) -> Stratum:
    return Stratum(next(case for case in CORNER if case.name == name))


# ---- scores made to order -----------------------------------------------------------------------
# A score is proportional to its position's scale, which is any float32. Rows have pages of their
# own, so that a scale belongs to one row.


def _scales(inputs: Inputs) -> torch.Tensor:
    """[num_pages, 64] float32: the cache's scales themselves."""
    pages = inputs.k_index_cache_fp8.view(-1, PAGE_BYTES)
    return pages[:, PAGE_KEY_BYTES:].view(torch.float32)


def _multiply(inputs: Inputs, indices: torch.Tensor, factors: torch.Tensor | float) -> None:
    """Scale the scores of some indices, in the cache itself."""
    scales, page, offset = _scales(inputs), indices // PAGE_SIZE, indices % PAGE_SIZE
    scales[page, offset] = (scales[page, offset] * factors).float()


def _set(inputs: Inputs, row: Row, scores: torch.Tensor) -> None:
    """Give the row's positions these scores, to a rounding of float32."""
    _multiply(inputs, row.indices, scores.double() / row.scores)


def _positive(inputs: Inputs) -> Inputs:
    """Weights above 0, so that every score is."""
    return inputs._replace(weights=inputs.weights.abs().clamp(min=0.01))


def _near_ties(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """BOUNDARY positions just above rank topk and as many just below, apart by one of MARGINS."""
    inputs = _positive(inputs)
    above = torch.arange(2 * BOUNDARY) < BOUNDARY
    for margin, row in zip(MARGINS, reference(inputs).rows, strict=True):
        near = row.order[inputs.topk - BOUNDARY : inputs.topk + BOUNDARY]
        near = near[torch.randperm(2 * BOUNDARY, generator=rng)]
        scores = row.scores[near]
        band = 2.0 * SPEC.tolerances[0].limit * row.magnitudes[near].mean()
        wanted = scores.median() + torch.where(above, 0.5, -0.5) * margin * band
        _multiply(inputs, row.indices[near], wanted / scores)
    return inputs


def _one_bin(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Scores that agree in their upper 16 bits, sign and exponent included, and fill the lower
    ones: all of them in the first row, two thirds in the second, where the others are clear winners
    and losers in equal numbers."""
    for i, row in enumerate(reference(inputs).rows):
        bits = 0x46000000 + torch.randint(2**16, row.indices.shape, generator=rng)
        scores = bits.int().view(torch.float32)
        if i == 1:
            place = torch.randperm(scores.shape[0], generator=rng)
            sixth = scores.shape[0] // 6
            scores[place[:sixth]] *= 1.5 + torch.rand(sixth, generator=rng)
            scores[place[-sixth:]] *= torch.rand(sixth, generator=rng).clamp(0.1, 0.9)
        _set(inputs, row, scores)
    return inputs


def _few_winners(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """100 positive scores among exact zeros (keys and queries of opposite sign, relu): the boundary
    lies in the plateau, whose lowest positions are the answer."""
    inputs = _positive(inputs)
    for row in reference(inputs).rows:
        winners = row.indices[torch.randperm(row.indices.shape[0], generator=rng)[:100]]
        _multiply(inputs, winners, -1.0)
    return inputs


def _winners_together(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """The topk best in one piece, at the front, at the back and at a random place, and as every
    third position: all of them in the share of few blocks, or of few lanes."""
    inputs = _positive(inputs)
    topk, length = inputs.topk, int(inputs.seq_lens[0])
    start = int(torch.randint(length - topk, (), generator=rng))
    pieces = (
        slice(0, topk),
        slice(length - topk, length),
        slice(start, start + topk),
        slice(0, length, 3),
    )
    for piece, row in zip(pieces, reference(inputs).rows, strict=True):
        _multiply(inputs, row.indices[piece], 8.0)
    return inputs


def _lone_winner(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """One score far above all others: at the first position, at the last one, which is alone on its
    page, on either side of a page's edge and anywhere."""
    inputs = _positive(inputs)
    length = int(inputs.seq_lens[0])
    anywhere = int(torch.randint(length, (), generator=rng))
    places = (0, length - 1, PAGE_SIZE - 1, PAGE_SIZE, anywhere)
    for place, row in zip(places, reference(inputs).rows, strict=True):
        _multiply(inputs, row.indices[place], 8.0)
    return inputs


def _no_weight(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Every score is 0 since every weight is, or -0.0 in the second row."""
    weights = torch.zeros_like(inputs.weights)
    weights[1::2] = -0.0
    return inputs._replace(weights=weights)


def _scale_extremes(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Subnormal scales in the first row, scores near the end of float32 and beyond it in the
    second, both and normal ones in the third."""
    kinds = ((1e-36, 1e-37), (1e30, 1e36, 1e38), (1e-36, 1.0, 1e30, 1e36, 0.0))
    for factors, row in zip(kinds, reference(inputs).rows, strict=True):
        which = torch.randint(len(factors), row.indices.shape, generator=rng)
        _multiply(inputs, row.indices, torch.tensor(factors)[which])
    return inputs


_PAGES = 384
_EDGES = (63, 64, 65, 127, 129, 1984, 2047, 2111, 2112, 2113)

STRATA: dict[str, Stratum] = {
    "no_rows": _listed("empty"),
    "around_topk": _listed("short"),  # 0, 1, 2047, 2048, 2049, 2112
    "page_edges": Stratum(Case("page-edges", _EDGES, 34, 192, tail="junk")),
    "no_positions": _listed("no-positions"),
    "no_pages": _listed("no-pages"),
    "impossible_lengths": _listed("impossible-lengths"),
    "stale_tails": _listed("poisoned"),  # junk entries, NaN wherever no row reaches
    "invalid_pages": _listed("invalid-pages"),
    "repeated_pages": _listed("repeated-pages"),
    "all_equal": _listed("equal"),
    "all_zero": _listed("zero"),
    "no_weight": Stratum(Case("no-weight", (2500, 2049), 40, 128), _no_weight),
    "zero_plateau": _listed("plateau"),
    "few_winners": Stratum(Case("few-winners", (8320,), 130, 130, keys="zero"), _few_winners),
    "negative_weights": Stratum(Case("negative", (3000, 2100), 47, 128, weights="negative")),
    "zero_weights": _listed("zero-weights"),  # beside negative ones; half of the scales negative
    "negative_scales": _listed("signed"),
    "crowded": _listed("crowded"),
    "one_bin": Stratum(Case("one-bin", (4096, 6144), 96, 160, keys="equal"), _one_bin),
    "near_ties": Stratum(Case("near-ties", (4200,) * len(MARGINS), 66, _PAGES), _near_ties),
    "winners_together": Stratum(Case("together", (6144,) * 4, 96, _PAGES), _winners_together),
    "lone_winner": Stratum(Case("lone-winner", (4161,) * 5, 66, _PAGES), _lone_winner),
    "scale_extremes": Stratum(Case("extremes", (3000,) * 3, 47, 160), _scale_extremes),
    "wide_scores": Stratum(Case("wide", (5248, 2880), 82, 160, keys="lognormal")),
    "nonfinite": _listed("nonfinite"),
}
