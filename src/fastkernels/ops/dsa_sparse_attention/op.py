"""The public function of dsa_sparse_attention."""

from __future__ import annotations

from typing import Any, Literal

import torch

from fastkernels import envs
from fastkernels.core import dispatch, torch_ops
from fastkernels.core.extension import LaunchFailed
from fastkernels.core.outputs import empty_like
from fastkernels.core.route import Operator
from fastkernels.ops.dsa_sparse_attention.problem import Inputs, bind
from fastkernels.ops.dsa_sparse_attention.routes import ROUTES
from fastkernels.ops.dsa_sparse_attention.routes.library import LSE_SCALE
from fastkernels.ops.dsa_sparse_attention.spec import SPEC

_NAME = SPEC.name


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
    is_compiling = torch.compiler.is_compiling()
    if workspace is None and not is_compiling:
        results = _enter(
            q_nope, q_pe, ckv_cache, kpe_cache, sparse_indices, sm_scale, lse_base, out
        )
        if results is not None:
            return results
    inputs = Inputs(q_nope, q_pe, ckv_cache, kpe_cache, sparse_indices, sm_scale, lse_base)
    if is_compiling or torch_ops.is_traced(inputs):
        output, lse = torch_ops.call(SPEC, inputs, out, workspace)
    else:
        output, lse = dispatch.run(OPERATOR, bind(inputs, out, workspace))
    return output, lse


def _enter(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    sparse_indices: torch.Tensor,
    sm_scale: Any,
    lse_base: Any,
    out: Any,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The short way of a call whose sizes were served before, as in gdn_decode's op.py. None, with
    nothing launched, where `bind` has to look."""
    way = dispatch.short_way(_NAME)
    if way is None or envs.check_values():
        return None
    try:
        if (type(sm_scale) is not float and type(sm_scale) is not int) or (
            type(lse_base) is not int and type(lse_base) is not str
        ):
            return None
        lse_scale = LSE_SCALE[lse_base]
        if out is None:
            output = empty_like(q_nope)
            lse = q_nope.new_empty(q_nope.shape[:2], dtype=torch.float32)
        else:
            output, lse = out
            # The library would write the values without their sign; of bfloat16 there are no such
            # views.
            if type(out) is not tuple or lse.is_neg():
                return None
        if torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (q_nope, q_pe, ckv_cache, kpe_cache, output, lse)
        ):
            return None
        is_served = way.call(
            0, q_nope, q_pe, ckv_cache, kpe_cache, sparse_indices, sm_scale, lse_scale, output, lse,
            None,
        )  # fmt: skip
    except LaunchFailed as error:
        inputs = Inputs(q_nope, q_pe, ckv_cache, kpe_cache, sparse_indices, sm_scale, lse_base)
        key = bind(inputs, out, None).key
        raise dispatch.launch_error(key, dispatch.select(OPERATOR, key), error) from error
    except torch.OutOfMemoryError:
        raise
    except Exception:  # not what the types say: `bind` has the words
        return None
    return (output, lse) if is_served else None


OPERATOR = Operator(SPEC, ROUTES, dsa_sparse_attention)
