"""The oracle of gdn_decode: the equations in float64, row by row, and how outputs are judged."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastkernels.ops._shared.compare import Error, official, relative_rows, unchanged
from fastkernels.ops._shared.gdn import gates, resolve_scale
from fastkernels.ops.gdn_decode.problem import Inputs
from fastkernels.ops.gdn_decode.spec import SPEC


@dataclass(frozen=True)
class Expected:
    """float64 outputs, and the same rows from absolute values (`kappa`) as yardstick.

    In pool form `new_state` is the whole pool; slots in `kept` must keep their bits.
    """

    output: torch.Tensor
    new_state: torch.Tensor
    output_kappa: torch.Tensor
    new_state_kappa: torch.Tensor
    kept: torch.Tensor

    def judge(self, outputs: tuple[torch.Tensor, ...]) -> list[Error]:
        """Ours: worst (row, head) of the output and of the state, and what must keep its bits."""
        output, new_state = outputs
        return [
            relative_rows(SPEC.tolerances[0], output, self.output, self.output_kappa, row_dims=1),
            relative_rows(
                SPEC.tolerances[1], new_state, self.new_state, self.new_state_kappa, row_dims=2
            ),
            unchanged("new_state", new_state, self.new_state, self.kept),
        ]

    def judge_official(self, outputs: tuple[torch.Tensor, ...]) -> list[Error]:
        return [
            official(SPEC.tolerances[0], outputs[0], self.output),
            official(SPEC.tolerances[1], outputs[1], self.new_state),
        ]


def step(
    S: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token of many heads, in float64: (S', o, kappa of S', kappa of o). S: [.., V, K]; g and
    beta: [..]; q, k, v: [.., K or V]."""
    g, k, q = g[..., None, None], k[..., None], q[..., None]
    decayed = torch.where(g > 0, g * S, 0.0)  # an infinite state is forgotten, too
    u = beta[..., None, None] * (v[..., None] - g * (S @ k))
    S_new = decayed + u * k.mT
    S_kappa = decayed.abs() + u.abs() * k.abs().mT
    o, o_kappa = scale * (S_new @ q), abs(scale) * (S_kappa @ q.abs())
    return S_new, o[..., 0], S_kappa, o_kappa[..., 0]


# What fits into a CPU's cache; on a GPU a launch takes longer than a row.
_ROWS_AT_ONCE = {"cpu": 4, "cuda": 256}


def reference(inputs: Inputs, device: torch.device | str = "cpu") -> Expected:
    """Runs on `device`, where the result stays; `inputs` are not changed."""
    x = Inputs._make(t.detach().to(device) if isinstance(t, torch.Tensor) else t for t in inputs)
    batch_size, _, num_q_heads, head_size = x.q.shape
    num_v_heads = x.v.shape[2]
    log_g, beta = gates(x.A_log, x.a[:, 0], x.dt_bias, x.b[:, 0])
    group = num_v_heads // num_q_heads
    q, k = (t[:, 0].double().repeat_interleave(group, dim=1) for t in (x.q, x.k))

    if x.state is None:
        shape = (batch_size, num_v_heads, head_size, head_size)
        before = torch.zeros(shape, dtype=torch.float64, device=device)
    else:
        before = x.state.double()
    num_slots = before.shape[0]
    row = torch.arange(batch_size, device=device)
    read = row if x.read_indices is None else x.read_indices.long()
    write = read if x.write_indices is None else x.write_indices.long()
    row = row[(read >= 0) & (read < num_slots)]  # the others are padding
    g, v, scale = log_g.exp(), x.v[:, 0].double(), resolve_scale(x.scale, head_size)

    output = torch.zeros(x.v.shape, dtype=torch.float64, device=device)
    after, after_kappa = before.clone(), torch.zeros_like(before)
    output_kappa = torch.zeros_like(output)
    kept = torch.ones(num_slots, dtype=torch.bool, device=device)
    for i in row.split(_ROWS_AT_ONCE[before.device.type]):
        S, o, S_kappa, o_kappa = step(before[read[i]], g[i], beta[i], q[i], k[i], v[i], scale)
        output[i, 0], output_kappa[i, 0] = o, o_kappa
        is_stored = (write[i] >= 0) & (write[i] < num_slots)
        slot = write[i][is_stored]
        after[slot], after_kappa[slot], kept[slot] = S[is_stored], S_kappa[is_stored], False
    return Expected(output, after, output_kappa, after_kappa, kept)
