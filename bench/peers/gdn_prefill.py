"""Peers of gdn_prefill. Both keep the state as we do, [N, Hv, V, K] float32."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from bench.peers import Call, Peer
from fastkernels.ops._shared.gdn import gates
from fastkernels.ops.gdn_prefill.problem import Inputs


def bind_flashinfer(inputs: Inputs, mode: str) -> Call:
    """FlashInfer takes the gates as float32, alpha = g itself rather than its logarithm; its own
    switches for raw gates make them of ours with a dozen torch operations (`adapt_and_run`).

    Outputs are given. No `max_seqlen`, since our call has none either: on sm_90 it shortens a grid
    of blocks that have nothing to do. `backend="flashinfer"` is what "auto" ends at there.
    """
    from flashinfer.gdn_prefill import chunk_gated_delta_rule as prefill

    state = inputs.state
    assert state is not None
    log_g, beta = gates(inputs.A_log, inputs.a, inputs.dt_bias, inputs.b)
    live = state if mode == "functional" else state.clone()
    output = torch.empty_like(inputs.v)
    new_state = torch.empty_like(state) if mode == "functional" else live
    call = partial(
        prefill, q=inputs.q, k=inputs.k, v=inputs.v, scale=inputs.scale or None,
        initial_state=live, output_final_state=True, cu_seqlens=inputs.cu_seqlens, output=output,
        output_state=new_state, state_indices=inputs.read_indices, backend="flashinfer",
    )  # fmt: skip
    return Call(
        partial(call, g=log_g.exp().float(), beta=beta.float()),
        lambda: (output, new_state),
        (lambda: None) if live is state else (lambda: live.copy_(state)),
        partial(
            call, g=inputs.a, beta=inputs.b, use_gate_in_kernel=True, beta_is_logit=True,
            A_log=inputs.A_log, dt_bias=inputs.dt_bias,
        ),
    )  # fmt: skip


def bind_fla(inputs: Inputs, mode: str) -> Call:
    """FLA's chunked kernels over one batch of all tokens; they make the gates themselves, and
    allocate both outputs. What they read of the offsets on the host they keep for these tensors."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as prefill

    assert mode == "functional"
    last: list[Any] = [None]
    q, k, v, a, b = (x.unsqueeze(0) for x in (inputs.q, inputs.k, inputs.v, inputs.a, inputs.b))

    def run() -> None:
        last[0] = prefill(
            q, k, v, g=a, beta=b, scale=inputs.scale or None, initial_state=inputs.state,
            output_final_state=True, state_v_first=True, cu_seqlens=inputs.cu_seqlens,
            use_gate_in_kernel=True, A_log=inputs.A_log, dt_bias=inputs.dt_bias,
            use_beta_sigmoid_in_kernel=True,
        )  # fmt: skip

    return Call(run, lambda: (last[0][0][0], last[0][1]))


PEERS = (
    Peer(
        "flashinfer", "flashinfer-python", "flashinfer", "0.7.4",
        {"functional": "chunk", "inplace": "inplace", "pool": "pool"}, bind_flashinfer,
        adapted="gates precomputed, float32",
    ),
    Peer("fla", "fla-core", "fla", "0.6.0", {"functional": "chunk"}, bind_fla),
)  # fmt: skip
