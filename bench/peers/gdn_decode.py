"""Peers of gdn_decode. Both keep the state as we do, [.., V, K] float32, and compute the gates
themselves, so that neither needs adapted inputs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from bench.peers import Call, Peer
from fastkernels.ops.gdn_decode.problem import Inputs


def bind_flashinfer(inputs: Inputs, mode: str) -> Call:
    """FlashInfer always updates a state. The functional form is a pool of 2 B slots of which the
    first B are read and the others written.

    The output is given: without one the call fills a new one with zeros, in a kernel of its own.
    `backend="flashinfer"` is what "auto" ends at on sm_90, without an exception raised and caught
    in every call.
    """
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose as decode

    state = inputs.state
    assert state is not None
    batch_size = inputs.q.shape[0]
    output = torch.empty_like(inputs.v)
    run = partial(
        decode, q=inputs.q, k=inputs.k, v=inputs.v, state=None, A_log=inputs.A_log, a=inputs.a,
        dt_bias=inputs.dt_bias, b=inputs.b, scale=inputs.scale or None, output=output,
        use_qk_l2norm=False, backend="flashinfer",
    )  # fmt: skip
    if mode == "functional":
        pool = torch.cat([state, torch.zeros_like(state)])
        slots = torch.arange(2 * batch_size, dtype=torch.int32, device=pool.device)
        read, write = slots[:batch_size].clone(), slots[batch_size:].clone()
        run = partial(
            run, initial_state=pool, initial_state_indices=read, output_state_indices=write
        )
        return Call(run, lambda: (output, pool[batch_size:]))
    live = state.clone()
    if mode == "inplace":
        run = partial(run, state=live)
    else:
        run = partial(run, initial_state=live, initial_state_indices=inputs.read_indices)
    return Call(run, lambda: (output, live), lambda: live.copy_(state))


def bind_fla(inputs: Inputs, mode: str) -> Call:
    """FLA's recurrent kernel over one token; it allocates both outputs."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as recurrent

    assert mode == "functional"
    last: list[Any] = [None]

    def run() -> None:
        last[0] = recurrent(
            inputs.q, inputs.k, inputs.v, g=inputs.a, beta=inputs.b, scale=inputs.scale or None,
            initial_state=inputs.state, output_final_state=True, use_gate_in_kernel=True,
            A_log=inputs.A_log, dt_bias=inputs.dt_bias, use_beta_sigmoid_in_kernel=True,
            state_v_first=True,
        )  # fmt: skip

    return Call(run, lambda: last[0])


PEERS = (
    Peer(
        "flashinfer", "flashinfer-python", "flashinfer", "0.7.4",
        {"functional": "pool", "inplace": "inplace", "pool": "pool"}, bind_flashinfer,
    ),
    Peer("fla", "fla-core", "fla", "0.6.0", {"functional": "fused_recurrent"}, bind_fla),
)  # fmt: skip
