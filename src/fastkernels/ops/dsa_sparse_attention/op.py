"""The public function of dsa_sparse_attention."""

from __future__ import annotations

from typing import Literal

import torch

from fastkernels.core import dispatch, torch_ops
from fastkernels.core.route import Operator
from fastkernels.ops.dsa_sparse_attention.problem import Inputs, bind
from fastkernels.ops.dsa_sparse_attention.routes import ROUTES
from fastkernels.ops.dsa_sparse_attention.spec import SPEC


def dsa_sparse_attention(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    sparse_indices: torch.Tensor,
    sm_scale: float,
    *,
    lse_base: Literal[2, "e"] = 2,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent attention over the cache rows that each token's indices name; returns (output, lse).

    q_nope: [T, H, 512] bfloat16.   q_pe: [T, H, 64] bfloat16.   H heads, any number.
    ckv_cache: [pages, page_size, 512] bfloat16, keys and values.
    kpe_cache: [pages, page_size, 64] bfloat16.   Strides of pages and rows are free: two views of
    one [pages, page_size, 576] buffer are read in place. Other widths than 512 and 64 are accepted.
    sparse_indices: [T, K] int32, page * page_size + offset. An index < 0 or beyond the cache is
    padding, wherever it stands; a repeated index counts each time.
    sm_scale: float, factor of the logits (1 / sqrt(192) for DeepSeek-V3.2).

    lse_base: base of lse's logarithm, 2 (as in the definition) or "e" (natural).
    out: (output, lse).   workspace: uint8, see fastkernels.workspace_size.

    output: [T, H, 512] bfloat16.   lse: [T, H] float32, log of the sum of exp(logit). A token
    without a valid index has output 0 and lse -inf.

    Equations and sources: ops/dsa_sparse_attention/README.md.
    Raises ArgumentError, UnsupportedProblem, NotWarmedUp.
    """
    inputs = Inputs(q_nope, q_pe, ckv_cache, kpe_cache, sparse_indices, sm_scale, lse_base)
    if torch.compiler.is_compiling():
        output, lse = torch_ops.call(SPEC, inputs, out, workspace)
    else:
        output, lse = dispatch.run(OPERATOR, bind(inputs, out, workspace))
    return output, lse


OPERATOR = Operator(SPEC, ROUTES, dsa_sparse_attention)
