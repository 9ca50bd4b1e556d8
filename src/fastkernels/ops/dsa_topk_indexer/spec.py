"""Twin of the contest definition `dsa_topk_indexer_fp8_h64_d128_topk2048_ps64`, with what we accept
beyond it: any number of heads and any top-k.

The definition's constraint `topk <= max_num_pages * page_size` is not checked: short rows end
in -1.
"""

from __future__ import annotations

from fastkernels.core.spec import Axis, OpSpec, ScalarSpec, TensorSpec, Tolerance

_CACHE_HINT = (
    "a page is 64 rows of 128 e4m3 bytes, then 64 float32 scales, "
    "as [num_pages, page_size=64, 1, 132] bytes"
)

SPEC = OpSpec(
    name="dsa_topk_indexer",
    definition="dsa_topk_indexer_fp8_h64_d128_topk2048_ps64",
    axes=(
        Axis("batch_size", "rows, one query token each"),
        Axis("num_index_heads", "heads of the indexer", value=64, is_open=True, at_least=1),
        Axis("index_head_dim", "width of a query and a key", value=128),
        Axis("page_size", "positions per page", value=64),
        Axis("topk", "indices per row", value=2048, is_open=True, at_least=1, at_most=2**31 - 1),
        Axis("max_num_pages", "columns of the block table"),
        Axis("num_pages", "pages of the cache", at_most=2**31 // 64),
        Axis("kv_cache_num_heads", "key heads", value=1),
        Axis("head_dim_with_scale", "bytes per position: key and scale", value=132),
    ),
    inputs=(
        TensorSpec(
            "q_index_fp8", ("batch_size", "num_index_heads", "index_head_dim"), ("float8_e4m3fn",)
        ),
        TensorSpec(
            "k_index_cache_fp8",
            ("num_pages", "page_size", "kv_cache_num_heads", "head_dim_with_scale"),
            ("int8", "uint8"),
            dense=3,
            hint=_CACHE_HINT,
        ),
        TensorSpec("weights", ("batch_size", "num_index_heads"), ("float32",)),
        TensorSpec("seq_lens", ("batch_size",), ("int32",), dense=0),
        TensorSpec("block_table", ("batch_size", "max_num_pages"), ("int32",), dense=0),
    ),
    outputs=(TensorSpec("topk_indices", ("batch_size", "topk"), ("int32",)),),
    options=(ScalarSpec("topk", "int", default=2048, doc="width of the output"),),
    tolerances=(Tolerance("topk_indices", "score_band", 16 * 2.0**-24),),
)

PAGE_SIZE = 64
KEY_BYTES = 128
PAGE_KEY_BYTES = PAGE_SIZE * KEY_BYTES
PAGE_BYTES = PAGE_SIZE * (KEY_BYTES + 4)
