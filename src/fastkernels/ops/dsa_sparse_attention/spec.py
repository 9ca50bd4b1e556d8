"""Twin of the contest definition `dsa_sparse_attention_h16_ckv512_kpe64_topk2048_ps64`, with what
we accept beyond it: any number of heads and of indices per token, any widths, any page size."""

from __future__ import annotations

from fastkernels.core.spec import Axis, OpSpec, ScalarSpec, TensorSpec, Tolerance

_CACHE_HINT = (
    "FP8 caches are not supported yet: dequantise to bfloat16 "
    "ckv [num_pages, page_size, head_dim_ckv] and kpe [num_pages, page_size, head_dim_kpe]"
)
_INDEX_HINT = (
    "one row per token of page * page_size + offset, -1 for padding; "
    "squeeze an axis of key-value heads"
)

SPEC = OpSpec(
    name="dsa_sparse_attention",
    definition="dsa_sparse_attention_h16_ckv512_kpe64_topk2048_ps64",
    axes=(
        Axis("num_tokens", "query tokens of this call"),
        Axis("num_qo_heads", "query heads", value=16, is_open=True, at_least=1),
        Axis("head_dim_ckv", "compressed key-value width", value=512, is_open=True, at_least=1),
        Axis("head_dim_kpe", "positional key width", value=64, is_open=True, at_least=1),
        Axis("page_size", "tokens per page", value=64, is_open=True, at_least=1),
        Axis("topk", "indices per token", value=2048, is_open=True, at_least=1),
        Axis("num_pages", "pages of the cache"),
    ),
    inputs=(
        TensorSpec("q_nope", ("num_tokens", "num_qo_heads", "head_dim_ckv"), ("bfloat16",)),
        TensorSpec("q_pe", ("num_tokens", "num_qo_heads", "head_dim_kpe"), ("bfloat16",)),
        TensorSpec(
            "ckv_cache",
            ("num_pages", "page_size", "head_dim_ckv"),
            ("bfloat16",),
            hint=_CACHE_HINT,
        ),
        TensorSpec(
            "kpe_cache",
            ("num_pages", "page_size", "head_dim_kpe"),
            ("bfloat16",),
            hint=_CACHE_HINT,
        ),
        TensorSpec("sparse_indices", ("num_tokens", "topk"), ("int32",), hint=_INDEX_HINT),
        ScalarSpec("sm_scale", "float", doc="factor of the logits"),
    ),
    outputs=(
        TensorSpec("output", ("num_tokens", "num_qo_heads", "head_dim_ckv"), ("bfloat16",)),
        TensorSpec("lse", ("num_tokens", "num_qo_heads"), ("float32",)),
    ),
    options=(
        ScalarSpec(
            "lse_base", "choice", default=2, choices=(2, "e"), doc="base of lse's logarithm"
        ),
    ),
    tolerances=(
        Tolerance("output", "rel_frobenius", 6e-3),
        Tolerance("lse", "absolute", 1e-4),
    ),
)
