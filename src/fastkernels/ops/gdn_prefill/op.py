"""The public function of gdn_prefill."""

from __future__ import annotations

import torch

from fastkernels.core import dispatch, torch_ops
from fastkernels.core.route import Operator
from fastkernels.ops.gdn_prefill.problem import Inputs, bind
from fastkernels.ops.gdn_prefill.routes import ROUTES
from fastkernels.ops.gdn_prefill.spec import SPEC


def gdn_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor | None,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float | None = None,
    *,
    read_indices: torch.Tensor | None = None,
    write_indices: torch.Tensor | None = None,
    inplace: bool = False,
    out: tuple[torch.Tensor, torch.Tensor] | torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule over each sequence; returns (output, new_state).

    q, k: [T, Hk, K] bfloat16, used as given: no normalisation inside.
    v: [T, Hv, V] bfloat16, Hv a multiple of Hk, V = K.
    state: [N, Hv, V, K] float32, K contiguous: what each sequence starts from; read only unless in
    place or in pool form; None is zeros.   A_log, dt_bias: [Hv] float32.
    a, b: [T, Hv] bfloat16, raw projections (softplus and sigmoid happen inside).
    cu_seqlens: [N + 1] int64 or int32 on the device of q: sequence i is tokens
    cu_seqlens[i] : cu_seqlens[i + 1]. An empty sequence keeps its state. Tokens of no sequence give
    output 0.   scale: float; None and 0.0 mean K ** -0.5.

    inplace: update `state` and return it as new_state.
    read_indices, write_indices: [N] int32 or int64, any stride: pool form, `state` is
    [slots, Hv, V, K] and is updated and returned. Sequence i starts from slot read_indices[i] and
    leaves its state in write_indices[i] (default: the same). Read -1 is padding: output 0, nothing
    written. Write -1: the state is not stored. Two sequences writing one slot, or one reading what
    another writes, is undefined.
    out: (output, new_state); output alone in place and in pool form.
    workspace: uint8, see fastkernels.workspace_size.

    Equations and sources: ops/gdn_prefill/README.md.
    Raises ArgumentError, UnsupportedProblem, NotWarmedUp.
    """
    inputs = Inputs(
        q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale,
        read_indices, write_indices, inplace,
    )  # fmt: skip
    if torch.compiler.is_compiling():
        output, new_state = torch_ops.call(SPEC, inputs, out, workspace)
    else:
        output, new_state = dispatch.run(OPERATOR, bind(inputs, out, workspace))
    return output, new_state


OPERATOR = Operator(SPEC, ROUTES, gdn_prefill)
