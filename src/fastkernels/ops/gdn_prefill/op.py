"""The public function of gdn_prefill."""

from __future__ import annotations

from typing import Any

import torch

from fastkernels import envs
from fastkernels.core import dispatch, torch_ops
from fastkernels.core.extension import LaunchFailed
from fastkernels.core.outputs import empty_like
from fastkernels.core.route import Operator
from fastkernels.ops.gdn_prefill.problem import Inputs, bind
from fastkernels.ops.gdn_prefill.routes import ROUTES
from fastkernels.ops.gdn_prefill.spec import SPEC

_NAME = SPEC.name


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
    is_compiling = torch.compiler.is_compiling()
    if workspace is None and not is_compiling:
        results = _enter(
            q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale,
            read_indices, write_indices, inplace, out,
        )  # fmt: skip
        if results is not None:
            return results
    inputs = Inputs(
        q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale,
        read_indices, write_indices, inplace,
    )  # fmt: skip
    if is_compiling or torch_ops.is_traced(inputs):
        output, new_state = torch_ops.call(SPEC, inputs, out, workspace)
    else:
        output, new_state = dispatch.run(OPERATOR, bind(inputs, out, workspace))
    return output, new_state


def _enter(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor | None,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float | None,
    read_indices: torch.Tensor | None,
    write_indices: torch.Tensor | None,
    inplace: bool,
    out: Any,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The short way of a call whose sizes were served before, as in gdn_decode's op.py; a workspace
    is allocated by the library. None, with nothing launched, where `bind` has to look."""
    way = dispatch.short_way(_NAME)
    if way is None or envs.check_values():
        return None
    new_state: torch.Tensor | None = None
    try:
        if (inplace is not False and inplace is not True) or (
            scale is not None and type(scale) is not float and type(scale) is not int
        ):
            return None
        if inplace or read_indices is not None:
            if state is None:
                return None
            output = empty_like(v) if out is None else out
        elif out is None:
            output = empty_like(v)
            num_seqs = cu_seqlens.size(0) - 1
            if state is None:
                shape = (num_seqs, v.size(1), v.size(2), v.size(2))
                new_state = v.new_empty(shape, dtype=torch.float32)
            elif state.size(0) == num_seqs:
                new_state = empty_like(state)
            else:  # a pool without indices, of any size
                return None
        else:
            output, new_state = out
            # To the library, no new_state means that the state is updated where it lies.
            if type(out) is not tuple or new_state is None:
                return None
        if torch.is_grad_enabled() and any(
            tensor is not None and tensor.requires_grad
            for tensor in (q, k, v, state, A_log, a, dt_bias, b, output, new_state)
        ):
            return None
        # The library would read the values without their sign; of bfloat16 there are no such views.
        if A_log.is_neg() or dt_bias.is_neg() or (state is not None and state.is_neg()):
            return None
        is_served = way.call(
            0, q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale or 0.0, read_indices,
            write_indices, output, new_state, None,
        )  # fmt: skip
    except LaunchFailed as error:
        inputs = Inputs(
            q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale,
            read_indices, write_indices, inplace,
        )  # fmt: skip
        key = bind(inputs, out, None).key
        raise dispatch.launch_error(key, dispatch.select(OPERATOR, key), error) from error
    except torch.OutOfMemoryError:
        raise
    except Exception:  # not what the types say: `bind` has the words
        return None
    if not is_served:
        return None
    return output, state if new_state is None else new_state  # type: ignore[return-value]


OPERATOR = Operator(SPEC, ROUTES, gdn_prefill)
