"""Peers of dsa_sparse_attention, all from the wheel of vLLM 0.33.0 and called as its backends for
sparse latent attention call them. Their lse is natural; rows without a valid index they give other
values than ours, so that calls with such a row are refused."""

from __future__ import annotations

import math
from functools import partial
from importlib import import_module
from typing import Any

import torch

from bench.peers import Call, Peer
from fastkernels.ops.dsa_sparse_attention.problem import Inputs

FA3 = "vllm.vllm_flash_attn"
FLASHMLA = "vllm.third_party.flashmla.flash_mla_interface"


def bind_fa3(inputs: Inputs, mode: str) -> Call:
    """FlashAttention-3 with pages of one row: a token is a sequence of one query whose pages are
    its valid indices. The output is given; splits and schedule are left to the call, as vLLM
    leaves them.
    """
    attend = import_module(FA3).flash_attn_varlen_func
    tokens, topk = inputs.sparse_indices.shape
    offsets = torch.arange(tokens + 1, dtype=torch.int32, device=inputs.q_pe.device)
    output = torch.empty(inputs.q_nope.shape, dtype=torch.bfloat16, device=offsets.device)
    pages, lengths = _prefix(inputs)
    _require_valid(lengths)
    call = partial(
        attend, inputs.q_pe, _rows(inputs.kpe_cache)[:, None, None],
        _rows(inputs.ckv_cache)[:, None, None], q_v=inputs.q_nope, cu_seqlens_q=offsets,
        max_seqlen_q=1, max_seqlen_k=topk, softmax_scale=inputs.sm_scale, causal=False, out=output,
        return_softmax_lse=True, fa_version=3,
    )  # fmt: skip
    last: list[Any] = [None]

    def run() -> None:
        last[0] = call(block_table=pages, seqused_k=lengths)

    def adapt_and_run() -> None:
        own_pages, own_lengths = _prefix(inputs)
        last[0] = call(block_table=own_pages, seqused_k=own_lengths)

    def outputs() -> tuple[torch.Tensor, torch.Tensor]:
        return last[0][0], _lse(last[0][1].T, inputs)

    return Call(run, outputs, adapt_and_run=adapt_and_run)


def bind_flashmla(inputs: Inputs, mode: str, with_lengths: bool = False) -> Call:
    """FlashMLA's kernel for sparse prefill, the only one of it that takes a bfloat16 cache. It
    masks indices outside the cache; the output is given.

    `with_lengths`: it walks over the valid indices alone instead of over all columns, as vLLM has
    it; for this they are compacted to a prefix.
    """
    attend = import_module(FLASHMLA).flash_mla_sparse_fwd
    output = torch.empty(inputs.q_nope.shape, dtype=torch.bfloat16, device=inputs.q_nope.device)
    _require_valid(_prefix(inputs)[1])
    last: list[Any] = [None]

    def adapted() -> tuple[torch.Tensor, ...]:
        queries = torch.cat([inputs.q_nope, inputs.q_pe], dim=2)
        cache = torch.cat([_rows(inputs.ckv_cache), _rows(inputs.kpe_cache)], dim=1)
        if with_lengths:
            return queries, cache, *_prefix(inputs)
        return queries, cache, inputs.sparse_indices

    def call(
        queries: torch.Tensor,
        cache: torch.Tensor,
        indices: torch.Tensor,
        lengths: torch.Tensor | None = None,
    ) -> None:
        last[0] = attend(
            queries, cache[:, None], indices[:, None], inputs.sm_scale, d_v=output.shape[2],
            topk_length=lengths, out=output,
        )  # fmt: skip

    def outputs() -> tuple[torch.Tensor, torch.Tensor]:
        found, _, lse = last[0]
        return found, _lse(lse, inputs)

    return Call(partial(call, *adapted()), outputs, adapt_and_run=lambda: call(*adapted()))


def _rows(cache: torch.Tensor) -> torch.Tensor:
    """[pages * page_size, D], never a copy: raises where pages are padded."""
    return cache.view(-1, cache.shape[2])


def _prefix(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """`(indices [T, K], lengths [T])`, int32: each token's valid indices first, in their order,
    then 0, since a page table names pages."""
    indices = inputs.sparse_indices
    num_rows = inputs.ckv_cache.shape[0] * inputs.ckv_cache.shape[1]
    is_valid = (indices >= 0) & (indices < num_rows)
    is_valid, order = is_valid.byte().sort(dim=1, descending=True, stable=True)
    return indices.gather(1, order) * is_valid, is_valid.sum(dim=1, dtype=torch.int32)


def _require_valid(lengths: torch.Tensor) -> None:
    empty = (lengths == 0).nonzero()
    if empty.numel():
        raise ValueError(f"token {int(empty[0])} has no valid index")


def _lse(natural: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """[T, H], in the base that was asked for."""
    return natural / math.log(2.0) if inputs.lse_base == 2 else natural


_COMPACTED = "valid indices compacted to a prefix, counted"
_CONCATENATED = "caches concatenated, queries concatenated"

PEERS = (
    Peer(
        "fa3", "vllm", FA3, "0.33.0", {"default": "pages of 1, q_v"}, bind_fa3, adapted=_COMPACTED,
    ),
    Peer(
        "flashmla", "vllm", FLASHMLA, "0.33.0", {"default": "sparse_fwd"}, bind_flashmla,
        adapted=_CONCATENATED,
    ),
    Peer(
        "flashmla_lengths", "vllm", FLASHMLA, "0.33.0", {"default": "sparse_fwd, topk_length"},
        partial(bind_flashmla, with_lengths=True), adapted=f"{_CONCATENATED}; {_COMPACTED}",
    ),
)  # fmt: skip
