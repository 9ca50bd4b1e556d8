"""Fast operators of DeepSeek-V3.2 and Qwen3-Next for PyTorch inference.

Importing this package touches no GPU and loads no kernel.
"""

from fastkernels.catalog import explain, force_route, warmup, workspace_size
from fastkernels.core.dispatch import reload_tables
from fastkernels.errors import (
    ArgumentError,
    FallbackError,
    FastkernelsError,
    LaunchError,
    NotWarmedUp,
    TableError,
    UnsupportedProblem,
)
from fastkernels.ops.dsa_sparse_attention.op import dsa_sparse_attention
from fastkernels.ops.dsa_topk_indexer.op import dsa_topk_indexer
from fastkernels.ops.gdn_decode.op import gdn_decode
from fastkernels.ops.gdn_prefill.op import gdn_prefill
from fastkernels.ops.moe_fp8_block_scale.op import moe_fp8_block_scale
from fastkernels.version import __version__

__all__ = [
    "ArgumentError",
    "FallbackError",
    "FastkernelsError",
    "LaunchError",
    "NotWarmedUp",
    "TableError",
    "UnsupportedProblem",
    "__version__",
    "dsa_sparse_attention",
    "dsa_topk_indexer",
    "explain",
    "force_route",
    "gdn_decode",
    "gdn_prefill",
    "moe_fp8_block_scale",
    "reload_tables",
    "warmup",
    "workspace_size",
]
