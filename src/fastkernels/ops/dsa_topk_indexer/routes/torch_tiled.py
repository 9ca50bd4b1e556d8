"""Score tiles of pages in float32, then one top-k per row over keys that are unique; any device,
any number of heads: the safe route.

The score and the position are packed into one int64, so equal scores cannot tie and the selection
is deterministic whatever algorithm torch.topk uses. A tile of `row_tile` rows and `page_tile` pages
needs about `row_tile * page_tile * 64 * (4 * num_index_heads + 650)` bytes, the ranks of a row tile
`row_tile * max_num_pages * 64 * 50`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastkernels.core.route import ANY_DEVICE, Route, require_positive
from fastkernels.ops.dsa_topk_indexer.problem import Inputs
from fastkernels.ops.dsa_topk_indexer.spec import KEY_BYTES, PAGE_BYTES, PAGE_KEY_BYTES, PAGE_SIZE

_INT32 = torch.iinfo(torch.int32)
_LOW_BITS = 2**32 - 1


@dataclass(frozen=True)
class Config:
    """row_tile, page_tile: rows, and pages of each, that are scored at once."""

    row_tile: int = 8
    page_tile: int = 64

    def __post_init__(self) -> None:
        require_positive(self)


def launch(
    inputs: Inputs,
    outputs: tuple[torch.Tensor, ...],
    workspace: torch.Tensor | None,
    config: Config,
) -> None:
    (topk_indices,) = outputs
    num_pages, max_num_pages = inputs.k_index_cache_fp8.shape[0], inputs.block_table.shape[1]
    num_positions = max_num_pages * PAGE_SIZE
    if num_pages == 0 or max_num_pages == 0:
        topk_indices.fill_(-1)
        return
    count = min(inputs.topk, num_positions)
    topk_indices[:, count:].fill_(-1)
    for first in range(0, topk_indices.shape[0], config.row_tile):
        rows = slice(first, first + config.row_tile)
        pages = inputs.block_table[rows].long()  # [r, max_num_pages]
        is_page = (pages >= 0) & (pages < num_pages)
        is_candidate = is_page[..., None].repeat(1, 1, PAGE_SIZE).flatten(1)  # [r, num_positions]
        position = torch.arange(num_positions, device=pages.device)
        is_candidate &= position < inputs.seq_lens[rows, None]
        if num_positions <= inputs.topk:  # every candidate is returned
            ranks = torch.zeros_like(is_candidate, dtype=torch.int64)
        else:
            scores = _score(inputs, rows, torch.where(is_page, pages, 0), config.page_tile)
            ranks = _ranks(scores)
        best = _best(ranks, is_candidate, position, count)
        chosen = torch.where(best < 0, 0, best)
        indices = pages.gather(1, chosen // PAGE_SIZE) * PAGE_SIZE + chosen % PAGE_SIZE
        topk_indices[rows, :count].copy_(torch.where(best < 0, -1, indices))


def _score(inputs: Inputs, rows: slice, pages: torch.Tensor, page_tile: int) -> torch.Tensor:
    """Scores [r, num_positions] float32; `pages` [r, max_num_pages] lie inside the cache."""
    num_rows, max_num_pages = pages.shape
    query = inputs.q_index_fp8[rows].float()  # [r, H, 128]
    weights = inputs.weights[rows, :, None]  # [r, H, 1]
    scores = query.new_empty((num_rows, max_num_pages * PAGE_SIZE))
    for first in range(0, max_num_pages, page_tile):
        tile = inputs.k_index_cache_fp8[pages[:, first : first + page_tile]]
        raw = tile.reshape(num_rows, -1, PAGE_BYTES)  # [r, p, 8448] bytes
        keys = raw[..., :PAGE_KEY_BYTES].view(torch.float8_e4m3fn).float()
        keys = keys.reshape(num_rows, -1, KEY_BYTES)  # [r, n, 128]
        scale = raw[..., PAGE_KEY_BYTES:].contiguous().view(torch.float32).reshape(num_rows, 1, -1)
        # The magnitude of a finite scale comes last, so that nothing overflows before the sum does;
        # its sign decides relu, and an infinite or NaN scale acts where the formula has it.
        is_finite = scale.isfinite()
        before, after = (
            torch.where(is_finite, scale.sign(), scale),
            torch.where(is_finite, scale.abs(), 1.0),
        )
        terms = torch.bmm(query, keys.transpose(1, 2)).mul_(before).relu_().mul_(weights)
        columns = slice(first * PAGE_SIZE, first * PAGE_SIZE + terms.shape[2])
        torch.mul(terms.sum(1), after[:, 0], out=scores[:, columns])
    return scores


def _ranks(scores: torch.Tensor) -> torch.Tensor:
    """Integers (int64, within int32) in the order of the scores: NaN on top, -0.0 equal to +0.0."""
    bits = (scores + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ _INT32.max, bits)
    return torch.where(scores.isnan(), _INT32.max, ordered).long()


def _best(
    ranks: torch.Tensor, is_candidate: torch.Tensor, position: torch.Tensor, count: int
) -> torch.Tensor:
    """The `count` best positions of each row, best first, then -1 where candidates run out."""
    lowest = _INT32.min  # below the rank of -inf
    packed = torch.where(is_candidate, ranks, lowest) * 2**32 + (_LOW_BITS - position)
    best = packed.topk(count, dim=1).values
    return torch.where(best >> 32 == lowest, -1, _LOW_BITS - (best & _LOW_BITS))


ROUTE = Route(
    "torch_tiled",
    "torch",
    ANY_DEVICE,
    Config(),
    launch,
    candidates={"row_tile": (2, 8, 32), "page_tile": (16, 64, 256)},
)
