"""Inputs that implementations of dsa_sparse_attention get wrong, by name: what a candidate is
judged on beside its workloads. Where a list in `inputs` has them already, its case is taken."""

from __future__ import annotations

import torch

from fastkernels.ops._shared.adversarial import Draws
from fastkernels.ops.dsa_sparse_attention.inputs import CORNER, Case, distinct, make_inputs
from fastkernels.ops.dsa_sparse_attention.problem import Inputs


class Stratum(Draws):
    make_inputs = staticmethod(make_inputs)


def _listed(name: str) -> Stratum:
    return Stratum(next(case for case in CORNER if case.name == name))


def _row(cache: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return cache[index // cache.shape[1], index % cache.shape[1]]


def _interleaved(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Every second index is -1."""
    indices = inputs.sparse_indices.clone()
    indices[:, ::2] = -1
    return inputs._replace(sparse_indices=indices)


def _empty_tiles(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Runs of -1 that fill whole tiles of 64 to 512 indices, the first ones among them: a running
    maximum is still -inf when the first valid index comes."""
    indices = inputs.sparse_indices.clone()
    topk = indices.shape[1]
    for token, (first, stop) in enumerate(((0, topk - 1), (0, 1024), (512, 1536), (64, topk))):
        indices[token, first:stop] = -1
    return inputs._replace(sparse_indices=indices)


def _one_anywhere(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """One valid index a token: in the first and in the last column, and at a random one."""
    indices = torch.full_like(inputs.sparse_indices, -1)
    tokens, topk = indices.shape
    columns = torch.randint(topk, (tokens,), generator=rng)
    columns[:2] = torch.tensor([0, topk - 1])
    indices[torch.arange(tokens), columns] = inputs.sparse_indices[:, 0]
    return inputs._replace(sparse_indices=indices)


def _all_negative(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Every logit near -1e4: a maximum that starts at 0 makes all weights vanish."""
    index = inputs.sparse_indices[:, 0].long()
    return inputs._replace(
        q_nope=(-64.0 * _row(inputs.ckv_cache, index))[:, None].expand_as(inputs.q_nope).clone(),
        q_pe=(-64.0 * _row(inputs.kpe_cache, index))[:, None].expand_as(inputs.q_pe).clone(),
    )


def _ascending(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Indices in the order of their logits, which span hundreds: every tile rescales what came
    before by a factor that underflows; the second token's fall, and only the first tile counts."""
    q_nope = (16.0 * inputs.q_nope[:, :1]).expand_as(inputs.q_nope).clone()
    q_pe = (16.0 * inputs.q_pe[:, :1]).expand_as(inputs.q_pe).clone()
    indices = inputs.sparse_indices.clone()
    for token, row in enumerate(inputs.sparse_indices.long()):
        logits = _row(inputs.ckv_cache, row).float() @ q_nope[token, 0].float()
        logits += _row(inputs.kpe_cache, row).float() @ q_pe[token, 0].float()
        indices[token] = indices[token, logits.argsort(descending=token % 2 == 1)]
    return inputs._replace(q_nope=q_nope, q_pe=q_pe, sparse_indices=indices)


def _one_dominates(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """The query is 4 times one of the valid keys: all weight on it, wherever it stands."""
    tokens = torch.arange(inputs.sparse_indices.shape[0])
    column = torch.randint(inputs.sparse_indices.shape[1], tokens.shape, generator=rng)
    index = inputs.sparse_indices[tokens, column].long()
    return inputs._replace(
        q_nope=(4.0 * _row(inputs.ckv_cache, index))[:, None].expand_as(inputs.q_nope).clone(),
        q_pe=(4.0 * _row(inputs.kpe_cache, index))[:, None].expand_as(inputs.q_pe).clone(),
    )


def _cancelling(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Equal logits, and rows of the cache in pairs of opposite sign: the output is 0."""
    ckv = inputs.ckv_cache.clone()
    ckv[:, 1::2] = -ckv[:, ::2]
    half = inputs.sparse_indices.shape[1] // 2
    pairs = 2 * torch.stack(
        [distinct(ckv.shape[0] * ckv.shape[1] // 2, half, rng) for _ in inputs.sparse_indices]
    )
    return inputs._replace(
        q_nope=torch.zeros_like(inputs.q_nope),
        q_pe=torch.zeros_like(inputs.q_pe),
        ckv_cache=ckv,
        sparse_indices=torch.cat([pairs, pairs + 1], dim=1).int(),
    )


_PAGES = 64  # 4096 rows

STRATA: dict[str, Stratum] = {
    "no_tokens": _listed("empty"),
    "all_invalid": _listed("all-invalid"),
    "first_token_invalid": _listed("first-invalid"),
    "one_index": Stratum(Case("one-anywhere", 6, num_pages=_PAGES), _one_anywhere),
    "interleaved": Stratum(Case("interleaved", 2, num_pages=_PAGES), _interleaved),
    "scattered": _listed("scattered"),
    "empty_tiles": Stratum(Case("empty-tiles", 4, num_pages=_PAGES), _empty_tiles),
    "outside": _listed("outside"),
    "around_tiles": Stratum(
        Case("around-tiles", 8, num_pages=_PAGES, valid=(1, 63, 64, 65, 127, 129, 2047, 2048))
    ),
    "repeated": _listed("repeated"),
    "identical_keys": _listed("identical"),
    "huge_logits": _listed("huge"),
    "all_logits_negative": Stratum(
        Case("all-negative", 2, num_pages=_PAGES, contents="identical"), _all_negative
    ),
    "ascending_logits": Stratum(Case("ascending", 2, num_pages=_PAGES), _ascending),
    "one_dominates": Stratum(Case("one-dominates", 4, num_pages=_PAGES), _one_dominates),
    "cancelling": Stratum(Case("cancelling", 2, num_pages=_PAGES), _cancelling),
    "poisoned": _listed("poisoned"),
    "no_pages": _listed("no-pages"),
    "one_page": _listed("one-page"),
    "packed_caches": _listed("strided-packed"),
}
