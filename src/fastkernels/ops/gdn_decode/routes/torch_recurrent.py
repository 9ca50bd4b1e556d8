"""Batched torch operations in float32, gates in float64; any geometry: the safe route."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastkernels.core.route import ANY_DEVICE, Route
from fastkernels.ops._shared.gdn import gates, load_rows, resolve_scale, store_rows
from fastkernels.ops.gdn_decode.problem import Inputs


@dataclass(frozen=True)
class Config:
    """No knobs: a decode step is one pass over the state."""


def launch(
    inputs: Inputs,
    outputs: tuple[torch.Tensor, ...],
    workspace: torch.Tensor | None,
    config: Config,
) -> None:
    output, new_state = outputs
    batch_size, _, num_v_heads, head_size = output.shape
    if batch_size == 0:
        return
    log_g, beta = gates(inputs.A_log, inputs.a[:, 0], inputs.dt_bias, inputs.b[:, 0])
    g, beta = (
        log_g.exp().float()[..., None, None],
        beta.float()[..., None],
    )  # [B, Hv, 1, 1], [B, Hv, 1]
    group = num_v_heads // inputs.q.shape[2]
    q = inputs.q[:, 0].float().repeat_interleave(group, dim=1)[..., None]  # [B, Hv, K, 1]
    k = inputs.k[:, 0].float().repeat_interleave(group, dim=1)[..., None]
    v = inputs.v[:, 0].float()

    valid = None
    if inputs.read_indices is not None:
        assert inputs.state is not None
        state, valid = load_rows(inputs.state, inputs.read_indices)
        state = state.mul_(g)
    elif inputs.state is not None:
        state = inputs.state * g
    else:
        state = v.new_zeros((batch_size, num_v_heads, head_size, head_size))

    u = beta * (v - torch.matmul(state, k)[..., 0])  # [B, Hv, V]
    state.addcmul_(u[..., None], k.transpose(-1, -2))
    result = torch.matmul(state, q)[..., 0] * resolve_scale(inputs.scale, head_size)

    if valid is None:
        new_state.copy_(state)
    else:
        assert inputs.read_indices is not None
        write = inputs.read_indices if inputs.write_indices is None else inputs.write_indices
        store_rows(new_state, write, state, valid)
        result = torch.where(valid[:, None, None], result, 0.0)
    output.copy_(result[:, None])


ROUTE = Route("torch_recurrent", "torch", ANY_DEVICE, Config(), launch)
